package link

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// MachineAddrs returns the addresses that this machine is reached at, at most one of
// each family: the one that packets to peer leave from, then the addresses of the same
// device, then of the device of the default route, then of any other. peer is the
// API server's address, or the zero Addr. Addresses that exist only on this machine
// never count: addresses of devices made by fairlead and docker, of dummies, and of
// bridges (virbr0, cni0) but one by which the default route leads out.
func MachineAddrs(peer netip.Addr) ([]netip.Addr, error) {
	links, err := Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	preferred, uplinks, err := ways(peer)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(links, func(a, b netlink.Link) int {
		return rank(a.Attrs().Index, preferred, uplinks) - rank(b.Attrs().Index, preferred, uplinks)
	})
	var out []netip.Addr
	add := func(a netip.Addr) {
		if a.IsGlobalUnicast() && !slices.ContainsFunc(out, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			out = append(out, a)
		}
	}
	for _, l := range links {
		if l.Attrs().Flags&unix.IFF_UP == 0 || !reachable(l, slices.Contains(uplinks, l.Attrs().Index)) {
			continue
		}
		addrs, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_ALL) })
		if err != nil {
			return nil, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
		}
		if slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return toAddr(a.IP) == preferred.source }) {
			add(preferred.source)
		}
		for _, a := range addrs {
			// Temporary addresses of IPv6 change by the day (RFC 8981).
			if a.Flags&(unix.IFA_F_TEMPORARY|unix.IFA_F_DEPRECATED|unix.IFA_F_DADFAILED) == 0 {
				add(toAddr(a.IP))
			}
		}
	}
	return out, nil
}

// way is how packets leave.
type way struct {
	device int
	source netip.Addr
}

// ways returns how packets to peer leave, and the devices of the default routes.
func ways(peer netip.Addr) (preferred way, uplinks []int, err error) {
	if peer.IsValid() && !peer.IsLoopback() {
		routes, err := netlink.RouteGet(peer.AsSlice())
		if err == nil && len(routes) > 0 { // without a route nothing is preferred
			preferred = way{routes[0].LinkIndex, toAddr(routes[0].Src)}
			if routes[0].Type == unix.RTN_LOCAL { // the server runs here, and the route is by lo
				preferred.source = peer
				if preferred.device, err = deviceOf(peer); err != nil {
					return way{}, nil, err
				}
			}
		}
	}
	routes, err := Whole(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return way{}, nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if ones := 0; r.Gw != nil {
			if r.Dst != nil {
				ones, _ = r.Dst.Mask.Size()
			}
			if ones == 0 {
				uplinks = append(uplinks, r.LinkIndex)
			}
		}
	}
	return preferred, uplinks, nil
}

// deviceOf returns the index of the device that has the address, 0 if none has it.
func deviceOf(a netip.Addr) (int, error) {
	addrs, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return 0, fmt.Errorf("list addresses: %w", err)
	}
	for _, has := range addrs {
		if toAddr(has.IP) == a {
			return has.LinkIndex, nil
		}
	}
	return 0, nil
}

func rank(device int, preferred way, uplinks []int) int {
	switch {
	case device == preferred.device:
		return 0
	case slices.Contains(uplinks, device):
		return 1
	}
	return 2
}

// reachable reports whether a device can have an address that others reach.
func reachable(l netlink.Link, uplink bool) bool {
	a := l.Attrs()
	switch {
	case Ours(a.Name), strings.HasPrefix(a.Name, "docker"), strings.HasPrefix(a.Alias, alias), l.Type() == "dummy":
		return false
	case l.Type() == "bridge":
		return uplink
	}
	return true
}

// Ours reports whether a device is one that a node makes for its Pods or Services.
func Ours(name string) bool {
	return strings.HasPrefix(name, "fairlead-") || strings.HasPrefix(name, "fl0")
}

func toAddr(ip []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
