package pods

import (
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

func poolOf(t *testing.T, b dialect.Balance, n int) (*Pool, []netip.AddrPort) {
	var addrs []netip.AddrPort
	for i := range n {
		addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
	}
	p := &Pool{ctx: t.Context(), wg: &sync.WaitGroup{}, log: slog.New(slog.DiscardHandler)}
	p.Set(Options{Balance: b}, addrs, 0)
	return p, addrs
}

// With two Pods of which one cannot be reached, every other client begins with the other one: a further try takes no turn.
func TestRetriesTakeNoTurn(t *testing.T) {
	for _, b := range []dialect.Balance{dialect.RoundRobin, dialect.LeastConnections} {
		p, addrs := poolOf(t, b, 2)
		first := 0
		for range 100 {
			m, _ := p.Pick(netip.Addr{}, nil)
			if m.addr != addrs[0] {
				continue
			}
			first++
			if again, err := p.Pick(netip.Addr{}, []*Member{m}); err != nil || again.addr != addrs[1] {
				t.Fatalf("%v, %v", again, err)
			}
		}
		if first != 50 {
			t.Errorf("%v: %d of 100 clients begin with the Pod that cannot be reached", b, first)
		}
	}
}

// A Pod that could not be reached has no client for some seconds, longer each time; half of the Pods stay in any case.
func TestEjection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _ := poolOf(t, dialect.RoundRobin, 4)
		share := func(m *Member) (n int) {
			for range 40 {
				if got, _ := p.Pick(netip.Addr{}, nil); got == m {
					n++
				}
			}
			return n
		}
		bad := p.members[0]
		for _, long := range []time.Duration{ejectFor, 2 * ejectFor, 4 * ejectFor} {
			p.Failed(bad)
			p.Failed(bad) // of clients at the same time: counts once
			if n := share(bad); n != 0 {
				t.Errorf("%d of 40 clients at an ejected Pod", n)
			}
			time.Sleep(long - time.Millisecond)
			if n := share(bad); n != 0 {
				t.Errorf("it comes back before %v: %d", long, n)
			}
			time.Sleep(time.Millisecond)
			if n := share(bad); n != 10 {
				t.Errorf("it does not come back after %v: %d", long, n)
			}
		}
		p.Reached(bad)
		p.Failed(bad)
		time.Sleep(ejectFor)
		if n := share(bad); n != 10 {
			t.Errorf("after it was reached its failures still count: %d", n)
		}
		for _, m := range p.members {
			p.Failed(m)
		}
		if n := share(p.members[3]); n != 20 {
			t.Errorf("all fail, and the last one has %d of 40", n)
		}
		p.Reached(p.members[0])
		if n := share(p.members[0]); n == 0 {
			t.Error("a Pod that was reached stays out")
		}
	})
}
