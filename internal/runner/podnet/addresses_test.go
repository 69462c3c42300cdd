package podnet

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// No address given out twice, none of the node's own, all inside, and each time the free
// one that comes next in the round, so that none is used again at once.
func TestAddresses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.IntRange(26, 30).Draw(t, "bits")
		r := netip.PrefixFrom(netip.MustParseAddr("10.1.2.0"), bits)
		m := newAddresses()
		m.setRanges([]netip.Prefix{r, netip.MustParsePrefix("fd00::/64")})
		var round []netip.Addr // the usable ones: all but the first two and the last
		for a := r.Addr().Next().Next(); r.Contains(a.Next()); a = a.Next() {
			round = append(round, a)
		}
		held, place := map[netip.Addr][]netip.Addr{}, 0
		var order []netip.Addr
		for range 100 {
			if len(order) > 0 && rapid.Bool().Draw(t, "release") {
				i := rapid.IntRange(0, len(order)-1).Draw(t, "which")
				m.release(held[order[i]])
				delete(held, order[i])
				order = append(order[:i], order[i+1:]...)
				continue
			}
			got, err := m.allocate()
			if len(held) == len(round) {
				if err == nil {
					t.Fatalf("%v out of a full range", got)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			for held[round[place%len(round)]] != nil {
				place++
			}
			want := round[place%len(round)]
			place++
			if got[0] != want {
				t.Fatalf("%s, want %s", got[0], want)
			}
			held[want] = got
			order = append(order, want)
		}
	})
}

func TestAddressesRemembers(t *testing.T) {
	r := []netip.Prefix{netip.MustParsePrefix("10.1.2.0/24")}
	a := newAddresses()
	a.setRanges(r)
	first, _ := a.allocate()
	second, _ := a.allocate()
	a.release(second)
	b := newAddresses()
	b.setLastAddresses(a.lastAddresses())
	b.reserve(first)
	b.setRanges(r)
	third, err := b.allocate()
	if err != nil || third[0] != netip.MustParseAddr("10.1.2.4") {
		t.Errorf("%v, %v; want 10.1.2.4, for .3 was in use until now", third, err)
	}
}

// A node with room for 500 Pods has as many addresses of both families.
func TestAddressesOf500Pods(t *testing.T) {
	t.Parallel()
	m := newAddresses()
	m.setRanges([]netip.Prefix{netip.MustParsePrefix("10.244.2.0/23"), netip.MustParsePrefix("fd00:10:244::/64")})
	given := map[netip.Addr]bool{}
	for i := range 500 {
		got, err := m.allocate()
		if err != nil || len(got) != 2 {
			t.Fatalf("Pod %d: %v, %v", i, got, err)
		}
		for _, a := range got {
			given[a] = true
		}
	}
	if len(given) != 1000 {
		t.Errorf("%d addresses", len(given))
	}
}
