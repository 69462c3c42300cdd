package pool

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

func ranges(t testing.TB, text string) []Range {
	t.Helper()
	r, err := ParseList(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func service(i int) svc.Name { return svc.Name{Namespace: "default", Name: fmt.Sprintf("s%d", i)} }

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func tcp(port uint16) []Port { return []Port{{svc.TCP, port}} }

var four, both = []svc.Family{svc.IPv4}, []svc.Family{svc.IPv4, svc.IPv6}

func TestAssign(t *testing.T) {
	// A case starts from pools a (.0 to .3) and b (.2 to .9, of which .2 and .3 are a's), six
	// (IPv6) and manual. Steps go on from one another.
	type step struct {
		what string
		do   func(*Allocator) Result
		want []netip.Addr
		kind Kind
		says string
	}
	ask := func(i int, change func(*Request)) func(*Allocator) Result {
		return func(a *Allocator) Result {
			r := &Request{Holder: Holder{Service: service(i), Ports: tcp(80)}, Families: four, Pools: []string{"a", "b", "six"},
				AskedOnly: []string{"manual"}}
			if change != nil {
				change(r)
			}
			return a.Assign(r)
		}
	}
	asked := func(list ...string) func(*Request) { return func(r *Request) { r.Asked = addrs(list...) } }
	key := func(k string, port uint16) func(*Request) {
		return func(r *Request) { r.Key, r.Ports = k, tcp(port) }
	}
	for name, steps := range map[string][]step{
		"one after the other": {
			{"first", ask(1, nil), addrs("192.0.2.0"), "", ""},
			{"again", ask(1, nil), addrs("192.0.2.0"), "", ""},
			{"second", ask(2, nil), addrs("192.0.2.1"), "", ""},
			{"a named pool", ask(3, func(r *Request) { r.Pools, r.Named = []string{"b"}, true }), addrs("192.0.2.4"), "", ""},
			{"to a named pool", ask(1, func(r *Request) { r.Pools, r.Named = []string{"b"}, true }), addrs("192.0.2.5"), "", ""},
			{"an unknown one", ask(1, func(r *Request) { r.Pools, r.Named = []string{"x"}, true }), addrs("192.0.2.5"), NoPool,
				"no pool gives IPv4 addresses to this Service; the pools of IPv4 addresses are a, b, manual"},
		},
		"asked": {
			{"free", ask(1, asked("192.0.2.3")), addrs("192.0.2.3"), "", ""},
			{"taken", ask(2, asked("192.0.2.3")), nil, Taken, "192.0.2.3 is used by Service default/s1"},
			{"kept when taken", ask(1, nil), addrs("192.0.2.3"), "", ""},
			{"another", ask(1, asked("192.0.2.8")), addrs("192.0.2.8"), "", ""},
			{"manual pool", ask(3, asked("198.51.100.1")), addrs("198.51.100.1"), "", ""},
			{"in none", ask(4, asked("203.0.113.1")), nil, NotInPool, "203.0.113.1 is in no pool"},
			{"not allowed", ask(4, func(r *Request) { r.Asked, r.Pools = addrs("192.0.2.3"), []string{"b"} }), nil, NotAllowed, "pool a"},
			{"both families", ask(5, func(r *Request) { r.Families, r.Asked = both, addrs("192.0.2.9", "2001:db8::9") }),
				addrs("192.0.2.9", "2001:db8::9"), "", ""},
			{"one of two", ask(6, func(r *Request) { r.Families, r.Asked = both, addrs("2001:db8::7") }),
				addrs("192.0.2.0", "2001:db8::7"), "", ""},
		},
		"two families": {
			{"both", ask(1, func(r *Request) { r.Families, r.Both = both, true }), addrs("192.0.2.0", "2001:db8::"), "", ""},
			{"one is enough", ask(2, func(r *Request) { r.Families, r.Pools = both, []string{"a"} }), addrs("192.0.2.1"), "", ""},
			{"one is not enough", ask(3, func(r *Request) { r.Families, r.Both, r.Pools = both, true, []string{"a"} }), nil, NoPool,
				"no pool gives IPv6 addresses"},
			{"nothing was kept back", ask(4, func(r *Request) { r.Asked = addrs("192.0.2.2") }), addrs("192.0.2.2"), "", ""},
		},
		"shared": {
			{"first", ask(1, key("k", 80)), addrs("192.0.2.0"), "", ""},
			{"another port", ask(2, key("k", 443)), addrs("192.0.2.0"), "", ""},
			{"the same port", ask(3, key("k", 443)), addrs("192.0.2.1"), "", ""},
			{"another key", ask(4, key("x", 8080)), addrs("192.0.2.2"), "", ""},
			{"asked, the same port", ask(5, func(r *Request) { key("k", 80)(r); r.Asked = addrs("192.0.2.0") }), nil,
				Taken, "both have port 80/TCP"},
			{"asked, without key", ask(5, func(r *Request) { r.Asked, r.Ports = addrs("192.0.2.0"), tcp(5) }), nil,
				Taken, "the same sharing key"},
			{"policy Local", ask(5, func(r *Request) { key("k", 9)(r); r.Backend = "app=x"; r.Asked = addrs("192.0.2.0") }), nil,
				Taken, "Local"},
			{"moves away", ask(2, key("k", 80)), addrs("192.0.2.1"), "", ""},
		},
		"the key of another namespace": {
			{"first", ask(1, key("k", 80)), addrs("192.0.2.0"), "", ""},
			{"same key", ask(2, func(r *Request) { key("k", 443)(r); r.Service.Namespace = "shop" }), addrs("192.0.2.1"), "", ""},
			{"asked", ask(3, func(r *Request) { key("k", 53)(r); r.Service.Namespace = "shop"; r.Asked = addrs("192.0.2.0") }), nil,
				Taken, "both have to be of the same namespace"},
			{"in the namespace", ask(4, func(r *Request) { key("k", 53)(r); r.Service.Namespace = "shop" }), addrs("192.0.2.1"), "", ""},
		},
		"preferred": {
			{"free", ask(1, func(r *Request) { r.Prefer = addrs("192.0.2.7") }), addrs("192.0.2.7"), "", ""},
			{"taken", ask(2, func(r *Request) { r.Prefer = addrs("192.0.2.7") }), addrs("192.0.2.0"), "", ""},
			{"elsewhere", ask(3, func(r *Request) { r.Prefer = addrs("203.0.113.1") }), addrs("192.0.2.1"), "", ""},
		},
		"pools change": {
			{"before", ask(1, asked("192.0.2.9")), addrs("192.0.2.9"), "", ""},
			{"gone", func(a *Allocator) Result {
				a.SetPools([]Pool{{Name: "c", Ranges: ranges(t, "192.0.3.0/31")}})
				return ask(1, func(r *Request) { r.Pools = []string{"c"} })(a)
			}, addrs("192.0.2.9"), Outside, "192.0.2.9 is in no pool any more"},
			{"moved", ask(1, func(r *Request) { r.Pools, r.Named = []string{"c"}, true }), addrs("192.0.3.0"), "", ""},
		},
		"blocked": {
			{"passed over", func(a *Allocator) Result {
				a.Block(netip.MustParseAddr("192.0.2.0"), "an address of node n1")
				return ask(1, nil)(a)
			}, addrs("192.0.2.1"), "", ""},
			{"asked", ask(2, asked("192.0.2.0")), nil, Taken, "192.0.2.0 is an address of node n1"},
			{"held", func(a *Allocator) Result {
				a.Block(netip.MustParseAddr("192.0.2.1"), "an address of node n2")
				return ask(1, nil)(a)
			}, addrs("192.0.2.1"), Outside, "192.0.2.1 is an address of node n2"},
			{"unblocked", func(a *Allocator) Result {
				a.Unblock(netip.MustParseAddr("192.0.2.0"))
				return ask(2, asked("192.0.2.0"))(a)
			}, addrs("192.0.2.0"), "", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := New()
			a.SetPools([]Pool{
				{Name: "a", Ranges: ranges(t, "192.0.2.0/30")}, {Name: "b", Ranges: ranges(t, "192.0.2.2-192.0.2.9")},
				{Name: "six", Ranges: ranges(t, "2001:db8::/64")}, {Name: "manual", Ranges: ranges(t, "198.51.100.0/24")},
			})
			for _, s := range steps {
				got := s.do(a)
				var kind Kind
				var says string
				if len(got.Problems) > 0 {
					kind, says = got.Problems[0].Kind, got.Problems[0].Message
				}
				if !slices.Equal(got.Addrs, s.want) || kind != s.kind || !strings.Contains(says, s.says) {
					t.Errorf("%s: %s (%s: %s), want %s (%s: %s)", s.what, got.Addrs, kind, says, s.want, s.kind, s.says)
				}
				for _, addr := range got.Surplus {
					a.Release(addr, service(1))
					a.Release(addr, service(2))
				}
			}
		})
	}
}

func TestExhausted(t *testing.T) {
	a := New()
	a.SetPools([]Pool{{Name: "a", Ranges: ranges(t, "192.0.2.254-192.0.3.1"), AvoidBuggy: true},
		{Name: "b", Ranges: ranges(t, "192.0.2.0/31")}})
	r := func(i int) *Request {
		return &Request{Holder: Holder{Service: service(i)}, Families: four, Pools: []string{"b", "a"}}
	}
	for i, want := range []string{"192.0.2.0", "192.0.2.1", "192.0.2.254", "192.0.3.1"} {
		if got := a.Assign(r(i)); !slices.Equal(got.Addrs, addrs(want)) {
			t.Fatalf("%s, want %s", got.Addrs, want)
		}
	}
	got := a.Assign(r(9))
	if len(got.Addrs) > 0 || got.Problems[0].Kind != Exhausted ||
		!strings.Contains(got.Problems[0].Message, "b (0 free of 2), a (0 free of 2)") ||
		!slices.Equal(got.Problems[0].Pools, []string{"b", "a"}) {
		t.Errorf("%s, %+v", got.Addrs, got.Problems[0])
	}
	a.Release(addrs("192.0.2.254")[0], service(2))
	a.Release(addrs("192.0.2.0")[0], service(0))
	if got := a.Assign(r(9)); !slices.Equal(got.Addrs, addrs("192.0.2.0")) {
		t.Errorf("%s, want the pool that is named first", got.Addrs)
	}
}

// The address that was released last is given out last.
func TestReleasedAddressesRest(t *testing.T) {
	a := New()
	a.SetPools([]Pool{{Name: "a", Ranges: ranges(t, "192.0.2.0/30")}})
	take := func(i int) netip.Addr {
		return a.Assign(&Request{Holder: Holder{Service: service(i)}, Families: four, Pools: []string{"a"}}).Addrs[0]
	}
	var got []string
	for i := range 6 {
		addr := take(i)
		got = append(got, addr.String())
		a.Release(addr, service(i))
	}
	if want := "192.0.2.0 192.0.2.1 192.0.2.2 192.0.2.3 192.0.2.0 192.0.2.1"; strings.Join(got, " ") != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// Against a model that knows no indexes: each address is looked at.
func TestAllocatorAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		t.Repeat(map[string]func(*rapid.T){
			"assign": m.assign, "release": m.release, "pools": m.setPools, "block": m.block, "": m.check,
		})
	})
}

