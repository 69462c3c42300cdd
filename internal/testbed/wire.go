package testbed

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
)

// addBridge makes a bridge with addresses and returns its index.
func (ns *namespace) addBridge(t testing.TB, name string, addrs ...netip.Prefix) int {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	// A fixed hardware address: else it changes with every port that joins,
	// and neighbours remember the wrong one.
	attrs.HardwareAddr = net.HardwareAddr{0x02, 0xfa, 0x1e, 0xad, 0, byte(len(ns.name))}
	must(t, ns.link.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}), "%s: add bridge %s", ns.name, name)
	br := ns.mustLink(t, name)
	for _, a := range addrs {
		ns.addAddr(t, br, a)
	}
	must(t, ns.link.LinkSetUp(br), "%s: set %s up", ns.name, name)
	return br.Attrs().Index
}

// portName is the bridge's end of the link to the host with an address.
func portName(a netip.Addr) string { return fmt.Sprintf("port%d", a.As4()[3]) }

// plug joins host to the bridge of ns by a veth: "eth0" with the two addresses
// and default routes on the host's side.
func (ns *namespace) plug(t testing.TB, bridge int, host *namespace, p4, p6 netip.Prefix, gw4, gw6 netip.Addr) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = portName(p4.Addr())
	must(t, ns.link.LinkAdd(&netlink.Veth{
		LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(host.file.Fd())),
	}), "add veth from %s to %s", ns.name, host.name)
	port := ns.mustLink(t, attrs.Name)
	must(t, ns.link.LinkSetMasterByIndex(port, bridge), "plug %s into its bridge", host.name)
	must(t, ns.link.LinkSetHairpin(port, true), "let the port of %s reflect", host.name)
	must(t, ns.link.LinkSetUp(port), "set the port of %s up", host.name)

	eth := host.mustLink(t, "eth0")
	host.addAddr(t, eth, p4)
	host.addAddr(t, eth, p6)
	must(t, host.link.LinkSetUp(eth), "%s: set eth0 up", host.name)
	for _, gw := range []netip.Addr{gw4, gw6} {
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if gw.Is6() {
			all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		must(t, host.link.RouteReplace(&netlink.Route{
			LinkIndex: eth.Attrs().Index, Dst: ipNet(all), Gw: gw.AsSlice(),
		}), "%s: default route via %s", host.name, gw)
	}
}

func (ns *namespace) addAddr(t testing.TB, l netlink.Link, p netip.Prefix) {
	t.Helper()
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = ifaFlagNoDAD
	}
	must(t, ns.link.AddrAdd(l, a), "%s: add %s to %s", ns.name, p, l.Attrs().Name)
}

// ifaFlagNoDAD is IFA_F_NODAD of linux/if_addr.h: the address is usable at
// once, without asking the neighbours for duplicates.
const ifaFlagNoDAD = 0x02

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// withHost returns the address number i of prefix p, with p's length.
func withHost(p netip.Prefix, i int) netip.Prefix {
	b := p.Masked().Addr().AsSlice()
	b[len(b)-1] = byte(i)
	a, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(a, p.Bits())
}
