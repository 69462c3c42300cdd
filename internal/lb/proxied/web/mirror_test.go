package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
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
// reaches the backend, and is not copied, nor is a WebSocket. A request that offers HTTP/2 by an upgrade is copied like others.
func TestMirrorGetsCopies(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.mirrorTime = time.Hour
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
		if n == 10 { // as curl --http2 and Java's HttpClient do
			q.Header = http.Header{"Connection": {"Upgrade, HTTP2-Settings"}, "Upgrade": {"h2c"}, "Http2-Settings": {"AAMAAABkAAQCAAAAAAIAAAAA"}}
		}
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
	r.mirrored("answered", 6)
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
	q, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+r.At.String()+"/", nil)
	r.Must(err)
	q.Header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="}}
	answer, err := client.Do(q)
	r.Must(err)
	_ = answer.Body.Close()
	r.mirrored("dropped", 3)
	r.noMirrors()
	if len(copies) > 0 {
		t.Errorf("the mirror has %d that are dropped", len(copies))
	}
}

// A mirror of HTTP/2 gets bodies that are longer than its window.
func TestMirrorOverHTTP2(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.appProtocol, r.mirrorTime = "kubernetes.io/h2c", time.Hour
	copies := make(chan string, 2)
	text := func(q *http.Request) string {
		n, err := io.Copy(io.Discard, q.Body)
		return fmt.Sprint(q.Proto, " ", n, " ", err)
	}
	mirroring(t, r.h2cPod(func(w http.ResponseWriter, q *http.Request) { _, _ = io.WriteString(w, text(q)) }),
		r.h2cPod(func(_ http.ResponseWriter, q *http.Request) { copies <- text(q) },
			&http.HTTP2Config{MaxReceiveBufferPerConnection: 1 << 16, MaxReceiveBufferPerStream: 1<<16 - 1}), r)
	client, want := r.clientOf(2), fmt.Sprint("HTTP/2.0 ", maxMirrorBody, " <nil>")
	for range 2 {
		answer, err := client.Post("http://"+r.At.String()+"/", "text/plain", strings.NewReader(strings.Repeat("x", maxMirrorBody)))
		r.Must(err)
		got, err := io.ReadAll(answer.Body)
		r.Must(err)
		_ = answer.Body.Close()
		if string(got) != want {
			t.Errorf("the backend has %s, want %s", got, want)
		}
		if got := testbed.Receive(t, "a copy", copies); got != want {
			t.Errorf("the mirror has %s, want %s", got, want)
		}
	}
	r.noMirrors()
}

// noMirrors waits until no copy is left, and demands that none holds anything.
func (r *rig) noMirrors() {
	r.Helper()
	testbed.Until(r, "the end of all copies", func() error {
		if n, kept := r.engine.mirrors.copies.Load(), r.engine.mirrors.memory.Load(); n != 0 || kept != 0 {
			return fmt.Errorf("%d copies, %d bytes", n, kept)
		}
		return nil
	})
}

// mirrored waits until so many copies have a result.
func (r *rig) mirrored(result string, want float64) {
	r.Helper()
	testbed.Until(r, "the copies that are "+result, func() error {
		if n := r.mirroredCount(result); n != want {
			return fmt.Errorf("%v of %v", n, want)
		}
		return nil
	})
}

// posts sends a body so many times, and wants it back.
func (r *rig) posts(client *http.Client, times int, body string) {
	r.Helper()
	for range times {
		answer, err := client.Post("http://"+r.At.String()+"/", "text/plain", strings.NewReader(body))
		r.Must(err)
		got, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK || string(got) != body {
			r.Fatalf("%d, %d bytes, %v", answer.StatusCode, len(got), err)
		}
		_ = answer.Body.Close()
	}
}

func echo(w http.ResponseWriter, q *http.Request) {
	body, _ := io.ReadAll(q.Body)
	_, _ = w.Write(body)
}

// A mirror that is closed, silent, or never takes a body does not fail, delay or pile up requests: there is a bound of its copies.
// One that fails every other time does not fill the log.
func TestMirrorDoesNoHarm(t *testing.T) {
	r := newSmallRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-timeout": "3600"}, 16*maxMirrors)
	r.mirrorTime = time.Hour // who waits for a copy waits for too long
	pod, client, began := r.Web(echo), r.Client(), time.Now()
	mirroring(t, pod, r.Free(), r)
	r.posts(client, 3, "body")
	r.mirrored("failed", 3)
	turn := atomic.Int32{}
	mirroring(t, pod, r.Web(func(http.ResponseWriter, *http.Request) {
		if turn.Add(1)%2 == 0 { // one copy at a time
			panic(http.ErrAbortHandler)
		}
	}), r)
	for n := range 3 {
		r.posts(client, 1, "body")
		r.mirrored("answered", float64(n+1))
		r.posts(client, 1, "body")
		r.mirrored("failed", float64(n+4))
	}
	if n := strings.Count(r.Logged.String(), `level=WARN msg="cannot mirror`); n < 1 || n > 1+int(time.Since(began)/budget.WarnEach) {
		t.Errorf("%d warnings: %s", n, r.Logged)
	}
	ends := make(chan struct{})
	defer close(ends)
	mirroring(t, pod, r.Pod(func(net.Conn) { <-ends }), r)
	r.posts(client, maxMirrors+20, "body")
	r.mirrored("dropped", 20)
	if n := r.engine.mirrors.copies.Load(); n != maxMirrors {
		t.Errorf("%d copies wait", n)
	}
}

