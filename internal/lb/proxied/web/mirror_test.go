package web

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/testbed"
)

// mirroring is a rig whose requests go to Pod a and, copied, to Pod b.
func mirroring(t *testing.T, a, b netip.AddrPort, r *rig) {
	t.Helper()
	r.front(map[string]netip.AddrPort{"a": a, "b": b}, `
metadata: {name: r, namespace: default}
spec:
  parentRefs: [{name: shop}]
  rules:
  - filters:
    - {type: RequestMirror, requestMirror: {backendRef: {name: b, port: 80}}}
    - {type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-set, value: by rule}]}}
    backendRefs: [{name: a, port: 80}]`)
}

// mirroredCount returns how many copies have a result.
func (r *rig) mirroredCount(result string) (n float64) {
	r.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.server.Collector())
	families, err := registry.Gather()
	r.Must(err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == "fairlead_lb_mirrored_requests_total" && strings.Contains(fmt.Sprint(l), `"`+result+`"`) {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// A mirror gets a copy of what the backend gets, whatever form the body comes in, and its answers go nowhere. A body that is too long
// reaches the backend, and is not copied.
func TestMirrorGetsCopies(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	text := func(q *http.Request) string {
		body, err := io.ReadAll(q.Body)
		if err != nil {
			t.Error(err)
		}
		return fmt.Sprint(q.Method, " ", q.Host, q.RequestURI, " ", q.Header.Get("X-Set"), " ", q.Header.Get("X-Forwarded-For") != "",
			" ", len(body), " ", strings.Trim(string(body), "x"))
	}
	copies := make(chan string, 10)
	pod := r.Web(func(w http.ResponseWriter, q *http.Request) { _, _ = io.WriteString(w, text(q)) })
	mirroring(t, pod, r.Web(func(w http.ResponseWriter, q *http.Request) {
		copies <- text(q)
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, strings.Repeat("y", 100_000))
	}), r)
	client := r.Client()
	for _, n := range []int{0, 10, 20_000, maxMirrorBody, -10, -20_000} { // negative ones without Content-Length
		body, size := strings.Repeat("x", max(n, -n)), max(n, -n)
		var from io.Reader = strings.NewReader(body)
		if n < 0 {
			from = struct{ io.Reader }{from}
		}
		q, err := http.NewRequestWithContext(t.Context(), "PUT", "http://"+r.At.String()+"/p?q=1", from)
		r.Must(err)
		q.Host = "web.example.com"
		answer, err := client.Do(q)
		r.Must(err)
		got, err := io.ReadAll(answer.Body)
		r.Must(err)
		_ = answer.Body.Close()
		want := fmt.Sprintf("PUT web.example.com/p?q=1 by rule true %d ", size)
		if string(got) != want || answer.StatusCode != http.StatusOK {
			t.Errorf("a body of %d: the client has %d, %q", n, answer.StatusCode, got)
		}
		select {
		case got := <-copies:
			if got != want {
				t.Errorf("a body of %d: the mirror has %q, want %q", n, got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("a body of %d: the mirror has nothing: %s", n, r.Logged)
		}
	}
	testbed.Until(t, "the count of answers", func() error {
		if n := r.mirroredCount("answered"); n != 6 {
			return fmt.Errorf("%v are answered", n)
		}
		return nil
	})
	for _, from := range []io.Reader{
		strings.NewReader(strings.Repeat("x", maxMirrorBody+1)), struct{ io.Reader }{strings.NewReader(strings.Repeat("x", 3*maxMirrorBody))},
	} {
		answer, err := client.Post("http://"+r.At.String()+"/", "text/plain", from)
		r.Must(err)
		got, err := io.ReadAll(answer.Body)
		r.Must(err)
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusOK || !strings.Contains(string(got), " true ") {
			t.Errorf("a long body: %d, %q", answer.StatusCode, got)
		}
	}
	if n := r.mirroredCount("dropped"); n != 2 || len(copies) > 0 {
		t.Errorf("%v long ones are dropped, and the mirror has %d", n, len(copies))
	}
}

// A mirror that is closed, silent, or never takes a body does not fail, delay or pile up requests: there is a bound of its copies.
func TestMirrorDoesNoHarm(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod := r.Web(func(w http.ResponseWriter, q *http.Request) { _, _ = io.Copy(w, q.Body) })
	client := r.Client()
	asks := func(times int) {
		t.Helper()
		for range times {
			answer, err := client.Post("http://"+r.At.String()+"/", "text/plain", strings.NewReader("body"))
			r.Must(err)
			if got, _ := io.ReadAll(answer.Body); answer.StatusCode != http.StatusOK || string(got) != "body" {
				t.Fatalf("%d %q", answer.StatusCode, got)
			}
			_ = answer.Body.Close()
		}
	}
	mirroring(t, pod, r.Free(), r)
	asks(3)
	testbed.Until(t, "the failures", func() error {
		if n := r.mirroredCount("failed"); n != 3 {
			return fmt.Errorf("%v have failed", n)
		}
		return nil
	})
	ends := make(chan struct{})
	silent := r.Pod(func(net.Conn) { <-ends })
	defer close(ends)
	mirroring(t, pod, silent, r)
	began := time.Now()
	asks(maxMirrors + 20)
	if took := time.Since(began); took < mirrorTime/2 && r.mirroredCount("dropped") < 20 { // otherwise the first ones have ended
		t.Errorf("%v are dropped", r.mirroredCount("dropped"))
	}
}
