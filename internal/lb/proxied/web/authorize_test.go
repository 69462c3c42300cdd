package web

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/authz"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// authorized is a rig whose requests Pod b decides about, by a filter with more fields, and that Pod a gets. Paths below /in become
// ones below /out on their way.
func (r *rig) authorized(pod, auth netip.AddrPort, more string) {
	r.Helper()
	r.front(map[string]netip.AddrPort{"a": pod, "b": auth}, `
metadata: {name: r, namespace: default}
spec:
  parentRefs: [{name: shop}]
  rules:
  - matches: [{path: {value: /in}}]
    filters:
    - {type: URLRewrite, urlRewrite: {hostname: inner.example.com, path: {type: ReplacePrefixMatch, replacePrefixMatch: /out}}}
    - {type: ExternalAuth, externalAuth: {protocol: HTTP, backendRef: {name: b, port: 80}, `+more+`}}
    backendRefs: [{name: a, port: 80}]`)
}

// sends sends a request with fields "name: value", and returns the status, the fields of the answer, and its body.
func (r *rig) sends(c *http.Client, method, path string, body io.Reader, fields ...string) (*http.Response, string) {
	r.Helper()
	q, err := http.NewRequestWithContext(r.Context(), method, "http://"+r.At.String()+path, body)
	r.Must(err)
	q.Host = "web.example.com"
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ": ")
		q.Header[name] = append(q.Header[name], value)
	}
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	answer, err := c.Do(q)
	r.Must(err)
	text, err := io.ReadAll(answer.Body)
	r.Must(err)
	r.Must(answer.Body.Close())
	return answer, strings.TrimSpace(string(text))
}

// decider is an authorization server: the field Authorization is what it answers.
type decider struct {
	mu    sync.Mutex
	asked []string // methods, hosts, paths, and the names of some fields
}

func (d *decider) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body, _ := io.ReadAll(q.Body)
	text := fmt.Sprintf("%s %s%s", q.Method, q.Host, q.RequestURI)
	for _, name := range []string{
		"X-Ask", "X-Other", "X-User", "Cookie", "X-Original-Url", "X-Original-Method", "X-Real-Ip", "If-None-Match", "X_ask",
	} {
		if v := q.Header.Get(name); v != "" {
			text += " " + name + "=" + v
		}
	}
	if q.ContentLength != int64(len(body)) {
		text += fmt.Sprint(" length ", q.ContentLength)
	}
	if len(body) > 0 {
		text += fmt.Sprint(" body ", len(body))
	}
	d.mu.Lock()
	d.asked = append(d.asked, text)
	d.mu.Unlock()
	h := w.Header()
	switch verdict := q.Header.Get("Authorization"); verdict {
	case "alice", "bob":
		h.Set("X-User", verdict)
		h.Add("X-Group", "staff")
		h.Add("X-Group", verdict)
		h.Add("Set-Cookie", "session=of-"+verdict)
		h.Set("Content-Type", "application/verdict")
		_, _ = io.WriteString(w, "welcome")
	case "login":
		h.Set("Location", "https://login.example.com/?from="+q.RequestURI)
		h.Add("Set-Cookie", "csrf=1")
		w.WriteHeader(http.StatusFound)
	case "304":
		w.WriteHeader(http.StatusNotModified)
	case "204":
		w.WriteHeader(http.StatusNoContent)
	case "500":
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = io.WriteString(w, "a secret of the server")
	case "403":
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, "not you")
	case "404":
		w.WriteHeader(http.StatusNotFound)
	case "long":
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, strings.Repeat("x", authz.MaxBody+1))
	case "half":
		h.Set("Content-Length", "10")
		_, _ = io.WriteString(w, "half")
		panic(http.ErrAbortHandler)
	case "many":
		for i := range authz.MaxFields + 1 {
			h.Set(fmt.Sprint("X-", i), "x")
		}
	case "none":
		panic(http.ErrAbortHandler)
	default:
		h.Set("Www-Authenticate", "Bearer")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, "who are you?")
	}
}

// last returns what it was asked last.
func (d *decider) last() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.asked) == 0 {
		return ""
	}
	return d.asked[len(d.asked)-1]
}

