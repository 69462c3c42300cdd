package proxy

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
)

func TestStaleConnectionsAreRemovedBesideTheLoop(t *testing.T) {
	tracker := &fakeTracker{entries: map[conntrack.Entry]bool{}}
	inBubble(t, func(o *Options) { o.Conntrack = func() (Tracker, error) { return tracker, nil } }, func(w *world) {
		to := func(endpoint string) conntrack.Entry {
			return conntrack.Entry{Protocol: svc.UDP, OrigDst: netip.MustParseAddrPort("10.96.0.2:53"),
				ReplySrc: netip.MustParseAddrPort(endpoint + ":8080"), Replied: true}
		}
		s := service("dns", 1)
		s.Spec.Ports = []corev1.ServicePort{{Port: 53, Protocol: corev1.ProtocolUDP}}
		w.setService(s)
		w.setSlice(udp("dns", 5, 6))
		w.settle(time.Second)
		tracker.set(to("10.244.0.5"), to("10.244.0.6"))
		// The Apply fails at first. What it was to do may be done or not, so the
		// entries go after every try; and they go although reading them fails, too.
		fails := 2
		w.plane.set(func(p *fakeDataplane) {
			p.fail = func() error {
				if fails--; fails >= 0 {
					return errors.New("no")
				}
				return nil
			}
		})
		tracker.fail(2)
		w.setSlice(udp("dns", 5))
		w.settle(time.Minute)
		if got := tracker.left(); len(got) != 1 || !got[to("10.244.0.5")] {
			t.Errorf("left are %v, want that to 10.244.0.5", got)
		}
		// An endpoint that is back before its entries could be removed keeps them.
		tracker.fail(1)
		w.setSlice(udp("dns"))
		w.settle(10 * time.Millisecond)
		w.setSlice(udp("dns", 5))
		w.settle(time.Minute)
		if got := tracker.left(); !got[to("10.244.0.5")] {
			t.Errorf("left are %v, want that to 10.244.0.5", got)
		}
		// No change waits for the clean-up.
		tracker.block(true)
		w.setSlice(udp("dns", 6))
		w.settle(time.Second)
		w.setService(service("other", 3))
		w.settle(time.Second)
		if got := w.dump(); !strings.Contains(got, "default/other") {
			t.Errorf("while the clean-up takes its time, the kernel has\n%s", got)
		}
		tracker.block(false)
		w.settle(time.Minute)
		if got := tracker.left(); len(got) != 0 {
			t.Errorf("left are %v, want none", got)
		}
	})
}

func udp(name string, hosts ...int) *discoveryv1.EndpointSlice {
	s := slice(name, hosts...)
	s.Ports[0].Protocol = new(corev1.ProtocolUDP)
	return s
}

// fakeTracker is a Tracker without a kernel.
type fakeTracker struct {
	mu      sync.Mutex
	entries map[conntrack.Entry]bool
	fails   int
	blocked bool
}

func (f *fakeTracker) Sweep(ctx context.Context, unreplied bool, stale func(conntrack.Entry) bool) (int, error) {
	for f.isBlocked() && ctx.Err() == nil {
		time.Sleep(time.Millisecond) // inside a synctest bubble
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails--; f.fails >= 0 {
		return 0, errors.New("no buffer space available")
	}
	n := len(f.entries)
	maps.DeleteFunc(f.entries, func(e conntrack.Entry, _ bool) bool { return !(unreplied && e.Replied) && stale(e) })
	return n - len(f.entries), nil
}

func (f *fakeTracker) Close() error { return nil }

func (f *fakeTracker) set(entries ...conntrack.Entry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range entries {
		f.entries[e] = true
	}
}

func (f *fakeTracker) fail(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails = n
}

func (f *fakeTracker) block(blocked bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blocked = blocked
}

func (f *fakeTracker) isBlocked() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.blocked
}

func (f *fakeTracker) left() map[conntrack.Entry]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.entries)
}