type model struct {
	a       *Allocator
	pools   []Pool
	blocked map[netip.Addr]bool
	has     map[svc.Name]map[netip.Addr]bool
	holder  map[svc.Name]Holder
}

func newModel(t *rapid.T) *model {
	m := &model{a: New(), blocked: map[netip.Addr]bool{}, has: map[svc.Name]map[netip.Addr]bool{}, holder: map[svc.Name]Holder{}}
	m.setPools(t)
	return m
}

const universe = 24

func at(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{192, 0, 2 + byte((i+250)/256), byte(i + 250)})
}

func (m *model) setPools(t *rapid.T) {
	m.pools = nil
	for i := range rapid.IntRange(0, 3).Draw(t, "pools") {
		p := Pool{Name: string(rune('a' + i)), AvoidBuggy: rapid.Bool().Draw(t, "avoid")}
		for range rapid.IntRange(1, 3).Draw(t, "ranges") {
			first := rapid.IntRange(0, universe-1).Draw(t, "first")
			p.Ranges = append(p.Ranges, Range{at(first), at(rapid.IntRange(first, min(first+6, universe-1)).Draw(t, "last"))})
		}
		m.pools = append(m.pools, p)
	}
	m.a.SetPools(m.pools)
}

// poolOf is the first pool that lists addr.
func (m *model) poolOf(addr netip.Addr) string {
	for _, p := range m.pools {
		if slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.Contains(addr) }) {
			if p.AvoidBuggy && isBuggy(addr) {
				return ""
			}
			return p.Name
		}
	}
	return ""
}

