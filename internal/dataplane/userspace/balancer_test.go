package userspace

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/table"
)

func endpoints(n int) []table.Endpoint {
	var out []table.Endpoint
	for i := range n {
		out = append(out, table.Endpoint{Addr: netip.MustParseAddrPort(fmt.Sprintf("10.244.0.%d:80", i+1))})
	}
	return out
}

func aTarget(n int, affinity time.Duration) *balancer {
	t := newBalancer(&Config{Avoid: DefaultAvoid}, new(atomic.Int64))
	t.set(endpoints(n), nil, affinity)
	return t
}

var alice, bob = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")

// last is the number of the endpoint that a client gets.
func (t *balancer) last(from netip.Addr, tried ...netip.AddrPort) int {
	ep, _ := t.Pick(from, tried)
	if !ep.IsValid() {
		return 0
	}
	return int(ep.Addr().As4()[3])
}

func ep(n int) netip.AddrPort { return endpoints(n)[n-1].Addr }

// behaviour 39.
func TestInTurn(t *testing.T) {
	ta := aTarget(3, 0)
	var got []int
	for range 7 {
		got = append(got, ta.last(alice))
	}
	if want := []int{1, 2, 3, 1, 2, 3, 1}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if ep, others := aTarget(0, 0).Pick(alice, nil); ep.IsValid() || others {
		t.Errorf("of no endpoints %v was picked", ep)
	}
	if _, others := aTarget(1, 0).Pick(alice, nil); others {
		t.Error("one endpoint has no others")
	}
	if _, others := aTarget(3, 0).Pick(alice, []netip.AddrPort{ep(1)}); !others {
		t.Error("of three, one tried and one picked, there is another")
	}
}

func TestAtRandom(t *testing.T) {
	ta := newBalancer(&Config{Random: true}, new(atomic.Int64))
	ta.set(endpoints(4), nil, 0)
	seen := map[int]int{}
	for range 4000 {
		seen[ta.last(alice)]++
	}
	for i := range 4 {
		if n := seen[i+1]; n < 800 || n > 1200 {
			t.Errorf("4000 picks went to %v", seen)
			break
		}
	}
}

// behaviours 37, 61, 62.
func TestAffinity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ta := aTarget(3, time.Minute)
		first := ta.last(alice)
		if ta.last(bob) == first {
			t.Error("another client is not in turn")
		}
		for range 5 {
			time.Sleep(50 * time.Second) // renewed each time
			if got := ta.last(alice); got != first {
				t.Errorf("went to %d, then to %d", first, got)
			}
		}
		time.Sleep(time.Minute)
		if got := ta.last(alice); got == first {
			t.Error("still the same after the timeout")
		}
		ta.set(endpoints(1), nil, time.Minute)
		if got := ta.last(alice); got != 1 {
			t.Errorf("the endpoint is gone, got %d", got)
		}
		ta.set(endpoints(3), nil, time.Minute)
		if got := ta.last(alice); got != 1 {
			t.Errorf("others came, got %d", got)
		}
		// The endpoint fails: the client gets another one, and stays there.
		ta.Failed(ep(1))
		next := ta.last(alice, ep(1))
		if next == 1 || ta.last(alice) != next {
			t.Error("no new affinity after a failure")
		}
		ta.set(endpoints(3), nil, 0)
		if len(ta.sticky) != 0 || ta.recent.Len() != 0 {
			t.Error("clients are remembered without affinity")
		}
	})
}

func TestAffinityIsBounded(t *testing.T) {
	ta := aTarget(2, time.Hour)
	for i := range maxClients + 100 {
		ta.Pick(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), nil)
	}
	if len(ta.sticky) != maxClients || ta.recent.Len() != maxClients {
		t.Errorf("%d clients are remembered, want %d", len(ta.sticky), maxClients)
	}
}

// behaviour 40: an endpoint that fails is left alone for a while, longer each time,
// and one connection finds out when it is back.
func TestFailingEndpointIsAvoided(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ta := aTarget(3, 0)
		count := func(n int) (hits int) {
			for range n {
				if ta.last(alice) == 2 {
					hits++
				}
			}
			return hits
		}
		ta.Failed(ep(2))
		ta.Failed(ep(2)) // one that was under way
		if n := count(30); n != 0 {
			t.Errorf("picked %d times right after it failed", n)
		}
		for _, avoid := range []time.Duration{1, 2, 4, 8, 16, 16} {
			time.Sleep(avoid*DefaultAvoid - time.Millisecond)
			if n := count(30); n != 0 {
				t.Errorf("picked %d times within %s", n, avoid*DefaultAvoid)
			}
			time.Sleep(time.Millisecond)
			if n := count(30); n != 1 {
				t.Errorf("picked %d times after %s, want one that finds out", n, avoid*DefaultAvoid)
			}
			ta.Failed(ep(2))
		}
		time.Sleep(maxAvoid * DefaultAvoid)
		count(3)
		ta.Answered(ep(2))
		if n := count(30); n != 10 {
			t.Errorf("picked %d times of 30 after it answered, want 10", n)
		}
		// If all fail, they are tried all the same.
		for i := range 3 {
			ta.Failed(ep(i + 1))
		}
		if ta.last(alice) == 0 || ta.last(alice, ep(1), ep(2)) != 3 || ta.last(alice, ep(1), ep(2), ep(3)) != 0 {
			t.Error("with all avoided, each is to be tried once")
		}
		ta.set(endpoints(1), nil, 0)
		if len(ta.failing) != 1 {
			t.Errorf("failures are remembered of %d endpoints, of which one is left", len(ta.failing))
		}
	})
}

// Whatever happens, a pick is an endpoint that serves and was not tried, if
// there is one.
func FuzzTarget(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		ta := aTarget(3, 0)
		n := 3
		for range 200 {
			switch r.IntN(5) {
			case 0:
				n = r.IntN(5)
				ta.set(endpoints(n), nil, time.Duration(r.IntN(2))*time.Hour)
			case 1:
				ta.Failed(ep(1 + r.IntN(5)))
			case 2:
				ta.Answered(ep(1 + r.IntN(5)))
			default:
				var tried []netip.AddrPort
				for i := range n + 1 {
					got, others := ta.Pick(netip.AddrFrom4([4]byte{192, 0, 2, byte(r.IntN(4))}), tried)
					if got.IsValid() != (i < n) || others != (i < n-1) {
						t.Fatalf("try %d of %d endpoints: %v, others %t", i, n, got, others)
					}
					if got.IsValid() && (slices.Contains(tried, got) || !ta.Serves(got)) {
						t.Fatalf("picked %v after %v", got, tried)
					}
					tried = append(tried, got)
				}
			}
		}
	})
}
