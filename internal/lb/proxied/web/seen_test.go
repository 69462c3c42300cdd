package web

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// shown keeps requests while they are wanted.
type shown struct {
	wanted atomic.Bool

	mu  sync.Mutex
	all []seen.Request
}

func (s *shown) Wants() bool { return s.wanted.Load() }

func (s *shown) Request(r *seen.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, *r)
}

func (s *shown) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all)
}

// await returns the n-th request.
func (s *shown) await(t *testing.T, n int) (r seen.Request) {
	t.Helper()
	testbed.Until(t, fmt.Sprintf("request %d is shown", n), func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.all) < n {
			return fmt.Errorf("there are %d", len(s.all))
		}
		r = s.all[n-1]
		return nil
	})
	return r
}

// Every request is shown that is wanted, with the Pod that has answered, if one has.
func TestRequestsAreShown(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		n, client := 0, r.clientOf(version)
		ask := func(status int, pod netip.AddrPort, method string, body string) {
			t.Helper()
			q, err := http.NewRequestWithContext(t.Context(), method, "http://"+r.At.String()+"/a?b", strings.NewReader(body))
			r.Must(err)
			answer, err := client.Do(q)
			r.Must(err)
			_, _ = io.Copy(io.Discard, answer.Body)
			r.Must(answer.Body.Close())
			if !r.shown.wanted.Load() {
				return
			}
			n++
			got := r.shown.await(t, n)
			protocol := map[int]string{1: "HTTP/1.1", 2: "HTTP/2"}[version]
			if got.Service != r.service.Name || !got.Client.Addr().IsLoopback() || got.At != r.At || got.Pod != pod || got.Method != method ||
				got.Host != r.At.String() || got.Target != "/a?b" || got.Protocol != protocol || got.Status != status || got.Secure ||
				got.Began.IsZero() || got.Answered.IsZero() == pod.IsValid() || got.Answered.Before(got.Began) && pod.IsValid() {
				t.Errorf("HTTP/%d: %+v, want %d from %s", version, got, status, pod)
			}
		}
		pod := r.Web(lbtest.Tell)
		r.set(pod)
		ask(http.StatusOK, pod, "GET", "") // nobody wants it
		r.shown.wanted.Store(true)
		ask(http.StatusOK, pod, "GET", "")
		ask(http.StatusOK, pod, "POST", "x")
		r.service.Spec.Clients.Body = 1 // KiB
		r.set(pod)
		ask(http.StatusRequestEntityTooLarge, netip.AddrPort{}, "POST", strings.Repeat("x", 1025))
		r.set()
		ask(http.StatusServiceUnavailable, netip.AddrPort{}, "GET", "")
		if version == 1 { // what the load balancer itself answers on a kept connection, and what is no request
			r.set(pod)
			ask(http.StatusOK, pod, "GET", "")
			r.service.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
			r.set(pod)
			ask(http.StatusForbidden, netip.AddrPort{}, "GET", "")
			r.service.Spec.SourceRanges = nil
			r.set(pod)
			conn := r.Dial()
			_, err := io.WriteString(conn, "GET / HTTP/1.1\nHost: web\n\n")
			r.Must(err)
			_, _ = io.Copy(io.Discard, conn)
		}
		r.server.Set(nil)
		if got := r.shown.count(); got != n {
			t.Errorf("HTTP/%d: %d requests are shown, want %d", version, got, n)
		}
	}
}

// traces sends a request with an ID that is armed, and returns what is kept of it.
func (r *rig) traces(client *http.Client, id, path string) request.Seen {
	r.Helper()
	r.Must(r.traced.Arm(id))
	q, err := http.NewRequestWithContext(r.Context(), http.MethodGet, "http://"+r.At.String()+path, http.NoBody)
	r.Must(err)
	q.Header.Set("Traceparent", "00-"+id+"-00f067aa0ba902b7-00")
	answer, err := client.Transport.RoundTrip(q)
	r.Must(err)
	_, _ = io.Copy(io.Discard, answer.Body)
	r.Must(answer.Body.Close())
	var out request.Seen
	testbed.Until(r, "the request is kept", func() error {
		list, _ := r.traced.Seen(id)
		if len(list) != 1 {
			return fmt.Errorf("there are %d", len(list))
		}
		out = list[0]
		return nil
	})
	if out.Status != answer.StatusCode || out.Listener != r.At || out.Front != r.service.Name.String() || !out.Client.Addr().IsLoopback() ||
		out.Took <= 0 || (out.Answered > 0) != out.Pod.IsValid() {
		r.Errorf("%s: %+v, the client has %d", path, out, answer.StatusCode)
	}
	return out
}

