package listen

import (
	"net/netip"
	"testing"
)

func TestChooseAdvertise(t *testing.T) {
	a := netip.MustParseAddr
	for _, c := range []struct {
		bind []netip.Addr
		want netip.Addr
	}{
		{[]netip.Addr{a("127.0.0.1")}, netip.Addr{}},
		{[]netip.Addr{a("127.0.0.1"), a("192.0.2.1"), a("192.0.2.2")}, a("192.0.2.1")},
		{[]netip.Addr{a("::1"), a("2001:db8::1")}, a("2001:db8::1")},
		{[]netip.Addr{a("0.0.0.0")}, mainAddress()},
	} {
		if got := ChooseAdvertise(c.bind); got != c.want {
			t.Errorf("%v: got %v, want %v", c.bind, got, c.want)
		}
	}
}
