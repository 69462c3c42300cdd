package link

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Route sends a range of addresses by a neighbour: the pods of another node.
type Route struct {
	Dst netip.Prefix
	Via netip.Addr
}

// SyncRoutes makes want the only routes with a gateway that bear our protocol
// number: new ones are added or changed in place first, then the rest deleted.
// It goes on after an error and returns all of them.
func SyncRoutes(want []Route) error {
	have, err := ours()
	if err != nil {
		return err
	}
	var errs []error
	wanted := map[netip.Prefix]bool{}
	for _, r := range want {
		r.Dst = r.Dst.Masked()
		wanted[r.Dst] = true
		if have[r.Dst] == r.Via {
			continue
		}
		if err := netlink.RouteReplace(&netlink.Route{Dst: network(r.Dst), Gw: r.Via.AsSlice(), Protocol: Protocol}); err != nil {
			errs = append(errs, fmt.Errorf("route to %s by %s: %w; nodes must reach each other's InternalIP in one hop", r.Dst, r.Via, err))
		}
	}
	for dst, via := range have {
		if wanted[dst] {
			continue
		}
		err := netlink.RouteDel(&netlink.Route{Dst: network(dst), Gw: via.AsSlice(), Protocol: Protocol})
		if err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove route to %s: %w", dst, err))
		}
	}
	return errors.Join(errs...)
}

// ours lists our routes that go by a gateway.
func ours() (map[netip.Prefix]netip.Addr, error) {
	out := map[netip.Prefix]netip.Addr{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := Whole(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Protocol: Protocol}, netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if r.Gw == nil || r.Dst == nil {
				continue
			}
			a, _ := netip.AddrFromSlice(r.Dst.IP)
			gw, _ := netip.AddrFromSlice(r.Gw)
			ones, _ := r.Dst.Mask.Size()
			out[netip.PrefixFrom(a.Unmap(), min(ones, a.Unmap().BitLen()))] = gw.Unmap()
		}
	}
	return out, nil
}
