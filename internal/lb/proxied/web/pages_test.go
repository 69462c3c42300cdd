package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// sorry is a default backend. It counts what it is asked, and answers with that: by status X-Code, or the one of the query.
type sorry struct{ had atomic.Int32 }

func (s *sorry) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	s.had.Add(1)
	body, _ := io.ReadAll(q.Body)
	h := q.Header
	status := 0
	_, _ = fmt.Sscan(h.Get("X-Code"), &status)
	if text := q.URL.Query().Get("page"); text != "" {
		_, _ = fmt.Sscan(text, &status)
	}
	w.Header().Set("Content-Type", "text/sorry")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, "%s %s %s code=%s uri=%s format=%s of=%s/%s/%s:%s id=%t body=%d cond=%q", q.Method, q.Host, q.RequestURI,
		h.Values("X-Code"), h.Values("X-Original-Uri"), h.Values("X-Format"), h.Get("X-Namespace"), h.Get("X-Ingress-Name"),
		h.Get("X-Service-Name"), h.Get("X-Service-Port"), h.Get("X-Request-Id") == "abc", len(body),
		h.Get("If-None-Match")+h.Get("Range")+h.Get("Content-Type"))
}

// erring is a Pod that answers with the status that the path ends with, and tells too much.
func erring(w http.ResponseWriter, q *http.Request) {
	_, _ = io.Copy(io.Discard, q.Body)
	status := 0
	_, _ = fmt.Sscan(q.URL.Path[strings.LastIndexByte(q.URL.Path, '/')+1:], &status)
	w.Header().Set("X-Secret", "stack")
	w.Header().Set("Set-Cookie", "of=the-pod")
	w.Header().Set("Www-Authenticate", `Basic realm="pod"`)
	w.WriteHeader(status)
	_, _ = io.WriteString(w, "panic: at line 7")
}

// newPagesRig returns a rig with an Ingress "shop" that has pages for 401, 404, 502 and 503, by a default backend.
func newPagesRig(t *testing.T, pod http.HandlerFunc, more map[string]string) (*rig, *sorry) {
	t.Helper()
	r := newRig(t, map[string]string{
		lbProtocol: "http", "fairlead.dev/lb-request-id": "true", "fairlead.dev/lb-access-log": "true",
	})
	page := &sorry{}
	r.auth = r.h2cPod(page.ServeHTTP)
	all := map[string]string{"shop": "default-backend: auth; custom-http-errors: 401,404,502,503"}
	for name, text := range more {
		all[name] = text
	}
	r.ingress(all, r.h2cPod(pod))
	return r, page
}

