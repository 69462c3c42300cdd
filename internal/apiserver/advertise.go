package apiserver

import (
	"net"
	"net/netip"
)

// chooseAdvertise returns where others reach a server that listens on bind:
// the first bind address that is not loopback; for a server that listens on
// every address the machine's main address; for one that listens on loopback
// alone nothing.
func chooseAdvertise(bind []netip.Addr) netip.Addr {
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
