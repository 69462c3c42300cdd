package link

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// What VXLAN (RFC 7348) puts before a packet: an Ethernet header and the headers of VXLAN, UDP
// and IP, in bytes.
const (
	overhead4 = 50
	overhead6 = 70
)

// ethernetMTU is that of a machine whose address is on none of its cards.
const ethernetMTU = 1500

// OverlayOptions are the same on every node of a cluster.
type OverlayOptions struct {
	// VNI is the number of the virtual network, Port that of UDP.
	VNI  int
	Port uint16
}

// Overlay carries packets to pods of nodes that are not neighbours, by VXLAN between the
// nodes' addresses. It has a device for each family of those; either carries both families
// of pods. It learns nothing from packets: forwarding and neighbour entries are written by
// Set. It belongs to one network namespace, and is used by one goroutine at a time.
type Overlay struct {
	o       OverlayOptions
	filter  overlayFilter
	devices map[svc.Family]*overlayDevice
	idle    bool // the kernel has nothing of it
}

// overlayDevice is a device, with what has been written to it.
type overlayDevice struct {
	index, mtu int
	macs       map[netip.Addr]netip.Addr // underlay address by pods' gateway, as neighbours
	peers      map[netip.Addr]bool       // underlay addresses in the forwarding table
}

// Peer is a node that is reached by an Overlay or WireGuard.
type Peer struct {
	// Addr is the node's address, Pods are the ranges of its pods.
	Addr netip.Addr
	Pods []netip.Prefix
	// Key is only for WireGuard.
	Key Key
}

// NewOverlay returns an Overlay that has changed nothing yet.
func NewOverlay(o OverlayOptions) *Overlay {
	return &Overlay{o: o, filter: overlayFilter{port: o.Port}, devices: map[svc.Family]*overlayDevice{}}
}

// Close ends the use of the kernel; written state stays.
func (v *Overlay) Close() error { return v.filter.close() }

// Forget has the next Set compare everything with the kernel.
func (v *Overlay) Forget() {
	v.devices, v.filter.written, v.idle = map[svc.Family]*overlayDevice{}, nil, false
}

// MTU returns how large packets may be that an Overlay carries, 0 while it has no device.
func (v *Overlay) MTU() (mtu int) {
	for _, d := range v.devices {
		if mtu == 0 || d.mtu < mtu {
			mtu = d.mtu
		}
	}
	return mtu
}

// hardware returns the hardware address of the node with an address, by which it is known
// on the overlay: each node can compute the addresses of all.
func hardware(a netip.Addr) net.HardwareAddr {
	sum := sha256.Sum256(a.AsSlice())
	return net.HardwareAddr{0x02, sum[0], sum[1], sum[2], sum[3], sum[4]} // locally administered
}

// gateway returns the address of the next hop for a range of a node's pods. IPv4 has the
// range's own address, which no pod has; IPv6, whose gateway must not be in the range that
// leads to it, the link-local address of the node's hardware address.
func gateway(pods netip.Prefix, node netip.Addr) netip.Addr {
	if pods.Addr().Is4() {
		return pods.Masked().Addr()
	}
	return linkLocal(hardware(node))
}

// Set makes peers the only ones. local are the addresses of this node, of which the first
// of each family is used, gateways this node's own addresses among its pods, pods the ranges of all
// pods. It returns the routes to the peers' pods, for Routes.Set. Its cost is that of what
// differs from the last call.
func (v *Overlay) Set(peers []Peer, local, gateways []netip.Addr, pods []netip.Prefix) (routes []Route, err error) {
	if len(peers) == 0 && v.idle {
		return nil, nil
	}
	byFamily := map[svc.Family][]Peer{}
	for _, p := range peers {
		f := svc.FamilyOf(p.Addr)
		byFamily[f] = append(byFamily[f], p)
	}
	var errs []error
	devices := map[string]bool{}
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		i := slices.IndexFunc(local, func(a netip.Addr) bool { return svc.FamilyOf(a) == f })
		if i < 0 || len(byFamily[f]) == 0 {
			errs = append(errs, v.remove(f))
			continue
		}
		r, err := v.set(f, local[i], gateways, byFamily[f])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		routes = append(routes, r...)
		devices[overlayName(f)] = true
	}
	err = errors.Join(append(errs, v.filter.set(peers, devices, pods))...)
	v.idle = len(peers) == 0 && err == nil
	return routes, err
}

