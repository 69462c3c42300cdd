package listen

import (
	"net"
	"net/netip"
)

// ChooseAdvertise returns where others reach a server that listens on bind:
// the first bind address that is not loopback; for a server that listens on
// every address the machine's main address; for one that listens only on loopback nothing.
func ChooseAdvertise(bind []netip.Addr) netip.Addr {
	every := false
	for _, a := range bind {
		if a.IsUnspecified() {
			every = true
		} else if !a.IsLoopback() {
			return a
		}
	}
	if every {
		return mainAddress()
	}
	return netip.Addr{}
}

// mainAddress returns the first global unicast address of an interface that is up,
// IPv4 before IPv6.
func mainAddress() netip.Addr {
	var found netip.Addr
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return netip.Addr{}
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		switch ip := p.Addr(); {
		case !ip.IsGlobalUnicast():
		case ip.Is4():
			return ip
		case !found.IsValid():
			found = ip
		}
	}
	return found
}

// LocalAddress returns the address and port by which clients on this machine reach a server that listens on bind.
func LocalAddress(bind []netip.Addr, port uint16) string {
	a := bind[0]
	for _, b := range bind {
		if b.IsLoopback() {
			a = b
			break
		}
	}
	if a.IsUnspecified() {
		if a = netip.AddrFrom4([4]byte{127, 0, 0, 1}); bind[0].Is6() {
			a = netip.IPv6Loopback()
		}
	}
	return netip.AddrPortFrom(a, port).String()
}
