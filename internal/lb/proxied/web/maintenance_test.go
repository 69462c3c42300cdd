package web

import (
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
)

// A route in maintenance answers every request itself, of each method and version, also one with a body, and calls of gRPC in their form.
// Other routes go on, and so does it without the annotation.
func TestMaintenance(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	var had atomic.Int32
	pods := map[string]netip.AddrPort{"a": r.h2cPod(func(http.ResponseWriter, *http.Request) { had.Add(1) })}
	route := func(path, annotation string) string {
		return `{metadata: {name: ` + path + `, namespace: default, annotations: {fairlead.dev/maintenance: '` + annotation + `'}}, spec: {
  parentRefs: [{name: shop}], rules: [{matches: [{path: {value: /` + path + `}}], backendRefs: [{name: a, port: 80}],
    filters: [{type: CORS, cors: {allowOrigins: ["https://app.example"]}}]}]}}`
	}
	const page = "<h1>Back soon</h1>"
	r.front(pods, route("html", page), route("plain", "true"), route("json", `{"error": "soon"}`), route("off", "false"),
		route("long", strings.Repeat("x", 64<<10+1)))
	for _, version := range []int{1, 2} {
		client := r.clientOf(version)
		for _, c := range []struct {
			method, path, body string
			fields             []string
			status             int
			kind, want         string
		}{
			{"GET", "/html/x", "", nil, 503, "text/html; charset=utf-8", page},
			{"HEAD", "/html", "", nil, 503, "text/html; charset=utf-8", ""},
			{"POST", "/html", strings.Repeat("x", 100_000), []string{"Origin: https://app.example"}, 503, "text/html; charset=utf-8", page},
			{"GET", "/plain", "", nil, 503, "text/plain; charset=utf-8", "503 Service Unavailable"},
			{"DELETE", "/json", "", nil, 503, "application/json", `{"error": "soon"}`},
			{"GET", "/long", "", nil, 503, "text/plain; charset=utf-8", "503 Service Unavailable"},
			{"GET", "/off", "", nil, 200, "", ""},
		} {
			var body *strings.Reader
			answer, text := (*http.Response)(nil), ""
			if c.body == "" {
				answer, text = r.sends(client, c.method, c.path, nil, c.fields...)
			} else {
				body = strings.NewReader(c.body)
				answer, text = r.sends(client, c.method, c.path, body, c.fields...)
			}
			h := answer.Header
			if answer.StatusCode != c.status || text != c.want || h.Get("Content-Type") != c.kind {
				t.Errorf("HTTP/%d, %s %s: %s %q %v", version, c.method, c.path, answer.Status, text, h)
			}
			if (c.status == 503) != (h.Get("Retry-After") == "60" && h.Get("Cache-Control") == "no-store") {
				t.Errorf("HTTP/%d, %s %s: %v", version, c.method, c.path, h)
			}
			if c.body != "" && h.Get("Access-Control-Allow-Origin") != "https://app.example" {
				t.Errorf("HTTP/%d: a page of another origin cannot read it: %v", version, h)
			}
		}
	}
	if n := had.Load(); n != 2 {
		t.Errorf("the Pod has had %d requests", n)
	}
	answer, _ := r.sends(r.clientOf(2), "POST", "/html", strings.NewReader("12345"), "Content-Type: application/grpc", "Te: trailers")
	if answer.StatusCode != 200 || answer.Header.Get("Grpc-Status") != "14" || answer.Header.Get("Content-Type") != "application/grpc" {
		t.Errorf("a call: %s %v", answer.Status, answer.Header)
	}
	r.front(pods, route("html", ""))
	if answer, _ := r.sends(r.clientOf(1), "GET", "/html", nil); answer.StatusCode != 200 {
		t.Errorf("after the maintenance: %s", answer.Status)
	}
}
