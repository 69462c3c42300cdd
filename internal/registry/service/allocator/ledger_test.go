package allocator

import (
	"errors"
	"net/netip"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/alloc"
)

// The ledger against a store: whatever the order of own writes and of events,
// a claimed key is known once all events have arrived, and nothing else is.
func TestLedgerFollowsStore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pool := map[int]bool{}
		l := newLedger(func(k int) { pool[k] = true }, func(k int) { delete(pool, k) })
		type event struct {
			key   int
			added bool
		}
		store := map[int]bool{}
		var pending []event // committed to the store, not seen yet
		holds := map[int]bool{}
		key := rapid.IntRange(0, 5)
		t.Repeat(map[string]func(*rapid.T){
			"hold": func(t *rapid.T) {
				k := key.Draw(t, "key")
				if pool[k] {
					return
				}
				_, _ = l.hold(func() (int, error) { pool[k] = true; return k, nil })
				holds[k] = true
			},
			"claim what is held": func(t *rapid.T) {
				for k := range holds {
					if store[k] {
						l.drop(k)
					} else {
						store[k] = true
						pending = append(pending, event{k, true})
					}
					delete(holds, k)
					return
				}
			},
			"another server claims": func(t *rapid.T) {
				if k := key.Draw(t, "key"); !store[k] {
					store[k] = true
					pending = append(pending, event{k, true})
				}
			},
			"release": func(t *rapid.T) {
				if k := key.Draw(t, "key"); store[k] && !holds[k] {
					delete(store, k)
					pending = append(pending, event{k, false})
					l.drop(k)
				}
			},
			"another server releases": func(t *rapid.T) {
				if k := key.Draw(t, "key"); store[k] && !holds[k] {
					delete(store, k)
					pending = append(pending, event{k, false})
				}
			},
			"event": func(*rapid.T) {
				if len(pending) > 0 {
					if e := pending[0]; e.added {
						l.seen(e.key)
					} else {
						l.gone(e.key)
					}
					pending = pending[1:]
				}
			},
			"": func(t *rapid.T) {
				if len(pending) > 0 {
					return
				}
				for k := range 6 {
					if holds[k] && !store[k] {
						continue // may be forgotten: see ledger
					}
					if want := store[k]; pool[k] != want && (want || !l.has(k)) {
						t.Fatalf("key %d: known %v, want %v", k, pool[k], want)
					}
				}
			},
		})
	})
}

// has reports whether k is known to be claimed or held.
func (l *ledger[K]) has(k K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.known[k]
	return ok
}

// What a watch shows is marked in every range that contains it, also in one
// that comes later, and whoever made it.
func TestSinkMarksRanges(t *testing.T) {
	a := newAddresses()
	p, wide := netip.MustParsePrefix("10.96.0.0/24"), netip.MustParsePrefix("10.96.0.0/16")
	a.setRanges(map[netip.Prefix]bool{p: true})
	synced := 0
	sink := sinkOf(a.ledger, parseAddr, func() { synced++ })
	address := func(name string) *networkingv1.IPAddress {
		return &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	has := func(name string, want bool) {
		t.Helper()
		for _, r := range a.ranges {
			if ip := netip.MustParseAddr(name); r.Contains(ip) && taken(r.Addrs, ip) != want {
				t.Errorf("%s has %s: %v, want %v", r.Prefix(), name, !want, want)
			}
		}
	}
	sink.Replace([]any{address("10.96.0.1"), address("10.96.0.2"), address("no address")})
	sink.Set(address("10.96.0.3"))
	a.setRanges(map[netip.Prefix]bool{p: true, wide: true})
	sink.Set(address("10.96.0.4"))
	sink.Delete(address("10.96.0.2"))
	for name, want := range map[string]bool{"10.96.0.1": true, "10.96.0.2": false, "10.96.0.3": true, "10.96.0.4": true} {
		has(name, want)
	}
	sink.Replace([]any{address("10.96.0.2")})
	has("10.96.0.1", false)
	has("10.96.0.2", true)
	if synced != 2 || len(a.ranges) != 2 {
		t.Errorf("%d lists, %d ranges", synced, len(a.ranges))
	}
}

// taken reports whether ip is allocated, and changes nothing.
func taken(r *alloc.Addrs, ip netip.Addr) bool {
	err := r.Allocate(ip)
	if err == nil {
		r.Release(ip)
	}
	return errors.Is(err, alloc.ErrAllocated)
}
