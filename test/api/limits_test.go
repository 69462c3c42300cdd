package api_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// slowest is how long the answer to one body may take on a busy machine.
const slowest = 10 * time.Second

// Bodies that no client sends by mistake get a clear answer of the 400s, and the
// server goes on.
func TestUnreasonableBodies(t *testing.T) {
	config := server(t)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	post := func(body string) (int, string) {
		t.Helper()
		resp, err := client.Post(config.Host+"/api/v1/namespaces/default/services", "application/json", bytes.NewBufferString(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		var status struct{ Message string }
		_ = json.Unmarshal(b, &status)
		return resp.StatusCode, status.Message
	}
	service := func(meta, spec string) string {
		return `{"apiVersion":"v1","kind":"Service","metadata":{` + meta + `},"spec":{` + spec + `}}`
	}
	samePorts := strings.TrimSuffix(strings.Repeat(`{"name":"a","port":80},`, 10_000), ",")
	for _, c := range []struct {
		what, body string
		code       int
	}{
		{"4 MB", service(`"name":"x","annotations":{"a":"`+strings.Repeat("a", 4<<20)+`"}`,
			`"ports":[{"port":80}]`), http.StatusRequestEntityTooLarge},
		{"2 MB of annotations", service(`"name":"x","annotations":{"a":"`+strings.Repeat("a", 2<<20)+`"}`,
			`"ports":[{"port":80}]`), http.StatusUnprocessableEntity},
		{"10,000 times one port", service(`"name":"x"`, `"ports":[`+samePorts+`]`), http.StatusUnprocessableEntity},
		{"a name of 300 letters", service(`"name":"`+strings.Repeat("a", 300)+`"`, `"ports":[{"port":80}]`), http.StatusUnprocessableEntity},
		{"deep lists", service(`"name":"x"`, `"ports":`+strings.Repeat("[", 100_000)), http.StatusBadRequest},
		{"deep objects", strings.Repeat(`{"a":`, 100_000) + "1" + strings.Repeat("}", 100_000), http.StatusBadRequest},
		{"a number of 10,000 digits", service(`"name":"x"`, `"ports":[{"port":`+strings.Repeat("9", 10_000)+`}]`), http.StatusBadRequest},
		{"not UTF-8", service(`"name":"x`+"\xff"+`"`, `"ports":[{"port":80}]`), http.StatusUnprocessableEntity},
		{"nothing", "", http.StatusBadRequest},
	} {
		start := time.Now()
		code, message := post(c.body)
		if took := time.Since(start); took > slowest {
			t.Errorf("%s: the answer took %s", c.what, took)
		}
		if code != c.code || message == "" {
			t.Errorf("%s: %d %.200q, want %d and a message", c.what, code, message, c.code)
		}
	}
	if code, message := post(service(`"name":"still-there"`, `"ports":[{"port":80}]`)); code != http.StatusCreated {
		t.Errorf("afterwards: %s", fmt.Sprint(code, message))
	}
}
