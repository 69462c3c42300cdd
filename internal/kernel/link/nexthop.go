package link

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// NextHop returns an address by which packets for any destination get to another node if they are routed to that address: the
// node's own if no router is between, else one of its pods' range if VXLAN leads there. It is not valid if there is neither, so
// that a router could send them elsewhere. Either argument may be invalid.
func NextHop(node netip.Addr, pods netip.Prefix) netip.Addr {
	if node.IsValid() {
		if near, err := Neighbour(node); err == nil && near {
			return node
		}
	}
	if !pods.IsValid() {
		return netip.Addr{}
	}
	to := pods.Masked().Addr()
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) != 1 {
		return netip.Addr{}
	}
	dev, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil || dev.Type() != "vxlan" {
		return netip.Addr{}
	}
	return to
}

// Path is how the kernel sends packets to an address: out of Device, to the router Via unless that is not valid, from Source.
type Path struct {
	Device      string
	Via, Source netip.Addr
}

// PathTo looks up the route for packets that this machine itself sends, in the network namespace of the calling thread. Without a route its
// error is ENETUNREACH, EHOSTUNREACH, EACCES or EINVAL, as the kind of the route is.
func PathTo(to netip.Addr) (Path, error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil {
		return Path{}, err
	}
	if len(routes) != 1 {
		return Path{}, fmt.Errorf("%d routes to %s", len(routes), to)
	}
	dev, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return Path{}, fmt.Errorf("device of the route to %s: %w", to, err)
	}
	via, _ := netip.AddrFromSlice(routes[0].Gw)
	source, _ := netip.AddrFromSlice(routes[0].Src)
	return Path{Device: dev.Attrs().Name, Via: via.Unmap(), Source: source.Unmap()}, nil
}
