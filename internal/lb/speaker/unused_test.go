package speaker

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/svc"
)

// slowRules are rules in a kernel whose transactions are held up by others, or fail. The real ones are tested in package filter.
type slowRules struct {
	held chan struct{} // Write waits until it is closed

	mu     sync.Mutex
	fails  bool
	writes int
	addrs  map[netip.Addr]bool
	closed bool
}

func (r *slowRules) do(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *slowRules) Add(a netip.Addr)    { r.do(func() { r.addrs[a] = true }) }
func (r *slowRules) Delete(a netip.Addr) { r.do(func() { delete(r.addrs, a) }) }
func (r *slowRules) Close() error        { r.do(func() { r.closed = true }); return nil }

func (r *slowRules) Write([]netip.Prefix) (err error) {
	<-r.held
	r.do(func() {
		if r.writes++; r.fails {
			err = errors.New("no nf_tables")
		}
	})
	return err
}

// The loop goes on while a transaction waits for those of other programs, and a table that cannot be written is tried again with
// pauses, however often the loop looks. At the end, also before a restart, there are no rules.
func TestRulesForUnusedPortsDoNotHoldUpTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, web := netip.MustParseAddr("192.0.2.1"), svc.Name{Namespace: "default", Name: "web"}
		rules := &slowRules{held: make(chan struct{}), addrs: map[netip.Addr]bool{}}
		u := newUnused(NewKnown("a", noFront{}), &forwarding{front: noFront{}}, slog.New(slog.DiscardHandler))
		u.rules = rules
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); u.run(ctx) }()
		synctest.Wait() // it is in Write

		known := []address{{addr: a, services: []svc.Name{web}}}
		u.set(known, nil, nil) // a deadlock if that waited
		rules.do(func() { rules.fails = true })
		close(rules.held)
		for range 100 {
			time.Sleep(heartbeat) // of the bubble's clock
			u.set(known, nil, nil)
		}
		rules.do(func() {
			if limit := int(100*heartbeat/unusedRetry) + 1; rules.writes < 2 || rules.writes > limit {
				t.Errorf("%d tries in %s, want 2 to %d", rules.writes, 100*heartbeat, limit)
			}
			rules.fails, rules.writes = false, 0
		})
		time.Sleep(unusedRetry)
		synctest.Wait()
		networks := []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("203.0.113.0/24")}
		for i := range 4 { // in any order they are the same
			u.set(nil, []netip.Prefix{networks[i%2], networks[1-i%2]}, nil)
			synctest.Wait()
		}
		rules.do(func() {
			if rules.writes != 2 || !rules.addrs[a] {
				t.Errorf("%d writes, and the rules are for %v", rules.writes, rules.addrs)
			}
		})
		cancel()
		<-ended
		if !rules.closed {
			t.Error("the rules are left")
		}
	})
}

// While the proxy has not programmed all ports of an address, none is refused; so, too, while the Service gets a further port.
func TestPortsOfServicesAreNeverRefused(t *testing.T) {
	a, web := netip.MustParseAddr("192.0.2.1"), svc.Name{Namespace: "default", Name: "web"}
	has := map[string]bool{}
	known := NewKnown("a", noFront{})
	forwards := &forwarding{noFront{}, func(id svc.PortName, _ svc.Family, _ netip.Addr) bool { return has[id.Port] }}
	rules := &slowRules{held: make(chan struct{}), addrs: map[netip.Addr]bool{}}
	close(rules.held)
	u := newUnused(known, forwards, slog.New(slog.DiscardHandler))
	u.rules = rules
	known.claims[a] = claimed{Claim: claim.Claim{Services: []svc.Name{web}}}
	ports := []svc.PortName{{Name: web, Port: "http"}, {Name: web, Port: "https"}}
	expect := func(what string, ports []svc.PortName, want bool) {
		t.Helper()
		var changed []address
		if ports != nil {
			known.services[web] = &announced{addrs: []netip.Addr{a}, ports: ports}
			changed = append(changed, known.one(a))
		}
		if u.set(changed, nil, nil); !u.write() || rules.addrs[a] != want {
			t.Errorf("%s: the address has rules: %t", what, rules.addrs[a])
		}
	}
	expect("nothing is programmed", ports[:1], false)
	has["http"] = true
	expect("the port is programmed", nil, true)
	expect("a port was added", ports, false)
	has["https"] = true
	expect("both ports are programmed", nil, true)
	delete(known.services, web)
	u.set([]address{known.one(a)}, nil, nil)
	if u.write(); rules.addrs[a] {
		t.Error("an address of no Service has rules")
	}
}
