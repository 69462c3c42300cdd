package dns

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// A server that stops is not ready at once, answers for the lame-duck time, and
// then ends.
func TestLameduck(t *testing.T) {
	const lameduck = 500 * time.Millisecond
	s, err := New(Options{Listen: []string{"127.0.0.1:0"}, Workers: 1, Lameduck: lameduck})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ready := func() int {
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/ready", nil))
		return w.Code
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	eventually(t, "ready", func() bool { return ready() == http.StatusOK })
	begin := time.Now()
	cancel()
	eventually(t, "not ready", func() bool { return ready() == http.StatusServiceUnavailable })
	if time.Since(begin) < lameduck/2 { // unless this machine stood still
		if r := exchange(t, s, "udp", question("cluster.local.", mdns.TypeSOA)); len(r.Answer) != 1 {
			t.Errorf("answered %v while it stops", r)
		}
	}
	if err := ended(done); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < lameduck {
		t.Errorf("ended after %s, want at least %s", took, lameduck)
	}
}
