package filter

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// One change among 2,000 listeners is a transaction of its own size.
func TestChangeCostsItself(t *testing.T) {
	addrs, listeners := map[netip.Addr]bool{}, map[Listener]bool{}
	for i := range 1000 {
		a := netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})
		addrs[a] = true
		listeners[Listener{svc.TCP, netip.AddrPortFrom(a, 80)}], listeners[Listener{svc.TCP, netip.AddrPortFrom(a, 443)}] = true, true
	}
	gone := Listener{svc.TCP, netip.MustParseAddrPort("10.9.0.7:80")}
	fewer := without(listeners, map[Listener]bool{gone: true})
	if all, one := whole(addrs, listeners).Size(), difference(addrs, addrs, listeners, fewer).Size(); one > 300 || all < 50_000 {
		t.Errorf("the whole table has %d bytes, the change %d", all, one)
	}
}
