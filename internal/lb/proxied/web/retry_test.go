package web

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// retryRoute leads all requests to Service a.
const retryRoute = "metadata: {name: r, namespace: default}\nspec:\n  parentRefs: [{name: shop}]\n" +
	"  rules: [{backendRefs: [{name: a, port: 80}], %s}]"

// retried has all requests go to Pods by a rule.
func (r *rig) retried(rule string, pods ...netip.AddrPort) {
	r.Helper()
	r.front(map[string]netip.AddrPort{"a": pods[0]}, fmt.Sprintf(retryRoute, rule))
	r.endpoints("a", pods...)
}

// endpoints changes the Pods of a Service that routes lead to.
func (r *rig) endpoints(service string, pods ...netip.AddrPort) {
	r.Helper()
	next := *r.service.Routes
	next.Targets = maps.Clone(next.Targets)
	for t := range next.Targets {
		if t.Name.Name == service {
			next.Targets[t] = pods
		}
	}
	r.service.Routes = &next
	r.set()
}

// counted returns the sum of the series of a metric.
func (r *rig) counted(name string) (n float64) {
	r.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.server.Collector())
	families, err := registry.Gather()
	r.Must(err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// failing is a Pod that fails a number of times before it answers with the length of the body.
type failing struct {
	left, had atomic.Int32
	how       func(http.ResponseWriter)
}

func (f *failing) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	n, _ := io.Copy(io.Discard, q.Body)
	f.had.Add(1)
	if f.left.Add(-1) >= 0 {
		f.how(w)
		return
	}
	_, _ = fmt.Fprint(w, n)
}

// ask sends a request, and returns the status with the body, or the error, and how often the Pod had the request.
func (f *failing) ask(r *rig, client *http.Client, failures int, method string, body io.Reader, header ...string) string {
	r.Helper()
	f.left.Store(int32(failures)) //nolint:gosec // a few
	f.had.Store(0)
	q, err := http.NewRequestWithContext(r.Context(), method, "http://"+r.At.String()+"/", body)
	r.Must(err)
	for _, name := range header {
		q.Header.Set(name, "x")
	}
	answer, err := client.Do(q)
	r.Must(err)
	text, err := io.ReadAll(answer.Body)
	r.Must(err)
	_ = answer.Body.Close()
	if answer.StatusCode >= 400 {
		text = nil
	}
	return fmt.Sprint(answer.StatusCode, " ", string(text), " ", f.had.Load())
}

func answering(code int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("X-Failed", "yes")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, strings.Repeat("x", code))
	}
}

// unsized hides the length of a body.
func unsized(text string) io.Reader { return io.MultiReader(strings.NewReader(text)) }

// A request is retried for the statuses that its rule names, as often as it says; the last answer goes on. What must not be repeated is
// not: methods that are not idempotent, and bodies that are not kept.
func TestRetryForStatus(t *testing.T) {
	for _, v := range []struct {
		client int
		app    string
	}{{1, ""}, {2, ""}, {1, "kubernetes.io/h2c"}, {2, "kubernetes.io/h2c"}} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.appProtocol = v.app
		pod := &failing{how: answering(503)}
		at := r.Web(pod.ServeHTTP)
		if v.app != "" {
			at = r.h2cPod(pod.ServeHTTP)
		}
		r.retried("retry: {codes: [503, 504], attempts: 2, backoff: 1ms}", at)
		client := r.clientOf(v.client)
		long := strings.Repeat("x", maxRepeatBody)
		for _, c := range []struct {
			failures     int
			method, want string
			body         io.Reader
			header       []string
		}{
			{0, "GET", "200 0 1", nil, nil},
			{2, "GET", "200 0 3", nil, nil},
			{3, "GET", "503  3", nil, nil},
			{2, "HEAD", "200  3", nil, nil},
			{2, "POST", "503  1", nil, nil},
			{2, "POST", "200 4 3", strings.NewReader("body"), []string{"Idempotency-Key"}},
			{1, "PATCH", "503  1", strings.NewReader("body"), nil},
			{2, "PUT", "200 4 3", strings.NewReader("body"), nil},
			{2, "PUT", "200 4 3", unsized("body"), nil},
			{2, "PUT", "200 20000 3", strings.NewReader(long[:20_000]), nil},
			{2, "PUT", "200 65536 3", strings.NewReader(long), nil},
			{2, "PUT", "200 65536 3", unsized(long), nil},
			{2, "PUT", "503  1", strings.NewReader(long + "x"), nil},
			{2, "PUT", "503  1", unsized(long + "x"), nil},
			{0, "PUT", "200 200000 1", unsized(strings.Repeat("x", 200_000)), nil},
		} {
			if got := pod.ask(r, client, c.failures, c.method, c.body, c.header...); got != c.want {
				t.Errorf("%+v: %d failures of %s: %s, want %s", v, c.failures, c.method, got, c.want)
			}
		}
		testbed.Until(t, "the end of what is kept", func() error {
			if n := r.engine.repeats.Load(); n != 0 {
				return fmt.Errorf("%+v: %d bytes are kept", v, n)
			}
			return nil
		})
		if n := r.counted("fairlead_lb_retries_total"); n != 18 {
			t.Errorf("%+v: %v retries", v, n)
		}
		pod.how = answering(500)
		if got := pod.ask(r, client, 1, "GET", nil); got != "500  1" {
			t.Errorf("%+v: another status: %s", v, got)
		}
		pod.how = answering(503)
		r.retried("retry: {codes: [503], attempts: 0}", at)
		if got := pod.ask(r, client, 1, "GET", nil); got != "503  1" {
			t.Errorf("%+v: no attempts: %s", v, got)
		}
	}
}