func (m *model) holders(addr netip.Addr) (out []Holder) {
	for s, list := range m.has {
		if list[addr] {
			out = append(out, m.holder[s])
		}
	}
	return out
}

// available reports whether h may have addr, given the others.
func (m *model) available(addr netip.Addr, h Holder, pools []string) bool {
	if m.blocked[addr] || !slices.Contains(pools, m.poolOf(addr)) {
		return false
	}
	for _, o := range m.holders(addr) {
		if o.Service != h.Service && !h.fits(&o) {
			return false
		}
	}
	return true
}

func (m *model) assign(t *rapid.T) {
	h := Holder{Service: service(rapid.IntRange(0, 15).Draw(t, "service")), Key: rapid.SampledFrom([]string{"", "", "k", "l"}).Draw(t, "key"),
		Ports: tcp(uint16(rapid.IntRange(1, 3).Draw(t, "port")))}
	r := &Request{Holder: h, Families: four, Pools: rapid.SampledFrom([][]string{{"a", "b", "c"}, {"b"}, {"c", "a"}}).Draw(t, "of")}
	if rapid.IntRange(0, 3).Draw(t, "asks") == 0 {
		r.Asked = []netip.Addr{at(rapid.IntRange(0, universe-1).Draw(t, "asked"))}
	}
	before := m.a.Of(h.Service)
	m.holder[h.Service] = h
	possible, keepable := false, false
	for i := range universe {
		possible = possible || m.available(at(i), h, r.Pools)
	}
	for _, addr := range before {
		fits := true
		for _, o := range m.holders(addr) {
			fits = fits && (o.Service == h.Service || h.fits(&o))
		}
		keepable = keepable || fits
	}
	got := m.a.Assign(r)
	if m.has[h.Service] == nil {
		m.has[h.Service] = map[netip.Addr]bool{}
	}
	for _, addr := range got.Addrs {
		if !slices.Contains(before, addr) && !m.available(addr, h, r.Pools) {
			t.Fatalf("%s got %s, which is not free", h.Service, addr)
		}
		m.has[h.Service][addr] = true
	}
	switch {
	case len(r.Asked) > 0 && m.available(r.Asked[0], h, r.Pools):
		if !slices.Equal(got.Addrs, r.Asked) {
			t.Fatalf("got %s, asked for %s, which is free", got.Addrs, r.Asked)
		}
	case keepable:
		if len(got.Addrs) != 1 || !slices.Contains(before, got.Addrs[0]) {
			t.Fatalf("moved from %s to %s for no reason", before, got.Addrs)
		}
	case len(r.Asked) == 0 && possible && len(got.Addrs) == 0 && len(before) == 0:
		t.Fatalf("got nothing though an address is free: %v", got.Problems)
	case len(got.Addrs) == 0 && len(got.Problems) == 0:
		t.Fatal("got nothing, and no reason")
	}
	for _, addr := range got.Surplus {
		m.a.Release(addr, h.Service)
		delete(m.has[h.Service], addr)
	}
}

