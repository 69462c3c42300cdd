package bgp

import (
	"net"
	"net/netip"
)

// nextHops are the node's addresses to which a router sends packets for the routes.
// Those that are not valid do not exist. linkLocal is that of a session between
// link-local addresses, whose router has it on its own network.
type nextHops struct {
	v4, v6, linkLocal netip.Addr
	device            string // that has them
}

// findNextHops returns the next hops of a session whose own end is local: that
// address, and of the other family one of the same interface.
func findNextHops(local netip.Addr) nextHops {
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		addresses, err := addressesOf(i)
		if err != nil {
			continue // the interface has just gone
		}
		h := nextHops{device: i.Name}
		found := false
		for _, a := range addresses {
			found = found || a == local.WithZone("")
			switch {
			case a.Is4() && !h.v4.IsValid() && !a.IsLoopback():
				h.v4 = a
			case a.Is6() && a.IsGlobalUnicast() && !h.v6.IsValid():
				h.v6 = a
			}
		}
		if found {
			h.use(local.WithZone(""))
			return h
		}
	}
	h := nextHops{}
	h.use(local.WithZone(""))
	return h
}

// use puts local, the address of the session itself, into its place.
func (h *nextHops) use(local netip.Addr) {
	switch {
	case local.Is4():
		h.v4 = local
	case local.IsLinkLocalUnicast():
		h.linkLocal = local
	default:
		h.v6 = local
	}
}

// isOwn reports whether a is an address of this node.
func isOwn(a netip.Addr) bool {
	interfaces, err := net.Interfaces()
	if err != nil {
		return false
	}
	for _, i := range interfaces {
		if a.Zone() != "" && a.Zone() != i.Name {
			continue
		}
		addresses, _ := addressesOf(i)
		for _, own := range addresses {
			if own == a.WithZone("") {
				return true
			}
		}
	}
	return false
}

func addressesOf(i net.Interface) ([]netip.Addr, error) {
	list, err := i.Addrs()
	if err != nil {
		return nil, err
	}
	out := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			ip, _ := netip.AddrFromSlice(n.IP)
			out = append(out, ip.Unmap())
		}
	}
	return out, nil
}

// onLink reports whether a is in one of the networks of this node's interfaces, or link-local.
func onLink(a netip.Addr) bool {
	if a.IsLinkLocalUnicast() {
		return true
	}
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, i := range interfaces {
		if n, err := netip.ParsePrefix(i.String()); err == nil && n.Contains(a) {
			return true
		}
	}
	return false
}
