package proxy

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
)

type failer struct{ t *testing.T }

func (f failer) Object(int, runtime.Object) { f.t.Error("an object was answered") }
func (f failer) Error(err error)            { f.t.Errorf("the proxy failed: %v", err) }

// The path of the subresource of a Service, as a client sees it.
const prefix = "/api/v1/namespaces/default/services/web/proxy"

func TestHandler(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/redirect":
			http.Redirect(w, r, "/there", http.StatusFound)
		case "/page":
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, `<a href="/there">x</a>`)
		default:
			_, _ = io.WriteString(w, r.Method+" "+r.URL.RequestURI()+" "+r.Header.Get("X-Forwarded-Uri"))
		}
	}))
	defer backend.Close()
	location, err := url.Parse(backend.URL)
	if err != nil {
		t.Fatal(err)
	}
	transport := newTransport()
	defer transport.CloseIdleConnections()
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler(*location, strings.TrimPrefix(r.URL.Path, prefix), transport, failer{t}).ServeHTTP(w, r)
	}))
	defer front.Close()
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	defer client.CloseIdleConnections()

	for _, c := range []struct {
		what, method, path string
		code               int
		body, location     string
	}{
		{"no path is redirected to the root", "GET", "", 301, "", prefix + "/"},
		{"no path, query kept", "GET", "?a=b", 301, "", prefix + "/?a=b"},
		{"root", "GET", "/", 200, "GET / " + prefix + "/", ""},
		{"path", "POST", "/a/b", 200, "POST /a/b " + prefix + "/a/b", ""},
		{"a slash at the end stays", "GET", "/a/", 200, "GET /a/ " + prefix + "/a/", ""},
		{"query", "DELETE", "/a?b=c&d", 200, "DELETE /a?b=c&d " + prefix + "/a", ""},
		{"redirects lead through the proxy", "GET", "/redirect", 302, "", prefix + "/there"},
		{"links lead through the proxy", "GET", "/page", 200, `<a href="` + prefix + `/there">x</a>`, ""},
	} {
		req, err := http.NewRequest(c.method, front.URL+prefix+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		// A location may name the host too.
		to := strings.TrimPrefix(resp.Header.Get("Location"), front.URL)
		if resp.StatusCode != c.code || c.body != "" && !strings.Contains(string(body), c.body) || to != c.location {
			t.Errorf("%s: %d %q to %q, want %d %q to %q", c.what, resp.StatusCode, body, to, c.code, c.body, c.location)
		}
	}
}

func TestParse(t *testing.T) {
	for id, want := range map[string]Target{
		"web": {Name: "web"}, "web:80": {Name: "web", Port: "80"}, "web:http": {Name: "web", Port: "http"},
		"https:web:443": {Scheme: "https", Name: "web", Port: "443"}, "https:web:": {Scheme: "https", Name: "web"},
		"http:web:80": {Scheme: "http", Name: "web", Port: "80"},
	} {
		got, err := parse("pod", id)
		if err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", id, got, err, want)
		}
	}
	for _, id := range []string{"ftp:web:80", "a:b:c:d", ""} {
		if got, err := parse("pod", id); err == nil {
			t.Errorf("%q: accepted as %v", id, got)
		}
	}
}

func TestCheckAddress(t *testing.T) {
	for ip, ok := range map[string]bool{
		"10.244.0.7": true, "fd00:10:244::7": true, "192.0.2.1": true,
		"": false, "127.0.0.1": false, "::1": false, "::ffff:127.0.0.1": false, "169.254.169.254": false,
		"fe80::1": false, "0.0.0.0": false, "224.0.0.1": false, "web": false,
	} {
		if err := CheckAddress(ip); (err == nil) != ok {
			t.Errorf("%q: %v, want allowed %v", ip, err, ok)
		}
	}
}

// Whoever asks is told what to do where a Pod cannot be reached, and not where the Pod
// itself refuses.
func TestUnreachable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	const want = "from the machine of the API server"
	if _, err := dial(t.Context(), "tcp", l.Addr().String()); err == nil || strings.Contains(err.Error(), want) {
		t.Errorf("no listener: %v", err)
	}
	// A link-local address without a zone: no packet is sent.
	if _, err := dial(t.Context(), "tcp", "[fe80::1]:80"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("no route: %v", err)
	}
}