// identified answers with what a Pod learns about its client.
func identified(w http.ResponseWriter, q *http.Request) {
	body, _ := io.ReadAll(q.Body)
	_, _ = fmt.Fprintf(w, "%s %s%s user=%q group=%q type=%q body=%d", q.Method, q.Host, q.RequestURI, q.Header["X-User"], q.Header["X-Group"],
		q.Header.Get("Content-Type"), len(body))
	if len(q.Trailer) > 0 {
		_, _ = fmt.Fprint(w, " ", q.Trailer)
	}
}

// A server decides about each request, also about each of several on a connection, by the URL that the client has sent. Only 200 lets
// it pass. What the server tells about the client a client cannot tell itself, and whatever goes wrong, no request passes.
func TestExternalAuth(t *testing.T) {
	began := time.Now()
	r := newRig(t, map[string]string{lbProtocol: "http"})
	auth := &decider{}
	r.authorized(r.Web(identified), r.Web(auth.ServeHTTP),
		`http: {path: /check/, allowedHeaders: [X-Ask], allowedResponseHeaders: [X-User, x-group]}`)
	for version := range 3 {
		if version == 0 {
			continue
		}
		client := r.clientOf(version)
		forged := []string{"X-User: root", "X_user: root", "X-Group: wheel", "X-Ask: me", "X-Other: you"}
		for _, c := range []struct {
			verdict, path string
			status        int
			want, asked   string
		}{
			{"alice", "/in/x?q=1", 200, `GET inner.example.com/out/x?q=1 user=["alice"] group=["staff" "alice"] type="" body=0`,
				"GET web.example.com/check/in/x?q=1 X-Ask=me"},
			{"alice", "/a/../in//%78", 200, `GET inner.example.com/out/x user=["alice"] group=["staff" "alice"] type="" body=0`,
				"GET web.example.com/check/in/x X-Ask=me"},
			{"", "/in", 401, "who are you?", "GET web.example.com/check/in X-Ask=me"},
			{"403", "/in", 403, "not you", ""},
			{"404", "/in", 404, "", ""},
			{"204", "/in", 403, "403 Forbidden", ""},
			{"304", "/in", 403, "403 Forbidden", ""},
			{"login", "/in", 302, "", ""},
			{"500", "/in", 503, "503 Service Unavailable", ""},
			{"none", "/in", 503, "503 Service Unavailable", ""},
			{"half", "/in", 503, "503 Service Unavailable", ""},
			{"many", "/in", 503, "503 Service Unavailable", ""},
			{"long", "/in", 401, "401 Unauthorized", ""},
			{"bob", "/in", 200, `GET inner.example.com/out user=["bob"] group=["staff" "bob"] type="" body=0`, ""},
		} {
			answer, got := r.sends(client, "GET", c.path, nil, append(forged, "Authorization: "+c.verdict)...)
			if answer.StatusCode != c.status || got != c.want {
				t.Errorf("HTTP/%d, %s: %d %q, want %d %q", version, c.verdict, answer.StatusCode, got, c.status, c.want)
			}
			if got := auth.last(); c.asked != "" && got != c.asked {
				t.Errorf("HTTP/%d, %s: the server was asked %q, want %q", version, c.verdict, got, c.asked)
			}
			h := answer.Header
			if c.status == 401 && h.Get("Www-Authenticate") != "Bearer" && c.verdict == "" || c.status == 302 && (h.Get("Location") == "" ||
				h.Get("Set-Cookie") != "csrf=1") || c.status == 200 && h.Get("Set-Cookie") != "" {
				t.Errorf("HTTP/%d, %s: fields %v", version, c.verdict, h)
			}
		}
		answer, _ := r.sends(client, "HEAD", "/in", nil, "Authorization: alice")
		if answer.StatusCode != 200 || auth.last() != "HEAD web.example.com/check/in" {
			t.Errorf("HEAD: %d, %q", answer.StatusCode, auth.last())
		}
		if answer, _ := r.sends(client, "HEAD", "/in", nil); answer.StatusCode != 401 {
			t.Errorf("HEAD without a right: %d", answer.StatusCode)
		}
		body := struct{ io.Reader }{strings.NewReader("x")} // of no known length
		q, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+r.At.String()+"/in", body)
		r.Must(err)
		q.Host, q.Header = "web.example.com", http.Header{"Authorization": {"alice"}}
		q.Trailer = http.Header{"X-User": {"root"}, "X_group": {"wheel"}, "X-Sum": {"1"}}
		answer, err = client.Do(q)
		r.Must(err)
		text, err := io.ReadAll(answer.Body)
		r.Must(err)
		if !strings.Contains(string(text), `user=["alice"]`) || !strings.Contains(string(text), "X-Sum:[1]") ||
			strings.Contains(string(text), "root") || strings.Contains(string(text), "wheel") {
			t.Errorf("HTTP/%d, with trailers: %s", version, text)
		}
		var running sync.WaitGroup
		for i := range 40 { // at a time, on one connection of HTTP/2
			running.Go(func() {
				verdict, want := "alice", 200
				if i%2 == 1 {
					verdict, want = "403", 403
				}
				answer, text := r.sends(client, "GET", "/in", nil, "Authorization: "+verdict)
				if answer.StatusCode != want || want == 200 && !strings.Contains(text, `user=["alice"]`) {
					t.Errorf("%s: %d, %s", verdict, answer.StatusCode, text)
				}
			})
		}
		running.Wait()
	}
	r.shows(`fairlead_lb_authorizations_total{namespace="default",result="undecided",service="web"} 6`)
	const warning = `level=WARN msg="cannot ask an authorization server`
	if n := strings.Count(r.Logged.String(), warning); n < 1 || n > 1+int(time.Since(began)/budget.WarnEach) {
		t.Errorf("%d warnings: %s", n, r.Logged)
	}
	r.endpoints("b", r.Free())
	if answer, _ := r.sends(r.clientOf(1), "GET", "/in", nil, "Authorization: alice"); answer.StatusCode != 503 {
		t.Errorf("without a Pod of the server: %d", answer.StatusCode)
	}
	r.endpoints("b")
	if answer, _ := r.sends(r.clientOf(2), "GET", "/in", nil, "Authorization: alice"); answer.StatusCode != 503 {
		t.Errorf("without an endpoint of the server: %d", answer.StatusCode)
	}
}