// However many mirrors there are, their copies leave the process files for others, and give back what they had.
func TestMirrorsOfAProcess(t *testing.T) {
	r := newSmallRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-timeout": "3600"}, 64)
	r.mirrorTime = time.Hour
	ends := make(chan struct{})
	end := sync.OnceFunc(func() { close(ends) })
	defer end()
	silent := func(net.Conn) { <-ends }
	r.front(map[string]netip.AddrPort{"a": r.Web(echo), "b": r.Pod(silent), "c": r.Pod(silent)}, `
metadata: {name: r, namespace: default}
spec:
  parentRefs: [{name: shop}]
  rules:
  - filters:
    - {type: RequestMirror, requestMirror: {backendRef: {name: b, port: 80}}}
    - {type: RequestMirror, requestMirror: {backendRef: {name: c, port: 80}}}
    backendRefs: [{name: a, port: 80}]`)
	client := r.Client()
	r.posts(client, 10, "body")
	r.mirrored("dropped", 20-64/2/4)
	end()
	r.mirrored("failed", 64/2/4)
	r.noMirrors()
	r.posts(client, 1, "body")
	r.mirrored("failed", 64/2/4+2)
	r.noMirrors()
}

// slow sends the first bytes of a request with a body of maxMirrorBody, and leaves it at that.
func (r *rig) slow(n int) net.Conn {
	c := r.Dial()
	r.Must(c.SetDeadline(time.Now().Add(testbed.Patience)))
	_, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", maxMirrorBody, strings.Repeat("x", n))
	r.Must(err)
	return c
}

// Requests whose bodies do not come hold no place of a copy. They hold memory, of which there is a bound, and not for long.
func TestMirrorsOfSlowRequests(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.mirrorTime, r.mirrorMemory = time.Hour, 100_000
	heads := atomic.Int32{}
	pod := r.Web(func(w http.ResponseWriter, q *http.Request) {
		heads.Add(1)
		echo(w, q)
	})
	mirror := r.Web(echo)
	mirroring(t, pod, mirror, r)
	client, slow := r.Client(), []net.Conn(nil)
	for range maxMirrors + 6 {
		slow = append(slow, r.slow(1))
	}
	testbed.Until(t, "the slow requests", func() error {
		if n := heads.Load(); n != maxMirrors+6 {
			return fmt.Errorf("the Pod has %d", n)
		}
		return nil
	})
	r.posts(client, 1, "body")
	r.mirrored("answered", 1)
	for _, c := range slow {
		r.Must(c.Close())
	}
	r.mirrored("dropped", maxMirrors+6)
	r.noMirrors()

	held := r.slow(60_000)
	testbed.Until(t, "a body that is kept", func() error {
		if n := r.engine.mirrors.memory.Load(); n < 60_000 {
			return fmt.Errorf("%d bytes", n)
		}
		return nil
	})
	r.posts(client, 1, strings.Repeat("x", 50_000))
	r.mirrored("dropped", maxMirrors+7)
	r.posts(client, 1, strings.Repeat("x", 10_000))
	r.mirrored("answered", 2)
	r.Must(held.Close())
	r.mirrored("dropped", maxMirrors+8)
	r.noMirrors()

	r = newRig(t, map[string]string{lbProtocol: "http"})
	r.mirrorTime = 100 * time.Millisecond
	mirroring(t, pod, mirror, r)
	held = r.slow(60_000)
	r.mirrored("dropped", 1)
	r.noMirrors()
	_, err := io.WriteString(held, strings.Repeat("x", maxMirrorBody-60_000))
	r.Must(err)
	answer, err := http.ReadResponse(bufio.NewReader(held), nil)
	r.Must(err)
	if n, err := io.Copy(io.Discard, answer.Body); n != maxMirrorBody || err != nil {
		t.Errorf("a request whose copy is dropped is answered with %d bytes, %v", n, err)
	}
	_ = answer.Body.Close()

	ends := make(chan struct{})
	defer close(ends)
	mirroring(t, pod, r.Pod(func(net.Conn) { <-ends }), r) // a mirror that does not answer
	r.posts(r.Client(), 1, "body")
	r.mirrored("failed", 1)
	r.noMirrors()
}