// A page takes the place of a Pod's answer with one of the codes, and of no other one: nothing of that answer is left, but for how to
// authenticate. The default backend is told what it answers for, gets no body, and its own answer stays, whatever its status.
func TestPagesTakeThePlaceOfErrors(t *testing.T) {
	r, page := newPagesRig(t, erring, map[string]string{"grpc": "backend-protocol: GRPC; default-backend: auth; custom-http-errors: 404"})
	const of = "of=default/shop/web:80 id=true body=0 cond=\"\""
	for _, version := range []int{1, 2} {
		client := r.clientOf(version)
		for _, c := range []struct {
			method, path, body string
			fields             []string
			status             int
			want               string
		}{
			{"GET", "/shop/404", "", nil, 404, "GET web.example.com / code=[404] uri=[/shop/404] format=[] " + of},
			{"GET", "/shop/503?a=b", "", []string{"Accept: text/html"}, 503,
				"GET web.example.com /?a=b code=[503] uri=[/shop/503?a=b] format=[text/html] " + of},
			{"POST", "/shop/404", "hello", []string{"Content-Type: a/b", "If-None-Match: x", "Range: bytes=0-1"}, 404,
				"GET web.example.com / code=[404] uri=[/shop/404] format=[] " + of},
			{"DELETE", "/shop/404", "", []string{"X-Code: 200", "X_code: 1", "X-Original-Uri: x", "X-Format: y"}, 404,
				"GET web.example.com / code=[404] uri=[/shop/404] format=[] " + of},
			{"GET", "/shop/404?page=200", "", nil, 200, "GET web.example.com /?page=200 code=[404] uri=[/shop/404?page=200] format=[] " + of},
			{"GET", "/shop/404?page=503", "", nil, 503, "GET web.example.com /?page=503 code=[404] uri=[/shop/404?page=503] format=[] " + of},
			{"GET", "/shop/401", "", nil, 401, "GET web.example.com / code=[401] uri=[/shop/401] format=[] " + of},
			{"HEAD", "/shop/404", "", nil, 404, ""},
			{"GET", "/shop/500", "", nil, 500, "panic: at line 7"}, {"GET", "/shop/200", "", nil, 200, "panic: at line 7"},
			{"POST", "/shop/404", "x", []string{"Content-Type: application/grpc+proto"}, 404,
				"GET web.example.com / code=[404] uri=[/shop/404] format=[] " + of}, // whose backend does not speak gRPC
			{"POST", "/grpc/404", "x", []string{"Content-Type: application/grpc+proto"}, 404, "panic: at line 7"},
			{"GET", "/grpc/404", "", []string{"Content-Type: application/grpc"}, 404,
				"GET web.example.com / code=[404] uri=[/grpc/404] format=[] of=default/grpc/web:80 id=true body=0 cond=\"\""},
			{"POST", "/grpc/404", "x", []string{"Content-Type: application/grpc-web"}, 404,
				"GET web.example.com / code=[404] uri=[/grpc/404] format=[] of=default/grpc/web:80 id=true body=0 cond=\"\""},
			{"GET", "/grpc/404", "", nil, 404,
				"GET web.example.com / code=[404] uri=[/grpc/404] format=[] of=default/grpc/web:80 id=true body=0 cond=\"\""},
		} {
			before := page.had.Load()
			var body io.Reader
			if c.body != "" {
				body = strings.NewReader(c.body)
			}
			answer, text := r.sends(client, c.method, c.path, body, append(c.fields, "X-Request-Id: abc")...)
			what := fmt.Sprintf("HTTP/%d, %s %s", version, c.method, c.path)
			if answer.StatusCode != c.status || text != c.want {
				t.Errorf("%s: %s %q, want %d %q", what, answer.Status, text, c.status, c.want)
			}
			h, own := answer.Header, strings.HasPrefix(c.want, "panic")
			if asked := page.had.Load() - before; asked != map[bool]int32{false: 1, true: 0}[own] {
				t.Errorf("%s: the default backend was asked %d times", what, asked)
			}
			if own != (h.Get("X-Secret") != "") || own != (h.Get("Set-Cookie") != "") || own == (h.Get("Content-Type") == "text/sorry") {
				t.Errorf("%s: %v", what, h)
			}
			if logins := len(h.Values("Www-Authenticate")); logins != map[bool]int{false: 0, true: 1}[own || c.status == 401] {
				t.Errorf("%s: %q", what, h.Values("Www-Authenticate"))
			}
		}
	}
	// The line has the status that the client has got.
	if last := r.awaitLines(30); !strings.Contains(last[0], " 404 404 ") || !strings.Contains(strings.Join(last, ""), " 200 200 ") {
		t.Errorf("%q", last)
	}
	const of4, of5 = `fairlead_lb_requests_total{class="4xx"`, `fairlead_lb_requests_total{class="5xx"`
	const end = `,namespace="default",service="web"}`
	if text := r.metrics(); !strings.Contains(text, of4+end+" 20") || !strings.Contains(text, of5+end+" 6") {
		t.Error(text)
	}
}

