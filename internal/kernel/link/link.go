// Package link makes the network devices, addresses and routes of pods: see
// README.md for the layout and its reasons.
//
// Every function works in the network namespace of the calling process, may be
// called again with the same arguments, and never touches what it did not make.
package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// Protocol marks our routes in the kernel (ip route show proto 250).
const Protocol = 250

const (
	// alias is the alias (IFLA_IFALIAS) of the node's device, podAlias begins
	// the routes of the pods' devices.
	alias    = "fairlead"
	podAlias = alias + " pod "
	// podDevice is the name of the interface inside a pod.
	podDevice = "eth0"
)

// HasIPv6 reports whether this kernel has IPv6.
func HasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6/conf/all/forwarding")
	return err == nil
}

// EnsureNode makes the device that holds the node's own addresses among the
// pods, one per family, and lets the machine forward.
func EnsureNode(name string, addrs []netip.Addr) error {
	if err := forward(); err != nil {
		return err
	}
	dev, err := netlink.LinkByName(name)
	if isMissing(err) {
		b := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
		b.Name = name
		if err := netlink.LinkAdd(b); err != nil {
			return fmt.Errorf("add device %s: %w", name, err)
		}
		if dev, err = netlink.LinkByName(name); err != nil {
			return fmt.Errorf("find device %s: %w", name, err)
		}
		if err := netlink.LinkSetAlias(dev, alias); err != nil {
			return fmt.Errorf("name device %s ours: %w", name, err)
		}
	} else if err != nil {
		return fmt.Errorf("find device %s: %w", name, err)
	} else if dev.Attrs().Alias != alias {
		return fmt.Errorf("a device %s that is not fairlead's is in the way: remove it or choose another name", name)
	}
	if err := netlink.LinkSetUp(dev); err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return ensureAddrs(dev, addrs)
}

// ensureAddrs makes addrs the only global addresses of dev, adding before
// deleting.
func ensureAddrs(dev netlink.Link, addrs []netip.Addr) error {
	have, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(dev, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", dev.Attrs().Name, err)
	}
	want := map[netip.Addr]bool{}
	for _, a := range addrs {
		want[a] = true
		if err := netlink.AddrReplace(dev, address(a)); err != nil {
			return fmt.Errorf("add %s to %s: %w", a, dev.Attrs().Name, err)
		}
	}
	for _, h := range have {
		a, _ := netip.AddrFromSlice(h.IP)
		if a = a.Unmap(); !want[a] && !a.IsLinkLocalUnicast() {
			if err := netlink.AddrDel(dev, &h); err != nil {
				return fmt.Errorf("remove %s from %s: %w", a, dev.Attrs().Name, err)
			}
		}
	}
	return nil
}

// Pod is the network of one pod.
type Pod struct {
	// Device is the name of the node's end, at most 15 characters.
	Device string
	// Name is part of the device's alias, for people.
	Name string
	// Netns names the pod's network namespace (netns.Of).
	Netns string
	// Addrs are the pod's addresses, at most one per family; Gateways are the
	// node's (EnsureNode), one for each family in Addrs.
	Addrs, Gateways []netip.Addr
	// MTU of both ends, 0 for that of a fresh veth (1500).
	MTU int
}

// AddPod joins a pod to the node. A device of the same name is replaced.
func AddPod(p Pod) error {
	if err := DelPod(p.Device); err != nil {
		return err
	}
	ns, err := netns.GetFromPath(p.Netns)
	if err != nil {
		return fmt.Errorf("open the network namespace of %s: %w", p.Name, err)
	}
	defer ns.Close()
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("talk to the network namespace of %s: %w", p.Name, err)
	}
	defer inside.Close()

	v := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: podDevice, PeerNamespace: netlink.NsFd(int(ns))}
	v.Name, v.MTU, v.PeerMTU, v.PeerHardwareAddr = p.Device, p.MTU, uint32(p.MTU), podHardware(p.Device)
	if err := netlink.LinkAdd(v); err != nil {
		return fmt.Errorf("add the veth pair of %s: %w", p.Name, err)
	}
	if err := connect(p, inside); err != nil {
		_ = netlink.LinkDel(v) // it may have no alias yet
		return err
	}
	return nil
}

