package nft

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"pgregory.net/rapid"
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// eps are endpoints; a star marks local ones.
func eps(addrs ...string) []table.Endpoint {
	var out []table.Endpoint
	for _, a := range addrs {
		local := a[0] == '*'
		if local {
			a = a[1:]
		}
		out = append(out, table.Endpoint{Addr: ap(a), Local: local})
	}
	return out
}

func servicePort(name, portName string, f svc.Family, p svc.Protocol, fronts ...table.Frontend) *table.ServicePort {
	return &table.ServicePort{
		ID:     svc.PortName{Name: svc.Name{Namespace: "default", Name: name}, Port: portName},
		Family: f, Protocol: p, Frontends: fronts,
	}
}

func addrs(list []table.Endpoint) []netip.AddrPort {
	var out []netip.AddrPort
	for _, e := range list {
		out = append(out, e.Addr)
	}
	return out
}

func TestReslotKeepsPlaces(t *testing.T) {
	a, b, c, d := "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"
	for _, tc := range []struct {
		name            string
		old, want, slot []table.Endpoint
	}{
		{"from nothing", nil, eps(a, b), eps(a, b)},
		{"to nothing", eps(a, b), nil, nil},
		{"the last fills the gap", eps(a, b, c, d), eps(a, c, d), eps(a, d, c)},
		{"a new one fills the gap", eps(a, b, c), eps(a, c, d), eps(a, d, c)},
		{"a new one at the end", eps(b, c), eps(a, b, c), eps(b, c, a)},
		{"holes left by others", []table.Endpoint{{}, eps(b)[0]}, eps(a, b), eps(a, b)},
		{"one found twice", eps(b, b), eps(a, b), eps(b, a)},
	} {
		if got := reslot(tc.old, tc.want); !slices.Equal(addrs(got), addrs(tc.slot)) {
			t.Errorf("%s: %v, want %v", tc.name, addrs(got), addrs(tc.slot))
		}
	}
}

// Whatever the lists, the result has each wanted endpoint once, and no more
// slots change than must.
func TestReslotProperties(t *testing.T) {
	list := rapid.Custom(func(t *rapid.T) []table.Endpoint {
		var out []table.Endpoint
		for _, n := range rapid.SliceOfNDistinct(rapid.IntRange(1, 12), 0, 12, rapid.ID).Draw(t, "hosts") {
			out = append(out, table.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80)})
		}
		return out
	})
	rapid.Check(t, func(t *rapid.T) {
		old, want := list.Draw(t, "old"), list.Draw(t, "want")
		slices.SortFunc(want, func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
		got := reslot(old, want)
		sorted := slices.SortedFunc(slices.Values(got), func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
		if !slices.Equal(addrs(sorted), addrs(want)) {
			t.Fatalf("reslot(%v, %v) = %v", addrs(old), addrs(want), addrs(got))
		}
		for i, e := range old {
			if i < len(got) && got[i].Addr != e.Addr && slices.Contains(addrs(want), e.Addr) {
				t.Fatalf("%v lost its slot %d in %v", e.Addr, i, addrs(got))
			}
		}
	})
}

func TestValidateNamesTheFault(t *testing.T) {
	ok := servicePort("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: eps("10.0.0.1:1")})
	if err := validate(ok); err != nil {
		t.Error(err)
	}
	for name, f := range map[string]table.Frontend{
		"family":          {Addr: ap("[fd00::1]:80")},
		"port":            {Addr: ap("10.96.0.1:0")},
		"endpoint family": {Addr: ap("10.96.0.1:80"), Endpoints: eps("[fd00::1]:80")},
		"endpoint port":   {Addr: ap("10.96.0.1:80"), LocalClients: eps("10.0.0.1:0")},
		"too many":        {Addr: ap("10.96.0.1:80"), Endpoints: slices.Repeat(eps("10.0.0.1:1"), maxEndpoints+1)},
	} {
		if err := validate(servicePort("web", "", svc.IPv4, svc.TCP, f)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestParseBalance(t *testing.T) {
	for s, want := range map[string]Balance{"": Random, "random": Random, "roundrobin": RoundRobin} {
		if b, err := ParseBalance(s); err != nil || b != want {
			t.Errorf("ParseBalance(%q) = %v, %v", s, b, err)
		}
	}
	if _, err := ParseBalance("rr"); err == nil {
		t.Error("rr is not a balance")
	}
}