// With forwardBody the server gets the body, which the Pod then gets, too, in whatever form it comes. A longer one is refused, and so is
// one that comes too slowly.
func TestExternalAuthWithBody(t *testing.T) {
	const most = 30_000
	r := newRig(t, map[string]string{lbProtocol: "http"})
	auth := &decider{}
	r.authorized(r.Web(identified), r.Web(auth.ServeHTTP), fmt.Sprintf("http: {}, forwardBody: {maxSize: %d}", most))
	for _, version := range []int{1, 2} {
		client := r.clientOf(version)
		client.Transport.(*http.Transport).ExpectContinueTimeout = time.Hour
		for _, n := range []int{0, 10, 20_000, most, -10, -20_000, -most, most + 1, -most - 1, 5 * most, -5 * most} {
			size := max(n, -n)
			var from io.Reader = bytes.NewReader(make([]byte, size))
			if n < 0 {
				from = struct{ io.Reader }{from}
			}
			for _, c := range []struct {
				verdict string
				status  int
			}{{"alice", 200}, {"403", 403}} {
				if size > most {
					c.status = 413
				}
				fields := []string{"Authorization: " + c.verdict, "Content-Type: text/x"}
				if n == 20_000 {
					fields = append(fields, "Expect: 100-continue")
				}
				answer, got := r.sends(client, "POST", "/in", from, fields...)
				if answer.StatusCode != c.status {
					t.Errorf("HTTP/%d, %d bytes, %s: %d", version, n, c.verdict, answer.StatusCode)
				}
				want := fmt.Sprintf(`POST inner.example.com/out user=["alice"] group=["staff" "alice"] type="text/x" body=%d`, size)
				if c.status == 200 && got != want {
					t.Errorf("HTTP/%d, %d bytes: the Pod has %q, want %q", version, n, got, want)
				}
				if asked := fmt.Sprint("POST web.example.com/in body ", size); n != 0 && c.status == 200 && auth.last() != asked {
					t.Errorf("HTTP/%d, %d bytes: the server was asked %q", version, n, auth.last())
				}
				from = bytes.NewReader(make([]byte, size))
			}
		}
	}
	forgotten := func() {
		t.Helper()
		testbed.Until(t, "that no body is kept", func() error { // a request ends after its answer
			if n := r.engine.repeats.Load(); n != 0 {
				return fmt.Errorf("%d bytes are counted", n)
			}
			return nil
		})
	}
	forgotten()
	c := r.Dial()
	_, err := io.WriteString(c, "POST /in HTTP/1.1\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n")
	r.Must(err)
	if answer, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || answer.StatusCode != 400 {
		t.Errorf("a body with a wrong form: %v, %v", answer, err)
	}
	forgotten()
	c = r.Dial() // its body is read over the head
	_, err = fmt.Fprintf(c, "POST /in HTTP/1.1\r\nHost: web.example.com\r\nExpect: 100-continue\r\nContent-Length: 9000\r\n"+
		"Authorization: 403\r\nX-Padding: %s\r\n\r\n", strings.Repeat("x", 5000))
	r.Must(err)
	in := bufio.NewReader(c)
	if answer, err := http.ReadResponse(in, nil); err != nil || answer.StatusCode != 100 {
		t.Fatalf("who waits for 100: %v, %v", answer, err)
	}
	_, err = io.WriteString(c, "HEAD"+strings.Repeat("x", 8996))
	r.Must(err)
	answer, err := http.ReadResponse(in, nil)
	r.Must(err)
	if text, err := io.ReadAll(answer.Body); err != nil || string(text) != "not you" {
		t.Errorf("a body that begins with HEAD: %d %q, %v", answer.StatusCode, text, err)
	}
	forgotten()
	r.engine.repeats.Store(repeatMemory)
	if answer, _ := r.sends(r.clientOf(1), "POST", "/in", strings.NewReader("x"), "Authorization: alice"); answer.StatusCode != 503 {
		t.Errorf("with too many bodies: %d", answer.StatusCode)
	}
	r.engine.repeats.Store(0)
}