// connect configures both ends of a fresh veth pair.
func connect(p Pod, inside *netlink.Handle) error {
	host, err := netlink.LinkByName(p.Device)
	if err != nil {
		return fmt.Errorf("find %s: %w", p.Device, err)
	}
	if err := netlink.LinkSetAlias(host, podAlias+p.Name); err != nil {
		return fmt.Errorf("name %s ours: %w", p.Device, err)
	}
	// Best effort: a read-only /proc/sys costs only hardening.
	_ = sysctl.Write("net/ipv4/conf/"+p.Device+"/rp_filter", "1")
	_ = sysctl.Write("net/ipv4/conf/"+p.Device+"/send_redirects", "0")
	pod, err := inside.LinkByName(podDevice)
	if err != nil {
		return fmt.Errorf("find %s of %s: %w", podDevice, p.Name, err)
	}
	if lo, err := inside.LinkByName("lo"); err != nil {
		return fmt.Errorf("find lo of %s: %w", p.Name, err)
	} else if err := inside.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo of %s up: %w", p.Name, err)
	}
	if err := inside.LinkSetUp(pod); err != nil {
		return fmt.Errorf("set %s of %s up: %w", podDevice, p.Name, err)
	}
	if err := netlink.LinkSetUp(host); err != nil {
		return fmt.Errorf("set %s up: %w", p.Device, err)
	}
	for _, a := range p.Addrs {
		for _, gw := range p.Gateways {
			if gw.Is4() == a.Is4() {
				if err := connectFamily(host, pod, inside, a, gw); err != nil {
					return fmt.Errorf("network of %s: %w", p.Name, err)
				}
			}
		}
	}
	return nil
}

func connectFamily(host, pod netlink.Link, inside *netlink.Handle, a, gw netip.Addr) error {
	if err := inside.AddrReplace(pod, address(a)); err != nil {
		return fmt.Errorf("add address %s: %w", a, err)
	}
	if err := inside.NeighSet(neighbour(pod, gw, host)); err != nil {
		return fmt.Errorf("add neighbour %s: %w", gw, err)
	}
	if err := inside.RouteReplace(&netlink.Route{
		LinkIndex: pod.Attrs().Index, Dst: network(single(gw)), Scope: netlink.SCOPE_LINK, Src: a.AsSlice(),
	}); err != nil {
		return fmt.Errorf("add route to the gateway %s: %w", gw, err)
	}
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if a.Is6() {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	if err := inside.RouteReplace(&netlink.Route{
		LinkIndex: pod.Attrs().Index, Dst: network(all), Gw: gw.AsSlice(), Src: a.AsSlice(),
	}); err != nil {
		return fmt.Errorf("add default route by %s: %w", gw, err)
	}
	if err := netlink.NeighSet(neighbour(host, a, pod)); err != nil {
		return fmt.Errorf("add neighbour %s: %w", a, err)
	}
	if err := netlink.RouteReplace(toPod(host.Attrs().Index, a, gw)); err != nil {
		return fmt.Errorf("add route to %s: %w", a, err)
	}
	return nil
}

// DelPod removes a pod's pair of devices, and with them its routes. It is no error
// if there is none. A device of that name that is not ours is not changed, which is
// an error.
func DelPod(device string) error {
	dev, err := netlink.LinkByName(device)
	if isMissing(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find device %s: %w", device, err)
	}
	if !isPod(dev) {
		return fmt.Errorf("a device %s that is not a pod's of fairlead is in the way: remove it", device)
	}
	if err := netlink.LinkDel(dev); err != nil && !isMissing(err) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove device %s: %w", device, err)
	}
	return nil
}

// dumpTries bounds how often a list is read again.
const dumpTries = 50

// Whole reads a list from the kernel again while it is interrupted by a change
// (NLM_F_DUMP_INTR), since such a list may be incomplete. After too many tries its
// error is netlink.ErrDumpInterrupted.
func Whole[T any](list func() ([]T, error)) (out []T, err error) {
	for range dumpTries {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// Devices lists the node's ends of all pods, by name.
func Devices() ([]string, error) {
	links, err := Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var out []string
	for _, l := range links {
		if isPod(l) {
			out = append(out, l.Attrs().Name)
		}
	}
	return out, nil
}

// Cleanup removes each of our devices, routes and rules in this network
// namespace. Kernel parameters are sysctl.Restore's.
func Cleanup() error {
	links, err := Whole(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		if l.Attrs().Alias == alias || isPod(l) {
			if err := netlink.LinkDel(l); err != nil && !isMissing(err) && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, fmt.Errorf("remove device %s: %w", l.Attrs().Name, err))
			}
		}
	}
	_, err = new(Routes).Set(nil)
	return errors.Join(append(errs, err, Unmasquerade(), RemoveSources(), RemoveOverlayFilter(), RemoveWireGuard())...)
}

func address(a netip.Addr) *netlink.Addr {
	return &netlink.Addr{IPNet: network(single(a)), Flags: nodad(a)}
}

// nodad turns duplicate address detection off: the address is ours by allocation,
// and a device without a carrier would never finish it.
func nodad(a netip.Addr) int {
	if a.Is6() {
		return unix.IFA_F_NODAD
	}
	return 0
}

// neighbour returns the permanent entry on dev for address a on peer.
func neighbour(dev netlink.Link, a netip.Addr, peer netlink.Link) *netlink.Neigh {
	family := unix.AF_INET
	if a.Is6() {
		family = unix.AF_INET6
	}
	return &netlink.Neigh{
		LinkIndex: dev.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
		IP: a.AsSlice(), HardwareAddr: peer.Attrs().HardwareAddr,
	}
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func network(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Masked().Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func isPod(dev netlink.Link) bool { return strings.HasPrefix(dev.Attrs().Alias, podAlias) }

func isMissing(err error) bool {
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing)
}
