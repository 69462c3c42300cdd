package testbed

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// The addresses of a Network. Host number i (from 1) has 192.168.77.(10+i) and
// fd00:77::(10+i) on the underlay and the pod ranges 10.244.i.0/24 and
// fd00:10:244:i::/64.
var (
	underlay4 = netip.MustParsePrefix("192.168.77.1/24")
	underlay6 = netip.MustParsePrefix("fd00:77::1/64")
)

const (
	firstHost = 10 // added to a host's number for its underlay address
	firstPod  = 1  // added to a pod's number for its address in the range
)

// Network is an underlay with hosts on it. Its methods fail the test on any
// error; everything is gone when the test ends.
type Network struct {
	t      testing.TB
	sw     *namespace
	bridge int // index of the underlay bridge in sw

	mu    sync.Mutex
	hosts map[string]*Host
	order []*Host
}

// NewNetwork makes an underlay without hosts. It has a gateway (192.168.77.1,
// fd00:77::1), the default route of every host, that forwards nothing: what a
// host sends into the wide world is lost there.
func NewNetwork(t testing.TB) *Network {
	t.Helper()
	n := &Network{t: t, sw: newNamespace(t, "underlay"), hosts: map[string]*Host{}}
	n.sw.sysctl(t, "net/ipv4/ip_forward", "0")
	n.sw.sysctl(t, "net/ipv6/conf/all/forwarding", "0")
	n.bridge = n.sw.addBridge(t, "underlay", underlay4, underlay6)
	return n
}

// Host is a machine, a pod or an outside client: a network namespace with one
// interface, eth0, of one IPv4 and one IPv6 address.
type Host struct {
	net    *Network
	ns     *namespace
	name   string
	number int
	addr4  netip.Addr
	addr6  netip.Addr

	// Set on hosts that may have pods.
	podCIDR4, podCIDR6 netip.Prefix
	podBridge          int
	mu                 sync.Mutex
	pods               map[string]*Host

	node *Host // the host a pod runs on
}

// Host returns the host called name, made when it is first asked for. Hosts
// forward, and have routes to each other's pod ranges.
func (n *Network) Host(name string) *Host {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if h := n.hosts[name]; h != nil {
		return h
	}
	h := n.attach(name)
	h.pods = map[string]*Host{}
	h.podCIDR4 = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(h.number), 0}), 24)
	h.podCIDR6 = netip.PrefixFrom(netip.MustParseAddr("fd00:10:244::"), 64)
	a := h.podCIDR6.Addr().As16()
	a[7] = byte(h.number)
	h.podCIDR6 = netip.PrefixFrom(netip.AddrFrom16(a), 64)
	h.ns.sysctl(n.t, "net/ipv4/ip_forward", "1")
	h.ns.sysctl(n.t, "net/ipv6/conf/all/forwarding", "1")
	h.podBridge = h.ns.addBridge(n.t, "pods", withHost(h.podCIDR4, firstPod), withHost(h.podCIDR6, firstPod))
	for _, o := range n.order {
		if o != h && o.pods != nil {
			o.routeToPods(h)
			h.routeToPods(o)
		}
	}
	return h
}

// Outside returns the client called name, made when it is first asked for: on
// the underlay, but with no pods and no routes to those of the hosts.
func (n *Network) Outside(name string) *Host {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if h := n.hosts[name]; h != nil {
		return h
	}
	return n.attach(name)
}

// Far is Outside on a second network, of 192.168.78.0/24 and fd00:78::/64, from which a
// router leads to the first.
func (n *Network) Far(name string) *Host {
	n.t.Helper()
	h := n.Outside(name)
	sw, eth := n.sw.mustLink(n.t, "underlay"), h.ns.mustLink(n.t, "eth0")
	n.sw.sysctl(n.t, "net/ipv4/ip_forward", "1")
	n.sw.sysctl(n.t, "net/ipv6/conf/all/forwarding", "1")
	for _, a := range []struct{ own, near, router netip.Prefix }{
		{withHost(far4, firstHost+h.number), netip.PrefixFrom(h.addr4, underlay4.Bits()), far4},
		{withHost(far6, firstHost+h.number), netip.PrefixFrom(h.addr6, underlay6.Bits()), far6},
	} {
		_ = n.sw.link.AddrReplace(sw, &netlink.Addr{IPNet: ipNet(a.router), Flags: ifaFlagNoDAD})
		must(n.t, h.ns.link.AddrDel(eth, &netlink.Addr{IPNet: ipNet(a.near)}), "%s: remove %s", name, a.near)
		h.ns.addAddr(n.t, eth, a.own)
		all := netip.PrefixFrom(a.own.Addr(), 0).Masked()
		must(n.t, h.ns.link.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: ipNet(all), Gw: a.router.Addr().AsSlice()}),
			"%s: default route", name)
	}
	h.addr4, h.addr6 = withHost(far4, firstHost+h.number).Addr(), withHost(far6, firstHost+h.number).Addr()
	return h
}

// The second network of Far.
var (
	far4 = netip.MustParsePrefix("192.168.78.1/24")
	far6 = netip.MustParsePrefix("fd00:78::1/64")
)

// attach makes a namespace with an interface on the underlay.
func (n *Network) attach(name string) *Host {
	n.t.Helper()
	number := len(n.order) + 1
	h := &Host{net: n, name: name, number: number}
	h.ns = newNamespace(n.t, name)
	p4, p6 := withHost(underlay4, firstHost+number), withHost(underlay6, firstHost+number)
	h.addr4, h.addr6 = p4.Addr(), p6.Addr()
	n.sw.plug(n.t, n.bridge, h.ns, p4, p6, underlay4.Addr(), underlay6.Addr())
	n.hosts[name] = h
	n.order = append(n.order, h)
	return h
}

