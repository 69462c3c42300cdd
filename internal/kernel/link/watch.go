package link

import (
	"encoding/binary"
	"fmt"
	"net/netip"

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

// WatchRoutes calls deleted after one of our routes was deleted, or may have been, in
// the network namespace of the calling thread, until stop is called: with the addresses of
// them that lead to pods which are still there. It is called from one goroutine,
// which has ended when stop returns.
func WatchRoutes(deleted func([]PodRoute)) (stop func(), err error) {
	var pods []PodRoute
	concerned := false
	return receive(func(typ uint16, body []byte) {
		if typ != unix.RTM_DELROUTE {
			return
		}
		switch r, ours := decodeDeleted(body); {
		case !ours:
		case r.device == 0:
			concerned = true
		case r.hasDevice():
			pods = append(pods, r)
		}
	}, func(dropped bool) {
		if concerned || dropped || len(pods) > 0 {
			deleted(pods)
		}
		pods, concerned = nil, false
	}, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
}

// decodeDeleted reads a message about a route, which begins with rtmsg, and reports
// whether it is our route. One that is not to a pod has no device.
func decodeDeleted(body []byte) (r PodRoute, ours bool) {
	const protocolAt = 5 // rtm_protocol
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
