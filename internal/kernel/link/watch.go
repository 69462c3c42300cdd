package link

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	wire "github.com/fairlead/fairlead/internal/kernel/netlink"
)

// WatchAddresses calls changed whenever an interface gets or loses an address, or
// may have, in the network namespace of the calling thread, until stop is called.
// changed is called from one goroutine, which has ended when stop returns.
func WatchAddresses(changed func()) (stop func(), err error) {
	return watch(changed, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
}

// PodRoute is the route to an address of a pod that runs here.
type PodRoute struct {
	addr, src netip.Addr
	device    int
}

// RouteChange is what may concern our routes.
type RouteChange struct {
	// Deleted reports that one of our routes was deleted, or may have been, Pods has those
	// of them that lead to pods which are still there.
	Deleted bool
	Pods    []PodRoute
	// Link reports that a device came up, that an address was added, or that one of our
	// own devices was removed. The kernel deletes the IPv4 routes by a device that goes
	// down without a notification (fib_sync_down_dev).
	Link bool
	// Foreign reports that another program, or the kernel, has added a route.
	Foreign bool
}

// WatchRoutes calls changed after each RouteChange in the network namespace of the calling
// thread, until stop is called. It is called from one goroutine, which has ended when stop
// returns.
func WatchRoutes(changed func(RouteChange)) (stop func(), err error) {
	var c RouteChange
	running := running{}
	return receive(func(typ uint16, body []byte) {
		switch typ {
		case unix.RTM_DELROUTE:
			switch r, ours := decodeDeleted(body); {
			case !ours:
			case r.device == 0:
				c.Deleted = true
			case r.hasDevice():
				c.Deleted, c.Pods = true, append(c.Pods, r)
			}
		case unix.RTM_NEWROUTE:
			c.Foreign = c.Foreign || isForeign(body)
		case unix.RTM_NEWADDR:
			c.Link = true
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			c.Link = running.follow(typ, body) || c.Link
		}
	}, func(dropped bool) {
		if dropped {
			c.Deleted, c.Link = true, true
		}
		if c.Deleted || c.Link || c.Foreign {
			changed(c)
		}
		c = RouteChange{}
	}, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
}

// running has the flags IFF_UP and IFF_RUNNING of devices by their index: the flags of others
// than pods that have one of them.
type running map[int32]uint32

// follow takes in a message about a device, which begins with ifinfomsg, and reports
// whether it concerns our routes. Devices of pods do not.
func (r running) follow(typ uint16, body []byte) bool {
	if len(body) < unix.SizeofIfInfomsg || body[0] != unix.AF_UNSPEC { // a port of a bridge
		return false
	}
	index := int32(binary.NativeEndian.Uint32(body[4:]))
	flags := binary.NativeEndian.Uint32(body[8:])
	name := wire.CString(wire.Attr(body[unix.SizeofIfInfomsg:], unix.IFLA_IFALIAS))
	if typ == unix.RTM_DELLINK {
		delete(r, index)
		return name == alias
	}
	if strings.HasPrefix(name, podAlias) {
		return false
	}
	was, now := r[index], flags&(unix.IFF_UP|unix.IFF_RUNNING)
	if r[index] = now; now == 0 {
		delete(r, index)
	}
	return now&^was != 0
}

// The places of fields in rtmsg.
const (
	tableAt    = 4 // rtm_table
	protocolAt = 5 // rtm_protocol
)

// isForeign reports whether a message is about a route of others that leads away from the
// machine.
func isForeign(body []byte) bool {
	return len(body) >= unix.SizeofRtMsg && body[protocolAt] != Protocol && body[tableAt] != unix.RT_TABLE_LOCAL
}

// WatchForwarding calls changed after the machine was told to pass IPv4 or IPv6 packets on,
// or not to, or may have been, as WatchRoutes does.
func WatchForwarding(changed func()) (stop func(), err error) {
	concerned := false
	return receive(func(typ uint16, body []byte) {
		concerned = concerned || typ == unix.RTM_NEWNETCONF && isForwarding(body)
	}, func(dropped bool) {
		if concerned || dropped {
			changed()
		}
		concerned = false
	}, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
}

// isForwarding reports whether a message, which begins with netconfmsg (netconf.h), is about
// the forwarding of the whole machine.
func isForwarding(body []byte) bool {
	const netconfLen, ifindex, forwarding = 4, 1, 2
	if len(body) < netconfLen {
		return false
	}
	index := wire.Attr(body[netconfLen:], ifindex)
	const all = -1 // NETCONFA_IFINDEX_ALL
	return len(index) == 4 && int32(binary.NativeEndian.Uint32(index)) == all && wire.Attr(body[netconfLen:], forwarding) != nil
}

// decodeDeleted reads a message about a route, which begins with rtmsg, and reports
// whether it is our route. One that is not to a pod has no device.
func decodeDeleted(body []byte) (r PodRoute, ours bool) {
	if len(body) < unix.SizeofRtMsg || body[protocolAt] != Protocol {
		return r, false
	}
	gateway := false
	wire.Attrs(body[unix.SizeofRtMsg:], func(typ uint16, v []byte) {
		switch typ {
		case unix.RTA_DST:
			r.addr, _ = netip.AddrFromSlice(v)
		case unix.RTA_PREFSRC:
			r.src, _ = netip.AddrFromSlice(v)
		case unix.RTA_OIF:
			if len(v) == 4 {
				r.device = int(binary.NativeEndian.Uint32(v))
			}
		case unix.RTA_GATEWAY:
			gateway = true
		}
	})
	if gateway || !r.addr.IsValid() || !r.src.IsValid() {
		r.device = 0
	}
	return r, true
}

// hasDevice reports whether the pod's device is there.
func (r PodRoute) hasDevice() bool {
	dev, err := netlink.LinkByIndex(r.device)
	return err == nil && isPod(dev)
}

// Restore adds the route again, if the pod is still there.
func (r PodRoute) Restore() error {
	if !r.hasDevice() {
		return nil
	}
	if err := netlink.RouteReplace(toPod(r.device, r.addr, r.src)); err != nil && r.hasDevice() {
		return fmt.Errorf("add route to %s: %w", r.addr, err)
	}
	return nil
}

// toPod is the route to an address of a pod by its device. src is the node's own
// address.
func toPod(device int, a, src netip.Addr) *netlink.Route {
	return &netlink.Route{LinkIndex: device, Dst: network(single(a)), Scope: netlink.SCOPE_LINK, Src: src.AsSlice(), Protocol: Protocol}
}
