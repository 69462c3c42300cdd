package link_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// A ClusterIP stays local while the address that it is called from changes.
func TestClusterIPsStayLocal(t *testing.T) {
	node(t)
	var sources []netip.Addr
	for _, text := range []string{"198.51.100.1", "198.51.100.2", "2001:db8:7::1", "2001:db8:7::2"} {
		a := netip.MustParseAddr(text)
		sources = append(sources, a)
		at := netip.PrefixFrom(a, a.BitLen()).String()
		flags := map[bool][]string{false: {"nodad"}}[a.Is4()] // otherwise the address is tentative for a moment, also on lo
		run(t, "", "ip", append([]string{"address", "add", at, "dev", "lo"}, flags...)...)
		defer run(t, "", "ip", "address", "del", at, "dev", "lo")
	}
	addrs := []netip.Addr{netip.MustParseAddr("10.96.0.7"), netip.MustParseAddr("10.96.0.8"), netip.MustParseAddr("fd00:10:96::7")}
	set := func(addrs []netip.Addr, from ...netip.Addr) {
		t.Helper()
		if err := link.SetClusterIPs(addrs, from); err != nil {
			t.Fatal(err)
		}
		got, err := link.ClusterIPs()
		slices.SortFunc(got, netip.Addr.Compare)
		if err != nil || !slices.Equal(got, addrs) {
			t.Fatalf("local are %v, %v, want %v", got, err, addrs)
		}
	}
	defer func() { _ = link.SetClusterIPs(nil, nil) }()
	set(addrs, sources[0], sources[2])
	updates, done := make(chan netlink.RouteUpdate, 64), make(chan struct{})
	defer close(done)
	if err := netlink.RouteSubscribe(updates, done); err != nil {
		t.Fatal(err)
	}
	set(addrs, sources[1], sources[3])
	set(addrs[1:], sources[1], sources[3])
	for deadline := time.After(30 * time.Second); ; {
		select {
		case u := <-updates:
			if u.Protocol != link.ClusterIPProtocol || u.Type != unix.RTM_DELROUTE {
				continue
			}
			if a, _ := netip.AddrFromSlice(u.Dst.IP); a.Unmap() != addrs[0] {
				t.Fatalf("the local route to %v was removed", a)
			}
			return
		case <-deadline:
			t.Fatal("the removal of a local route was not seen")
		}
	}
}