// A request that a Pod has not answered is retried if it may be repeated, and one that was not sent in any case.
func TestRetryForConnections(t *testing.T) {
	for _, app := range []string{"", "kubernetes.io/h2c"} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.appProtocol = app
		pod := &failing{how: func(http.ResponseWriter) { panic(http.ErrAbortHandler) }}
		at := r.Web(pod.ServeHTTP)
		if app != "" {
			at = r.h2cPod(pod.ServeHTTP)
		}
		r.retried("retry: {attempts: 3, backoff: 0s}", at)
		client := r.Client()
		for _, c := range []struct {
			method, body, want string
		}{{"GET", "", "200 0 4"}, {"PUT", "body", "200 4 4"}, {"POST", "", "502  1"}} {
			if got := pod.ask(r, client, 3, c.method, strings.NewReader(c.body)); got != c.want {
				t.Errorf("%q: %s: %s, want %s", app, c.method, got, c.want)
			}
		}
		if app != "" {
			continue
		}
		closed := r.Free()
		r.retried("retry: {attempts: 9, backoff: 200ms}, timeouts: {request: 1h}", closed)
		began := make(chan struct{})
		time.AfterFunc(300*time.Millisecond, func() { // it comes between two attempts
			defer close(began)
			l, err := net.Listen("tcp", closed.String())
			if err != nil {
				t.Error(err)
				return
			}
			testbed.Serve(t, l, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 1000))
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
			})
		})
		answer, err := client.Post("http://"+r.At.String()+"/", "", strings.NewReader("body"))
		<-began
		r.Must(err)
		if _ = answer.Body.Close(); answer.StatusCode != 200 {
			t.Errorf("a Pod that comes later: %s", answer.Status)
		}
	}
}

// Of several Pods another one gets the retry.
func TestRetryElsewhere(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	bad, good := &failing{how: answering(503)}, &failing{}
	r.retried("retry: {codes: [503], attempts: 1, backoff: 0s}", r.Web(bad.ServeHTTP), r.Web(good.ServeHTTP))
	client := r.Client()
	for range 20 {
		bad.left.Store(1)
		if got := good.ask(r, client, 0, "GET", nil); got != "200 0 1" {
			t.Error(got)
		}
	}
	if bad.had.Load() == 0 {
		t.Error("the Pod that fails had no request")
	}
}

// A Pod that is silent costs the time for one attempt, and all of them together the time for a request.
func TestRetryAfterTimeout(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod := &failing{}
	ends := make(chan struct{})
	defer close(ends)
	pod.how = func(http.ResponseWriter) { <-ends }
	at := r.Web(pod.ServeHTTP)
	client := r.Client()
	r.retried("retry: {attempts: 2, backoff: 10ms}, timeouts: {request: 1h, backendRequest: 1s}", at)
	if got := pod.ask(r, client, 2, "GET", nil); got != "200 0 3" {
		t.Error(got)
	}
	if got := pod.ask(r, client, 3, "GET", nil); got != "504  3" {
		t.Error(got)
	}
	r.retried("retry: {attempts: 100000, backoff: 1ms}, timeouts: {request: 3s, backendRequest: 1s}", at)
	began := time.Now()
	if got := pod.ask(r, client, 1000, "GET", nil); got != "504  2" && got != "504  3" { // fewer when the machine is slow
		t.Error(got)
	}
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("it took %v", took)
	}
	r.retried("retry: {attempts: 3, codes: [503], backoff: 2h}, timeouts: {request: 1h}", at)
	pod.how = answering(503)
	if got := pod.ask(r, client, 9, "GET", nil); got != "503  1" { // the answer does not wait for a retry that is too late
		t.Error(got)
	}
}