// overlayName is the device's by the family of nodes' addresses.
func overlayName(f svc.Family) string {
	if f == svc.IPv6 {
		return "fl0vxlan6"
	}
	return "fl0vxlan4"
}

func (v *Overlay) remove(f svc.Family) error {
	delete(v.devices, f)
	return RemoveDevice(overlayName(f), alias)
}

// set makes the device of a family and the entries of its peers.
func (v *Overlay) set(f svc.Family, local netip.Addr, gateways []netip.Addr, peers []Peer) ([]Route, error) {
	d, err := v.ensure(f, local, gateways)
	if err != nil {
		return nil, err
	}
	var routes []Route
	neighbours, forwarding := map[netip.Addr]netip.Addr{}, map[netip.Addr]bool{}
	for _, p := range peers {
		forwarding[p.Addr] = true
		for _, c := range p.Pods {
			gw := gateway(c, p.Addr)
			neighbours[gw] = p.Addr
			routes = append(routes, Route{Dst: c, Via: gw, Device: d.index})
		}
	}
	var errs []error
	for a := range forwarding {
		if d.peers[a] {
			continue
		}
		if err := netlink.NeighSet(d.forward(a)); err != nil {
			errs = append(errs, fmt.Errorf("forward to %s on %s: %w", a, overlayName(f), err))
			continue
		}
		d.peers[a] = true
	}
	for gw, a := range neighbours {
		if d.macs[gw] == a {
			continue
		}
		if err := netlink.NeighSet(d.neighbour(gw, a)); err != nil {
			errs = append(errs, fmt.Errorf("add neighbour %s on %s: %w", gw, overlayName(f), err))
			continue
		}
		d.macs[gw] = a
	}
	for gw, a := range d.macs {
		if _, wanted := neighbours[gw]; !wanted {
			errs = append(errs, gone(netlink.NeighDel(d.neighbour(gw, a))))
			delete(d.macs, gw)
		}
	}
	for a := range d.peers {
		if !forwarding[a] {
			errs = append(errs, gone(netlink.NeighDel(d.forward(a))))
			delete(d.peers, a)
		}
	}
	return routes, errors.Join(errs...)
}

// gone is the error of a removal.
func gone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

func (d *overlayDevice) forward(a netip.Addr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: d.index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF,
		IP: a.AsSlice(), HardwareAddr: hardware(a),
	}
}

func (d *overlayDevice) neighbour(gw, node netip.Addr) *netlink.Neigh {
	family := unix.AF_INET
	if gw.Is6() {
		family = unix.AF_INET6
	}
	return &netlink.Neigh{
		LinkIndex: d.index, Family: family, State: netlink.NUD_PERMANENT, IP: gw.AsSlice(), HardwareAddr: hardware(node),
	}
}

// ensure makes the device, or again one that was made otherwise, and reads what it has.
func (v *Overlay) ensure(f svc.Family, local netip.Addr, gateways []netip.Addr) (*overlayDevice, error) {
	name := overlayName(f)
	underlay, err := underlayMTU(local)
	if err != nil {
		return nil, err
	}
	mtu := underlay - overhead4
	if f == svc.IPv6 {
		mtu = underlay - overhead6
	}
	dev, err := netlink.LinkByName(name)
	switch {
	case err == nil && dev.Attrs().Alias != alias:
		return nil, fmt.Errorf("a device %s that is not fairlead's is in the way: remove it", name)
	case err == nil && !v.is(dev, local):
		if err := netlink.LinkDel(dev); err != nil {
			return nil, fmt.Errorf("remove device %s: %w", name, err)
		}
	case err == nil:
		if d := v.devices[f]; d != nil && d.index == dev.Attrs().Index && d.mtu == mtu {
			return d, nil
		}
		return v.adopt(f, dev, mtu, gateways)
	case !isMissing(err):
		return nil, fmt.Errorf("find device %s: %w", name, err)
	}
	if dev, err = v.create(name, local, mtu); err != nil {
		return nil, err
	}
	return v.adopt(f, dev, mtu, gateways)
}