func (h *Host) routeToPods(o *Host) {
	h.Route(o.podCIDR4, o.addr4)
	h.Route(o.podCIDR6, o.addr6)
}

// Route adds a route to dst through the neighbour via.
func (h *Host) Route(dst netip.Prefix, via netip.Addr) {
	t := h.net.t
	t.Helper()
	eth := h.ns.mustLink(t, "eth0")
	must(t, h.ns.link.RouteReplace(&netlink.Route{
		LinkIndex: eth.Attrs().Index, Dst: ipNet(dst), Gw: via.AsSlice(),
	}), "%s: route to %s", h.name, dst)
}

// AddAddr gives h a further address on its loopback device, as an
// administrator does with an external IP.
func (h *Host) AddAddr(a netip.Addr) {
	t := h.net.t
	t.Helper()
	h.ns.addAddr(t, h.ns.mustLink(t, "lo"), netip.PrefixFrom(a, a.BitLen()))
}

// Pod returns the pod called name on host h, made when it is first asked for:
// its own namespace with addresses out of the host's pod ranges, joined
// to the host by a veth and a bridge whose ports reflect (hairpin), as container
// network plugins set them up.
func (h *Host) Pod(name string) *Host {
	t := h.net.t
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.pods[name]; p != nil {
		return p
	}
	if h.pods == nil {
		t.Fatalf("testbed: %s is no host that could have pods", h.name)
	}
	p := &Host{net: h.net, name: name, number: firstPod + len(h.pods) + 1, node: h}
	p.ns = newNamespace(t, name)
	p4, p6 := withHost(h.podCIDR4, p.number), withHost(h.podCIDR6, p.number)
	p.addr4, p.addr6 = p4.Addr(), p6.Addr()
	h.ns.plug(t, h.podBridge, p.ns, p4, p6, withHost(h.podCIDR4, firstPod).Addr(), withHost(h.podCIDR6, firstPod).Addr())
	h.pods[name] = p
	return p
}

// Name is the host's name.
func (h *Host) Name() string { return h.name }

// Addr4 is the host's IPv4 address on the underlay, or a pod's in its range.
func (h *Host) Addr4() netip.Addr { return h.addr4 }

// Addr6 is the host's IPv6 address.
func (h *Host) Addr6() netip.Addr { return h.addr6 }

// Addr is the host's address of family f.
func (h *Host) Addr(f svc.Family) netip.Addr {
	if f == svc.IPv6 {
		return h.addr6
	}
	return h.addr4
}

// PodCIDR is the range of family f that the host's pods have; its first
// address is the host's own on the pod bridge.
func (h *Host) PodCIDR(f svc.Family) netip.Prefix {
	if f == svc.IPv6 {
		return h.podCIDR6
	}
	return h.podCIDR4
}

// Node is the host that pod h runs on, nil if h is no pod.
func (h *Host) Node() *Host { return h.node }

// Do runs f on the calling goroutine inside the host's namespace. Sockets that
// f opens stay there; goroutines that f starts do not run there, so f opens a
// listener itself and may serve it elsewhere.
func (h *Host) Do(f func()) { h.ns.do(f) }

// NSPath is a file name of the namespace, for programs that enter it.
func (h *Host) NSPath() string { return h.ns.path() }

// NSFd is the open file of the namespace, for libraries that take one.
func (h *Host) NSFd() int { return int(h.ns.file.Fd()) }

// Command is exec.CommandContext for a program that runs on the host.
func (h *Host) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return h.ns.command(ctx, name, args...)
}

// Carrier takes the cable out of the host's interface, or puts it back.
func (h *Host) Carrier(on bool) {
	h.net.t.Helper()
	port := h.net.sw.mustLink(h.net.t, portName(h.addr4))
	set := h.net.sw.link.LinkSetDown
	if on {
		set = h.net.sw.link.LinkSetUp
	}
	must(h.net.t, set(port), "%s: carrier %v", h.name, on)
}

// Sysctl sets a kernel parameter on the host, named with slashes:
// "net/ipv4/ip_forward".
func (h *Host) Sysctl(key, value string) { h.ns.sysctl(h.net.t, key, value) }

// Tracks returns an error unless the host's connection tracking table has an entry
// of what was sent to an address.
func (h *Host) Tracks(p svc.Protocol, to netip.AddrPort) error {
	family := netlink.InetFamily(unix.AF_INET)
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	flows, err := h.ns.link.ConntrackTableList(netlink.ConntrackTable, family)
	if err != nil {
		return err
	}
	for _, f := range flows {
		dst, _ := netip.AddrFromSlice(f.Forward.DstIP)
		if svc.Protocol(f.Forward.Protocol) == p && netip.AddrPortFrom(dst.Unmap(), f.Forward.DstPort) == to {
			return nil
		}
	}
	return fmt.Errorf("%s tracks %d connections, none of them by %s to %s", h.name, len(flows), p, to)
}

// ForgetConnections empties the host's connection tracking table.
func (h *Host) ForgetConnections() {
	t := h.net.t
	t.Helper()
	must(t, h.ns.link.ConntrackTableFlush(netlink.ConntrackTable), "%s: flush the connection tracking table", h.name)
}
