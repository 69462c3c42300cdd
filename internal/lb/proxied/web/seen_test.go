package web

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
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