func (m *model) release(t *rapid.T) {
	s := service(rapid.IntRange(0, 15).Draw(t, "service"))
	for _, addr := range m.a.Of(s) {
		m.a.Release(addr, s)
	}
	delete(m.has, s)
}

func (m *model) block(t *rapid.T) {
	addr := at(rapid.IntRange(0, universe-1).Draw(t, "address"))
	if m.blocked[addr] {
		delete(m.blocked, addr)
		m.a.Unblock(addr)
	} else {
		m.blocked[addr] = true
		m.a.Block(addr, "taken")
	}
}

// check compares everything that the allocator counts and knows with the model.
func (m *model) check(t *rapid.T) {
	used, free, total := map[string]uint64{}, map[string]uint64{}, map[string]uint64{}
	held := 0
	for i := range universe {
		addr := at(i)
		name := m.poolOf(addr)
		if m.a.PoolOf(addr) != name {
			t.Fatalf("%s is of pool %q, want %q", addr, m.a.PoolOf(addr), name)
		}
		holders := m.holders(addr)
		if len(m.a.Holders(addr)) != len(holders) {
			t.Fatalf("%s is held by %s, want %v", addr, m.a.Holders(addr), holders)
		}
		total[name]++
		switch {
		case len(holders) > 0:
			used[name]++
			held++
		case !m.blocked[addr]:
			free[name]++
		}
	}
	for _, p := range m.pools {
		want := Usage{Total: total[p.Name], Free: free[p.Name], Used: used[p.Name]}
		if got := m.a.Usage(p.Name, svc.IPv4); got != want {
			t.Fatalf("pool %s: %+v, want %+v", p.Name, got, want)
		}
	}
	if m.a.Len() != held {
		t.Fatalf("%d addresses are held, want %d", m.a.Len(), held)
	}
}