// Where Pods do not answer there is a page, too; without a default backend that answers, the client has the status in plain text. With
// disable-proxy-intercept-errors answers of Pods stay.
func TestPagesWithoutAnswers(t *testing.T) {
	cuts := func(w http.ResponseWriter, q *http.Request) {
		if strings.HasSuffix(q.URL.Path, "/cut") {
			panic(http.ErrAbortHandler)
		}
		erring(w, q)
	}
	r, page := newPagesRig(t, cuts, map[string]string{
		"own":  "default-backend: auth; custom-http-errors: 404,502; disable-proxy-intercept-errors: true",
		"none": "default-backend: auth; custom-http-errors: 404",
	})
	ask := func(path string) string {
		t.Helper()
		var out []string
		for _, version := range []int{1, 2} {
			answer, text := r.sends(r.clientOf(version), "POST", path, strings.NewReader("x"))
			text, _, _ = strings.Cut(text, " uri")
			out = append(out, fmt.Sprint(answer.StatusCode, " ", text))
		}
		if out[0] != out[1] {
			t.Errorf("%s: %q", path, out)
		}
		return out[0]
	}
	for path, want := range map[string]string{
		"/shop/cut": "502 GET web.example.com / code=[502]", "/own/cut": "502 GET web.example.com / code=[502]",
		"/own/404": "404 panic: at line 7", "/none/cut": "502 502 Bad Gateway", "/none/404": "404 GET web.example.com / code=[404]",
	} {
		if got := ask(path); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	r.endpoints("web", r.Free()) // which refuses connections
	if got := ask("/own/x"); !strings.HasPrefix(got, "502 GET") {
		t.Errorf("nobody listens: %q", got)
	}
	had := page.had.Load()
	r.endpoints("web") // then the default backend has the request itself
	if got := ask("/shop/x"); !strings.HasPrefix(got, "503 POST web.example.com /shop/x code=[503]") || page.had.Load() != had+2 {
		t.Errorf("no endpoint: %q", got)
	}
	r.endpoints("web", r.h2cPod(erring))
	for what, pods := range map[string][]netip.AddrPort{"none": nil, "refused": {r.Free()}} {
		r.endpoints("auth", pods...)
		if got := ask("/shop/404"); got != "404 404 Not Found" {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// An answer that never ends, and a body of a request that nobody reads, keep no page from a client. The connection to that Pod is closed;
// the one of a client of HTTP/1.1 too, and what it has sent of the body is no request.
func TestPagesForHalfMessages(t *testing.T) {
	gone := make(chan bool, 4)
	r, _ := newPagesRig(t, erring, nil)
	r.endpoints("web", r.Pod(func(c net.Conn) { // it reads no body
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		_, err := io.WriteString(c, "HTTP/1.1 503 No\r\nX-Secret: x\r\nContent-Length: 1000000000000\r\n\r\n")
		for text := make([]byte, 16<<10); err == nil; {
			_, err = c.Write(text)
		}
		gone <- true
	}))
	for _, version := range []int{1, 2} {
		answer, text := r.sends(r.clientOf(version), "GET", "/shop/endless", nil)
		if answer.StatusCode != http.StatusServiceUnavailable || !strings.HasPrefix(text, "GET web.example.com / code=[503]") ||
			answer.Header.Get("X-Secret") != "" {
			t.Errorf("HTTP/%d: %s %q", version, answer.Status, text)
		}
		testbed.Receive(t, "the end of the answer", gone)
		body, send := io.Pipe()
		go func() { _, _ = send.Write([]byte("half")) }()
		answer, text = r.sends(r.clientOf(version), "POST", "/shop/half", body)
		if _ = send.Close(); answer.StatusCode != http.StatusServiceUnavailable || !strings.Contains(text, "body=0") {
			t.Errorf("HTTP/%d, half a body: %s %q", version, answer.Status, text)
		}
		testbed.Receive(t, "the end of the answer", gone)
	}
	for _, expects := range []string{"", "Expect: 100-continue\r\n"} {
		c := r.Dial()
		_, err := fmt.Fprintf(c, "POST /shop/a HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n%s\r\n", expects)
		r.Must(err)
		in := bufio.NewReader(c)
		answer, err := http.ReadResponse(in, nil)
		r.Must(err)
		text, err := io.ReadAll(answer.Body)
		r.Must(err)
		if answer.StatusCode != http.StatusServiceUnavailable || !strings.HasPrefix(string(text), "GET a / code=[503] uri=[/shop/a]") {
			t.Errorf("%q: %s %q", expects, answer.Status, text)
		}
		_, _ = io.WriteString(c, "GET /shop/smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
		if rest, _ := io.ReadAll(in); len(rest) > 0 {
			t.Errorf("%q: a part of the body was answered: %q", expects, rest)
		}
		_ = c.Close()
	}
	testbed.Until(t, "the end of all requests", func() error {
		if n := r.engine.repeats.Load(); n != 0 {
			return fmt.Errorf("%d bytes are kept", n)
		}
		return nil
	})
}

// A Pod that answers while it waits for the body of a request gets no other request on the connection: it would take it for that body.
func TestPagesForRequestsThatWait(t *testing.T) {
	more := make(chan string, 4)
	pod := func(c net.Conn) {
		in := bufio.NewReader(c)
		q, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno")
		rest, _ := io.ReadAll(in)
		if q.Header.Get("Expect") != "" {
			more <- string(rest)
		}
	}
	r, _ := newPagesRig(t, erring, nil)
	r.endpoints("web", r.Pod(pod))
	c := r.Dial()
	_, err := io.WriteString(c, "POST /shop/missing HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\nExpect: 100-continue\r\n\r\n")
	r.Must(err)
	in := bufio.NewReader(c)
	answer, err := http.ReadResponse(in, nil)
	r.Must(err)
	if answer.StatusCode == http.StatusContinue { // the Pod has answered late
		answer, err = http.ReadResponse(in, nil)
		r.Must(err)
	}
	text, _ := io.ReadAll(answer.Body)
	if answer.StatusCode != http.StatusNotFound || !strings.HasPrefix(string(text), "GET a / code=[404] uri=[/shop/missing]") {
		t.Errorf("%s %q", answer.Status, text)
	}
	next, page := r.sends(r.clientOf(1), "GET", "/shop/next", nil)
	if next.StatusCode != http.StatusNotFound || !strings.Contains(page, "uri=[/shop/next]") {
		t.Errorf("the next request: %s %q", next.Status, page)
	}
	if rest := testbed.Receive(t, "the end of the connection", more); rest != "" {
		t.Errorf("the Pod has got %q for the body of another request", rest)
	}
}

// A request is repeated before there is a page, as its Ingress asks, and a page is asked for once. The connections to Pods and of clients
// are kept.
func TestPagesAfterRetries(t *testing.T) {
	var had, conns atomic.Int32
	page := &sorry{}
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.auth = r.Web(page.ServeHTTP)
	l := r.Listener()
	r.ingress(map[string]string{
		"shop": "default-backend: auth; custom-http-errors: 503; proxy-next-upstream: http_503; proxy-next-upstream-tries: 3",
	}, r.PodAt(l, func(c net.Conn) {
		conns.Add(1)
		in := bufio.NewReader(c)
		for {
			q, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, q.Body)
			had.Add(1)
			_, _ = io.WriteString(c, "HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno")
		}
	}))
	c := r.Dial()
	in := bufio.NewReader(c)
	const times = 5
	for range times {
		_, err := io.WriteString(c, "PUT /shop/a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello")
		r.Must(err)
		answer, err := http.ReadResponse(in, nil)
		r.Must(err)
		text, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != 503 || !strings.HasPrefix(string(text), "GET a / code=[503]") {
			t.Fatalf("%v, %s %q", err, answer.Status, text)
		}
	}
	if a, b, n := had.Load(), page.had.Load(), conns.Load(); a != 3*times || b != times || n > 2 {
		t.Errorf("the Pod has had %d requests by %d connections, and the default backend %d", a, n, b)
	}
	if n := r.counted("fairlead_lb_retries_total"); n != 2*times {
		t.Errorf("%v retries", n)
	}
}

// A client that leaves while the page is awaited keeps nothing.
func TestClientLeavesBeforeThePage(t *testing.T) {
	r, _ := newPagesRig(t, erring, nil)
	asked, ended := make(chan bool, 1), make(chan bool, 1)
	r.endpoints("auth", r.h2cPod(func(_ http.ResponseWriter, q *http.Request) {
		asked <- true
		select {
		case <-q.Context().Done():
			ended <- true
		case <-time.After(lbtest.Patience):
		}
	}))
	for _, version := range []int{1, 2} {
		client := r.clientOf(version)
		done := make(chan bool)
		go func() {
			defer close(done)
			client.Timeout = time.Second
			if answer, err := client.Get("http://" + r.At.String() + "/shop/404"); err == nil {
				_ = answer.Body.Close()
				t.Errorf("HTTP/%d: %s", version, answer.Status)
			}
		}()
		testbed.Receive(t, "the question for the page", asked)
		testbed.Receive(t, "its end", ended)
		<-done
	}
}

// A default backend answers with the status that its page is for. That is no failure of its Pods: none is ejected, also while it stands
// in for a backend without endpoints. As a backend of its own it is as any other, and pages between its errors do not help it.
func TestPagesEjectNoDefaultBackend(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-eject": "errors=2,share=100"})
		page := &sorry{}
		r.auth = r.Web(page.ServeHTTP)
		r.ingress(map[string]string{"shop": "default-backend: auth; custom-http-errors: 404,503"}, r.Web(erring))
		second := r.Web(page.ServeHTTP)
		r.endpoints("auth", r.auth, second)
		client := r.clientOf(version)
		asks := func(path string, want int) {
			t.Helper()
			if answer, text := r.sends(client, "GET", path, nil); answer.StatusCode != want || !strings.HasPrefix(text, "GET web.example.com") {
				t.Errorf("HTTP/%d: %s %q", version, answer.Status, text)
			}
		}
		ejections := func() float64 { return r.counted("fairlead_lb_endpoint_ejections_total") }
		for range 6 {
			asks("/shop/404?page=503", 503)
		}
		r.endpoints("web")
		for range 6 {
			asks("/shop/a", 503)
		}
		if n, had := ejections(), page.had.Load(); n != 0 || had != 12 {
			t.Errorf("HTTP/%d: %v ejections by %d pages", version, n, had)
		}
		if text := r.metrics(); !strings.Contains(text, `fairlead_lb_endpoint_requests_total{class="5xx",endpoint="`+second.String()+`"`) {
			t.Errorf("HTTP/%d: the pages are not counted: %s", version, text)
		}
		r.endpoints("web", r.auth, second)
		r.endpoints("auth")
		for range 6 {
			_, _ = r.sends(client, "GET", "/shop/a?page=500", nil)
		}
		if ejections() == 0 {
			t.Errorf("HTTP/%d: as a backend it is not ejected", version)
		}
		r.testMixedPages(client, page)
	}
}

// testMixedPages has the default backend also be the backend of /other. Its errors there eject it, as many in a row as are asked for:
// pages of an error between them do not count, and good pages end the row.
func (r *rig) testMixedPages(client *http.Client, page *sorry) {
	r.Helper()
	r.backends = map[string]string{"other": "service: {name: auth, port: {number: 8080}}"}
	r.auth = r.Web(page.ServeHTTP)
	r.ingress(map[string]string{"shop": "default-backend: auth; custom-http-errors: 404,503", "other": ""}, r.Web(erring))
	before, requests := r.counted("fairlead_lb_endpoint_ejections_total"), 18.0 // of the test so far
	asks := func(want float64, paths ...string) {
		r.Helper()
		for _, path := range paths {
			requests++
			if _, text := r.sends(client, "GET", path, nil); !strings.HasPrefix(text, "GET web.example.com") {
				r.Errorf("%s: %q", path, text)
			}
			testbed.Until(r, "the end of the request", func() error { // which comes after its answer
				if n := r.counted("fairlead_lb_requests_total"); n != requests {
					return fmt.Errorf("%v requests", n)
				}
				return nil
			})
		}
		if n := r.counted("fairlead_lb_endpoint_ejections_total") - before; n != want {
			r.Errorf("%v ejections after %q, want %v", n, paths, want)
		}
	}
	const failure, bad, good = "/other/a?page=500", "/shop/404?page=503", "/shop/404?page=200"
	asks(0, failure, good, failure, bad, bad)
	asks(1, failure)
}