// A rule with a retry gives a request that is never sent again as long as a rule without: an upload goes on while bytes come.
func TestRetryLeavesUploads(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-idle-timeout": "3"})
	r.retried("retry: {attempts: 3}", r.Web(func(w http.ResponseWriter, q *http.Request) {
		n, _ := io.Copy(io.Discard, q.Body)
		_, _ = fmt.Fprint(w, n)
	}))
	body, to := io.Pipe()
	go func() {
		pace := time.NewTicker(400 * time.Millisecond) // of a slow client: all together longer than the idle timeout
		defer pace.Stop()
		for range 10 {
			_, _ = to.Write([]byte("x"))
			<-pace.C
		}
		_ = to.Close()
	}()
	answer, err := r.Client().Post("http://"+r.At.String()+"/", "text/plain", body)
	r.Must(err)
	defer answer.Body.Close()
	if text, _ := io.ReadAll(answer.Body); answer.StatusCode != 200 || string(text) != "10" {
		t.Errorf("%s %q", answer.Status, text)
	}
}

// However many attempts rules ask for, a backend that fails does not get a multiple of the requests.
func TestRetryBudget(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod := &failing{how: answering(503)}
	r.retried("retry: {codes: [503], attempts: 50, backoff: 0s}", r.Web(pod.ServeHTTP))
	client, began, had := r.Client(), time.Now(), 0
	const requests = 60
	for range requests {
		_ = pod.ask(r, client, 1000, "GET", nil)
		had += int(pod.had.Load())
	}
	windows := 2 + int(time.Since(began)/(10*time.Second))
	if had <= requests || had > requests+windows*100 {
		t.Errorf("the Pod had %d requests", had)
	}
	if n := r.counted("fairlead_lb_retries_denied_total"); n == 0 {
		t.Error("no retry is denied")
	}
	if n := strings.Count(r.Logged.String(), `level=WARN msg="too many requests fail`); n < 1 || n > windows {
		t.Errorf("%d warnings", n)
	}
}

// A client that leaves is not waited for, by HTTP/1.1 and HTTP/2.
func TestRetryOfClientsThatLeave(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-idle-timeout": "3600"})
		asked := make(chan struct{}, 10)
		r.retried("retry: {codes: [503], attempts: 5, backoff: 30m}", r.Web(func(w http.ResponseWriter, _ *http.Request) {
			answering(503)(w)
			asked <- struct{}{}
		}))
		ctx, cancel := context.WithCancel(t.Context())
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.At.String()+"/", nil)
		r.Must(err)
		client, ended := r.clientOf(version), make(chan error, 1)
		go func() {
			_, err := client.Do(q)
			ended <- err
		}()
		<-asked
		cancel()
		if err := <-ended; err == nil {
			t.Error("the request is answered")
		}
		client.CloseIdleConnections()
		testbed.Until(t, "the end of the request", func() error {
			if text := lbtest.Metrics(t, r.server.Collector()); !strings.Contains(text, `fairlead_lb_requests_total{`) {
				return fmt.Errorf("HTTP/%d: %s", version, text)
			}
			return nil
		})
		if len(asked) > 0 {
			t.Errorf("HTTP/%d: the Pod had the request again", version)
		}
	}
}

// The retries of copies are not the Gateway's.
func TestRetriesOfMirrors(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	mirroring(t, r.Web(echo), r.Free(), r)
	r.endpoints("b", r.Free(), r.Free())
	r.posts(r.Client(), 5, "body")
	r.mirrored("failed", 5)
	if n := r.counted("fairlead_lb_retries_total"); n != 0 {
		t.Errorf("%v retries", n)
	}
}

// The example of the documentation does what the page says.
func TestExampleOfRetries(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "<!-- run by internal/lb/proxied/web/retry_test.go -->\n```yaml\n")
	text, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatal("docs/gateway.md has no example of retries")
	}
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.service.Key = "uid"
	pod := &failing{how: answering(503)}
	at := r.Web(pod.ServeHTTP)
	example := strings.Replace(text, "{name: shop}\nspec", "{name: shop, namespace: default}\nspec", 1)
	r.front(map[string]netip.AddrPort{"web": at, "web-next": at}, example)
	client, get := r.browser()
	pod.left.Store(2)
	body, answer := get()
	if cookies := answer.Cookies(); body != "0" || answer.StatusCode != 200 || len(cookies) != 1 || cookies[0].Name != "shop-session" {
		t.Errorf("%s %q, cookies %v", answer.Status, body, cookies)
	}
	if got := pod.ask(r, client, 3, "GET", nil); got != "503  3" {
		t.Error(got)
	}
}

// A rule that is not valid answers with its refusal.
func TestRetryRefused(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod := &failing{}
	r.retried("retry: {codes: [200]}", r.Web(pod.ServeHTTP))
	if got := pod.ask(r, r.Client(), 0, "GET", nil); got != "500  0" {
		t.Error(got)
	}
}