// A server that is silent, and a client that sends its body slowly, have a bounded time.
func TestExternalAuthIsBounded(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.askTime = 100 * time.Millisecond
	r.authorized(r.Web(identified), r.PodAt(r.Listener(), func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }),
		"http: {}, forwardBody: {maxSize: 100}")
	for _, version := range []int{1, 2} {
		if answer, _ := r.sends(r.clientOf(version), "GET", "/in", nil); answer.StatusCode != 503 {
			t.Errorf("HTTP/%d: %d", version, answer.StatusCode)
		}
	}
	c := r.Dial()
	_, err := io.WriteString(c, "POST /in HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 50\r\n\r\n")
	r.Must(err)
	got := make(chan int, 1)
	go func() {
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			got <- 0
			return
		}
		got <- answer.StatusCode
	}()
	for range 40 {
		_, _ = io.WriteString(c, "x")
		select {
		case status := <-got:
			if status != http.StatusRequestTimeout {
				t.Errorf("a slow client: %d", status)
			}
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
	if status := testbed.Receive(t, "an answer", got); status != http.StatusRequestTimeout {
		t.Errorf("a slow client: %d", status)
	}
}

// What a server answers cannot change where messages begin and end, nor what belongs to the load balancer.
func TestExternalAuthSmugglesNothing(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	answers := []string{
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nHost: evil\r\nUpgrade: x\r\nConnection: x-user, keep-alive\r\nX-User: y\r\n" +
			"X-Forwarded-For: 6.6.6.6\r\nTrailer: x\r\nExpect: 100-continue\r\nTE: trailers\r\nX-Real: z\r\n\r\n0\r\nX-More: 9\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Type: evil/type\r\nX-Real: z\r\n\r\nabc",
		"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
		"HTTP/1.1 200 OK\r\nX-User: a\rX: b\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\nTransfer-Encoding: x\r\n\r\nabc",
		strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", maxInterim+1) + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
	}
	next := make(chan string, len(answers)+1)
	auth := r.Pod(func(c net.Conn) {
		in := bufio.NewReader(c)
		q, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, q.Body)
		_, _ = io.WriteString(c, <-next)
	})
	pod := r.Web(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		var names []string
		for name := range q.Header {
			if strings.HasPrefix(name, "X-") && !strings.HasPrefix(name, "X-Forwarded") {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		_, _ = fmt.Fprint(w, q.Host, " ", names, " ", q.Header.Get("X-Forwarded-For"), " ", q.Header.Get("Content-Type"), " ", string(body))
	})
	r.authorized(pod, auth, "http: {}")
	for i, want := range []string{
		"200 inner.example.com [X-Real] 127.0.0.1 text/x body", "200 inner.example.com [X-Real] 127.0.0.1 text/x body",
		"503 503 Service Unavailable", "503 503 Service Unavailable", "503 503 Service Unavailable", "503 503 Service Unavailable",
		"503 503 Service Unavailable",
	} {
		next <- answers[i]
		answer, got := r.sends(r.clientOf(1), "POST", "/in", strings.NewReader("body"), "Content-Type: text/x")
		if got = fmt.Sprint(answer.StatusCode, " ", got); got != want {
			t.Errorf("%q: %q, want %q", answers[i], got, want)
		}
	}
}

// The example of docs/gateway.md does as that page tells.
func TestDocumentedExternalAuth(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "<!-- run by internal/lb/proxied/web/authorize_test.go -->\n```yaml\n")
	example, _, whole := strings.Cut(rest, "```")
	if !found || !whole {
		t.Fatal("docs/gateway.md has no example of authorization")
	}
	route := strings.Replace(example, "metadata: {name: members}", "metadata: {name: members, namespace: default}", 1)
	r := newRig(t, map[string]string{lbProtocol: "http"})
	auth := &decider{}
	r.front(map[string]netip.AddrPort{"web": r.Web(identified), "auth": r.Web(auth.ServeHTTP)}, strings.ReplaceAll(route, "members.", "web."))
	answer, got := r.sends(r.clientOf(1), "GET", "/cart?q=1", nil, "Authorization: alice", "Cookie: a=b", "X-User: root")
	if want := `GET web.example.com/cart?q=1 user=["alice"] group=[] type="" body=0`; answer.StatusCode != 200 || got != want {
		t.Errorf("%d %s, want %s", answer.StatusCode, got, want)
	}
	if want := "GET web.example.com/check/cart?q=1 Cookie=a=b"; auth.last() != want {
		t.Errorf("asked %q, want %q", auth.last(), want)
	}
	if answer, _ := r.sends(r.clientOf(1), "GET", "/", nil); answer.StatusCode != 401 {
		t.Errorf("without a right: %d", answer.StatusCode)
	}
}