// A traced request has its route, each Pod that was asked, and the reason if no Pod has answered.
// Others are not.
func TestRequestsAreTraced(t *testing.T) {
	const routes = "metadata: {name: r, namespace: default}\nspec:\n  parentRefs: [{name: shop}]\n  hostnames: [%q]\n  rules:\n" +
		"  - {matches: [{path: {value: /old}}], filters: [{type: RequestRedirect, requestRedirect: {hostname: other}}]}\n" +
		"  - {matches: [{path: {value: /none}}], backendRefs: [{name: missing, port: 80}]}\n" +
		"  - {matches: [{path: {value: /cart}}], backendRefs: [{name: a, port: 80}], retry: {attempts: 2, codes: [503]}}"
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		n, client := 0, r.clientOf(version)
		ask := func(path string) request.Seen {
			n++
			return r.traces(client, fmt.Sprintf("%032x", n), path)
		}
		host, _, _ := net.SplitHostPort(r.At.String())
		pod, dead := r.Web(lbtest.Tell), r.Free()
		failing := r.Web(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
		r.front(map[string]netip.AddrPort{"a": pod}, fmt.Sprintf(routes, host))
		rule := request.Route{Kind: "HTTPRoute", Namespace: "default", Name: "r", Rule: 2}
		s := ask("/cart")
		if s.Pod != pod || s.PodStatus != 200 || s.Backend != "default/a" || s.Route == nil || *s.Route != rule || s.Why != "" ||
			len(s.Attempts) != 1 || s.Attempts[0].Status != 200 || s.Attempts[0].Error != "" || s.Sent <= 0 ||
			s.Protocol != fmt.Sprint("HTTP/", version) || s.TLS {
			t.Errorf("served: %+v", s)
		}
		for _, bad := range []struct {
			pod  netip.AddrPort
			want string
			code int
		}{{dead, "refused", 0}, {failing, errRepeat.Error(), 503}} {
			r.endpoints("a", bad.pod, pod)
			for s = ask("/cart"); len(s.Attempts) < 2 && n < 10; s = ask("/cart") { // the first one may have been the good one
			}
			if s.Pod != pod || s.PodStatus != 200 || len(s.Attempts) != 2 || s.Attempts[0].Pod != bad.pod || s.Attempts[0].Status != bad.code ||
				!strings.Contains(s.Attempts[0].Error, bad.want) || s.Attempts[1].Pod != pod || s.Attempts[1].Status != 200 || s.Why != "" {
				t.Errorf("retried: %+v", s)
			}
		}
		r.endpoints("a")
		for path, want := range map[string]struct {
			status int
			rule   int
			why    string
		}{
			"/nothing": {404, -1, "no rule of a route matches"}, "/old": {302, 0, "the rule has a redirect"},
			"/none": {500, 1, "no backendRef"}, "/cart": {503, 2, "no ready endpoint"},
		} {
			s := ask(path)
			if s.Status != want.status || !strings.Contains(s.Why, want.why) || s.Pod.IsValid() || len(s.Attempts) > 0 ||
				(s.Route == nil) != (want.rule < 0) || s.Route != nil && s.Route.Rule != want.rule {
				t.Errorf("%s: %+v, want %+v", path, s, want)
			}
		}
		r.front(map[string]netip.AddrPort{"a": pod}, fmt.Sprintf(routes, "web.example.com"))
		if s := ask("/cart"); s.Status != 404 || s.Route != nil {
			t.Errorf("another host: %+v", s)
		}
		if list, _ := r.traced.Seen(fmt.Sprintf("%032x", 1)); len(list) != 1 {
			t.Errorf("the first ID has the requests of others: %+v", list)
		}
	}
}
