package link

import (
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