// A WebSocket is authorized before it begins.
func TestExternalAuthOfWebSockets(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.authorized(r.Pod(func(c net.Conn) {
		q, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		_, _ = fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello %s",
			q.Header.Get("X-User"))
	}), r.Web((&decider{}).ServeHTTP), "http: {}")
	for verdict, want := range map[string]string{"alice": "hello alice", "403": "not you"} {
		c := r.Dial()
		_, err := io.WriteString(c, "GET /in HTTP/1.1\r\nHost: web.example.com\r\nAuthorization: "+verdict+
			"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
		r.Must(err)
		_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
		text, err := io.ReadAll(c)
		if err != nil || !strings.HasSuffix(string(text), want) || verdict == "403" && strings.Contains(string(text), " 101 ") {
			t.Errorf("%s: %q, %v", verdict, text, err)
		}
	}
}

// The annotations of ingress-nginx for external authorization do the same as there.
func TestAuthURL(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-underscore-headers": "keep"})
	auth := &decider{}
	r.auth = r.Web(auth.ServeHTTP)
	const at = "auth-url: http://auth.default.svc.cluster.local:8080/oauth2/auth?x=y"
	r.ingress(map[string]string{
		"plain":  at + "; auth-response-headers: X-User, X-Group",
		"signin": at + "; auth-signin: https://$host/start?a=b; auth-method: POST",
		"param": at + "; auth-signin: http://in.example.com/$escaped_request_uri?rd=$scheme://$http_host$request_uri; " +
			"auth-always-set-cookie: true",
		"post": at + "; auth-method: POST; auth-signin-redirect-param: back; auth-signin: /login",
	}, r.Web(identified))
	client := r.clientOf(1)
	for _, c := range []struct {
		path, verdict, want, asked string
	}{
		{"/plain/x?q", "alice", `200 GET web.example.com/plain/x?q user=["alice"] group=["staff" "alice"] type="" body=0 [session=of-alice]`,
			"GET auth.default.svc.cluster.local:8080/oauth2/auth?x=y " +
				"X-Other=1 X-User=root Cookie=a=b X-Original-Url=http://web.example.com/plain/x?q " +
				"X-Original-Method=GET X-Real-Ip=127.0.0.1 X_ask=1"},
		{"/plain", "", "401 401 Unauthorized []", ""},
		{"/plain", "204", `200 GET web.example.com/plain user=[] group=[] type="" body=0 []`, ""},
		{"/plain", "403", "403 403 Forbidden []", ""},
		{"/plain", "404", "500 500 Internal Server Error []", ""},
		{"/plain", "login", "500 500 Internal Server Error []", ""},
		{"/plain", "500", "500 500 Internal Server Error []", ""},
		{"/plain", "none", "500 500 Internal Server Error []", ""},
		{"/signin/x", "alice", `200 GET web.example.com/signin/x user=["root"] group=[] type="" body=0 [session=of-alice]`,
			"POST auth.default.svc.cluster.local:8080/oauth2/auth?x=y " +
				"X-Other=1 X-User=root Cookie=a=b X-Original-Url=http://web.example.com/signin/x " +
				"X-Original-Method=GET X-Real-Ip=127.0.0.1 X_ask=1"},
		{"/signin/x?a&b", "", "302 302 Found [] https://web.example.com/start?a=b&rd=http%3A%2F%2Fweb.example.com%2Fsignin%2Fx%3Fa%26b", ""},
		{"/param/x", "", "302 302 Found [] http://in.example.com/%2Fparam%2Fx?rd=http://web.example.com/param/x", ""},
		{"/post/x", "", "302 302 Found [] /login?back=http%3A%2F%2Fweb.example.com%2Fpost%2Fx", ""},
	} {
		answer, got := r.sends(client, "GET", c.path, nil, "Authorization: "+c.verdict, "X-User: root", "X-Other: 1", "Cookie: a=b",
			"X_ask: 1", "X-Original-Url: http://forged/", "X-Original_Method: forged", "X-Real-Ip: 6.6.6.6", "If-None-Match: *")
		got = strings.TrimSpace(fmt.Sprint(answer.StatusCode, " ", got, " ", answer.Header["Set-Cookie"], " ", answer.Header.Get("Location")))
		if got != c.want {
			t.Errorf("%s %s:\n%q, want\n%q", c.path, c.verdict, got, c.want)
		}
		if asked := auth.last(); c.asked != "" && asked != c.asked {
			t.Errorf("%s %s: the server was asked\n%q, want\n%q", c.path, c.verdict, asked, c.asked)
		}
	}
}

// What a question costs a request, beside the time of the server.
func BenchmarkExternalAuth(b *testing.B) {
	for _, asks := range []bool{false, true} {
		b.Run(fmt.Sprint(asks), func(b *testing.B) {
			r := newRig(b, map[string]string{lbProtocol: "http"})
			ok := r.Web(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-User", "alice") })
			if r.authorized(ok, ok, "http: {}"); !asks {
				r.front(map[string]netip.AddrPort{"a": ok}, fmt.Sprintf(retryRoute, "timeouts: {}"))
			}
			client := r.clientOf(1)
			for b.Loop() {
				if answer, _ := r.sends(client, "GET", "/in", nil); answer.StatusCode != http.StatusOK {
					b.Fatal(answer.Status)
				}
			}
		})
	}
}
