package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
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
		w.setService(udpService("dns", 1))
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

// Endpoints of TCP that go within a moment cost one pass, by a filter of the kernel if it
// has one; flows of UDP do not wait.
func TestRemovalsAreGathered(t *testing.T) {
	for _, filters := range []bool{true, false} {
		tracker := &fakeTracker{entries: map[conntrack.Entry]bool{}, filters: filters}
		inBubble(t, func(o *Options) { o.Conntrack = func() (Tracker, error) { return tracker, nil } }, func(w *world) {
			const services = 5
			entry := func(i int, endpoint string, replied bool) conntrack.Entry {
				return conntrack.Entry{Protocol: svc.TCP, OrigDst: netip.MustParseAddrPort(fmt.Sprintf("10.96.0.%d:80", i+1)),
					ReplySrc: netip.MustParseAddrPort(endpoint + ":8080"), Replied: replied}
			}
			name := func(i int) string { return fmt.Sprintf("web%d", i) }
			for i := range services {
				w.setService(service(name(i), i))
				w.setSlice(slice(name(i), 5, 6))
			}
			w.setService(udpService("dns", 9))
			w.setSlice(udp("dns", 5, 6))
			w.settle(time.Second)
			tracker.passes()
			for i := range services {
				tracker.set(entry(i, "10.244.0.5", true), entry(i, "10.244.0.5", false), entry(i, "10.244.0.6", false))
			}
			for i := range services {
				w.setSlice(slice(name(i), 5))
				w.settle(10 * time.Millisecond)
			}
			if scopes, asked := tracker.passes(); len(scopes)+len(asked) > 0 {
				t.Errorf("at once: read %v, asked %v", scopes, asked)
			}
			w.settle(time.Second)
			scopes, asked := tracker.passes()
			if filters && (len(scopes) != 0 || len(asked) != 1 || len(asked[0]) != services) {
				t.Errorf("read %v, asked %v, want one question for %d flows", scopes, asked, services)
			}
			want := conntrack.Scope{Family: svc.IPv4, Protocol: svc.TCP, Unreplied: true}
			if !filters && (len(asked) != 0 || len(scopes) != 1 || scopes[0] != want) {
				t.Errorf("read %v, asked %v, want one reading of %v", scopes, asked, want)
			}
			if left := tracker.left(); len(left) != 2*services || left[entry(0, "10.244.0.6", false)] {
				t.Errorf("left are %v, want the answered ones and those to 10.244.0.5", left)
			}
			w.setSlice(slice(name(0), 6))
			w.setSlice(udp("dns", 5))
			w.settle(10 * time.Millisecond)
			if scopes, asked := tracker.passes(); len(asked) > 0 || len(scopes) != 1 || scopes[0] != (conntrack.Scope{Family: svc.IPv4}) {
				t.Errorf("with UDP: read %v, asked %v, want one reading of IPv4 at once", scopes, asked)
			}
		})
	}
}

// Whether something does not wait is known without a look at what is pending, which the Proxy's loop would wait for; also after
// an error, and not after a look that went well.
func TestUrgent(t *testing.T) {
	tracker := &fakeTracker{entries: map[conntrack.Entry]bool{}}
	o := &Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	c := newCleaner(tracker, o, &newMetrics("fake", []svc.Family{svc.IPv4}).conntrack)
	expect := func(what string, want bool) {
		t.Helper()
		if got := c.urgent(); got != want {
			t.Errorf("%s: urgent is %v", what, got)
		}
	}
	front := func(p svc.Protocol) map[svc.Frontend]*suspect {
		at := svc.Frontend{Protocol: p, Addr: netip.MustParseAddrPort("10.96.0.2:53")}
		return map[svc.Frontend]*suspect{at: newSuspect(at, nil, nil, false)}
	}
	c.add(front(svc.TCP))
	expect("TCP", false)
	c.add(front(svc.UDP))
	c.add(front(svc.TCP))
	expect("UDP", true)
	tracker.fail(1)
	if c.clean(t.Context()) == nil {
		t.Error("no error")
	}
	expect("after an error", true)
	if err := c.clean(t.Context()); err != nil {
		t.Error(err)
	}
	c.add(front(svc.TCP))
	expect("after a look", false)
	for i := range maxStaleFronts - 1 {
		at := svc.Frontend{Protocol: svc.TCP, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 1, 1}), uint16(i))}
		c.pending[at] = &suspect{}
	}
	best := time.Hour
	for range 100 {
		start := time.Now()
		c.urgent()
		best = min(best, time.Since(start))
	}
	if best > 50*time.Microsecond {
		t.Errorf("with %d pending that takes %s", len(c.pending), best)
	}
}

func udpService(name string, i int) *corev1.Service {
	s := service(name, i)
	s.Spec.Ports = []corev1.ServicePort{{Port: 53, Protocol: corev1.ProtocolUDP}}
	return s
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
	// filters is set if Forget works; scopes and asked are what was called for.
	filters bool
	scopes  []conntrack.Scope
	asked   [][]conntrack.Flow
}

func (f *fakeTracker) Sweep(ctx context.Context, scope conntrack.Scope, stale func(conntrack.Entry) bool) (int, error) {
	for f.isBlocked() && ctx.Err() == nil {
		time.Sleep(time.Millisecond) // inside a synctest bubble
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails--; f.fails >= 0 {
		return 0, errors.New("no buffer space available")
	}
	f.scopes = append(f.scopes, scope)
	n := len(f.entries)
	maps.DeleteFunc(f.entries, func(e conntrack.Entry, _ bool) bool { return !(scope.Unreplied && e.Replied) && stale(e) })
	return n - len(f.entries), nil
}

func (f *fakeTracker) Forget(_ context.Context, flows []conntrack.Flow) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails--; f.fails >= 0 {
		return false, errors.New("no buffer space available")
	}
	if !f.filters {
		return false, nil
	}
	f.asked = append(f.asked, flows)
	maps.DeleteFunc(f.entries, func(e conntrack.Entry, _ bool) bool {
		return !e.Replied && slices.Contains(flows, conntrack.Flow{Protocol: e.Protocol, OrigDst: e.OrigDst, ReplySrc: e.ReplySrc})
	})
	return true, nil
}

// passes returns what was called for since the last time.
func (f *fakeTracker) passes() (scopes []conntrack.Scope, asked [][]conntrack.Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	scopes, asked = f.scopes, f.asked
	f.scopes, f.asked = nil, nil
	return scopes, asked
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