// is reports whether a device is what create makes.
func (v *Overlay) is(dev netlink.Link, local netip.Addr) bool {
	x, ok := dev.(*netlink.Vxlan)
	return ok && x.VxlanId == v.o.VNI && x.Port == int(v.o.Port) && x.SrcAddr.Equal(local.AsSlice()) &&
		x.HardwareAddr.String() == hardware(local).String()
}

func (v *Overlay) create(name string, local netip.Addr, mtu int) (netlink.Link, error) {
	x := &netlink.Vxlan{LinkAttrs: netlink.NewLinkAttrs(), VxlanId: v.o.VNI, SrcAddr: local.AsSlice(), Port: int(v.o.Port), UDPCSum: true}
	x.Name, x.MTU, x.HardwareAddr = name, mtu, hardware(local)
	dev, err := addDevice(x, fmt.Errorf("add device %s: the kernel has no VXLAN (module vxlan): %w", name, unix.EOPNOTSUPP))
	if err != nil {
		return nil, err
	}
	return dev, take(dev)
}

// adopt sets the device up, and reads what an earlier agent has written to it.
func (v *Overlay) adopt(f svc.Family, dev netlink.Link, mtu int, gateways []netip.Addr) (*overlayDevice, error) {
	d := &overlayDevice{index: dev.Attrs().Index, mtu: mtu, macs: map[netip.Addr]netip.Addr{}, peers: map[netip.Addr]bool{}}
	if err := bringUp(dev, mtu, gateways); err != nil {
		return nil, err
	}
	forwarding, err := Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(d.index, unix.AF_BRIDGE) })
	if err != nil {
		return nil, fmt.Errorf("list the forwarding table of %s: %w", overlayName(f), err)
	}
	nodes := map[string]netip.Addr{}
	for _, n := range forwarding {
		if a := toAddr(n.IP); a.IsValid() && n.HardwareAddr.String() == hardware(a).String() {
			d.peers[a], nodes[n.HardwareAddr.String()] = true, a
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		neighbours, err := Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(d.index, family) })
		if err != nil {
			return nil, fmt.Errorf("list the neighbours on %s: %w", overlayName(f), err)
		}
		for _, n := range neighbours {
			if gw := toAddr(n.IP); n.State == netlink.NUD_PERMANENT && !gw.IsMulticast() {
				d.macs[gw] = nodes[n.HardwareAddr.String()]
			}
		}
	}
	v.devices[f] = d
	return d, nil
}

// underlayMTU returns the MTU of the device with an address of this node.
func underlayMTU(local netip.Addr) (int, error) {
	addrs, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return 0, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		if toAddr(a.IP) != local {
			continue
		}
		dev, err := netlink.LinkByIndex(a.LinkIndex)
		if err != nil {
			return 0, fmt.Errorf("find the device with %s: %w", local, err)
		}
		if dev.Attrs().Flags&net.FlagLoopback != 0 {
			return ethernetMTU, nil // packets leave by other devices
		}
		return dev.Attrs().MTU, nil
	}
	return 0, fmt.Errorf("no device has this node's address %s", local)
}

// Neighbour reports whether this machine sends to an address without a router between.
func Neighbour(a netip.Addr) (bool, error) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil {
		return false, fmt.Errorf("no way to %s: %w", a, err)
	}
	return len(routes) == 1 && routes[0].Gw == nil && routes[0].Via == nil, nil
}