// A pool of any size costs the same, and ten thousand Services get an address each in
// a time that does not grow with those before.
func BenchmarkAssign(b *testing.B) {
	for _, text := range []string{"10.0.0.0/8", "2001:db8::/64"} {
		b.Run(text, func(b *testing.B) {
			r := ranges(b, text)
			a := New()
			a.SetPools([]Pool{{Name: "a", Ranges: r}})
			family := []svc.Family{svc.FamilyOf(r[0].First)}
			for i := 0; b.Loop(); i++ {
				a.Assign(&Request{Holder: Holder{Service: service(i)}, Families: family, Pools: []string{"a"}})
			}
		})
	}
}

func TestTenThousandOfOnePool(t *testing.T) {
	a := New()
	a.SetPools([]Pool{{Name: "a", Ranges: ranges(t, "10.0.0.0/8,2001:db8::/64")}})
	seen := map[netip.Addr]bool{}
	for i := range 10000 {
		got := a.Assign(&Request{Holder: Holder{Service: service(i)}, Families: both, Both: true, Pools: []string{"a"}})
		if len(got.Addrs) != 2 || seen[got.Addrs[0]] || seen[got.Addrs[1]] {
			t.Fatalf("Service %d: %v", i, got)
		}
		seen[got.Addrs[0]], seen[got.Addrs[1]] = true, true
	}
	if u := a.Usage("a", svc.IPv4); u != (Usage{Total: 1 << 24, Free: 1<<24 - 10000, Used: 10000}) {
		t.Errorf("%+v", u)
	}
}
