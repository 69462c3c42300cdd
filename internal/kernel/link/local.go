package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// EnsureLocal makes a an address of this machine by a route of table local, without
// giving it to a device: node ports do not answer there, and no program takes it
// for the machine's own. What the machine sends from there leaves from the first of
// sources that is of a's family.
func EnsureLocal(a netip.Addr, sources []netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	r := &netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: Protocol, Dst: network(single(a)),
	}
	if a.Is4() {
		r.Scope = netlink.SCOPE_HOST
	}
	r.Src = sourceFor(a, sources)
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("make %s an address of this machine: %w", a, err)
	}
	return nil
}

// Local returns the addresses of EnsureLocal.
func Local() ([]netip.Addr, error) { return addrsOf(local()) }

// RemoveLocal takes back what EnsureLocal did.
func RemoveLocal() error {
	routes, err := local()
	return errors.Join(err, removeLocal(routes))
}

// addrOf returns the address of a local route.
func addrOf(r *netlink.Route) netip.Addr {
	a, _ := netip.AddrFromSlice(r.Dst.IP)
	return a.Unmap()
}

func addrsOf(routes []netlink.Route, err error) (out []netip.Addr, _ error) {
	for i := range routes {
		out = append(out, addrOf(&routes[i]))
	}
	return out, err
}

// removeLocal removes local routes. Some may be gone already.
func removeLocal(routes []netlink.Route) error {
	var errs []error
	for i := range routes {
		if err := netlink.RouteDel(&routes[i]); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove local route to %s: %w", routes[i].Dst, err))
		}
	}
	return errors.Join(errs...)
}

func local() ([]netlink.Route, error) { return localOf(Protocol) }

// localOf returns the local routes of a protocol.
func localOf(protocol netlink.RouteProtocol) ([]netlink.Route, error) {
	const filter = netlink.RT_FILTER_PROTOCOL | netlink.RT_FILTER_TABLE | netlink.RT_FILTER_TYPE
	var out []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		want := &netlink.Route{Protocol: protocol, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
		routes, err := Whole(func() ([]netlink.Route, error) { return netlink.RouteListFiltered(family, want, filter) })
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		out = append(out, routes...)
	}
	return out, nil
}

// sourceFor returns the first of sources that is of the family of an address, nil without one.
func sourceFor(a netip.Addr, sources []netip.Addr) net.IP {
	if i := slices.IndexFunc(sources, func(s netip.Addr) bool { return s.Is4() == a.Is4() }); i >= 0 {
		return sources[i].AsSlice()
	}
	return nil
}

// VIPProtocol marks the local routes of addresses at which this process listens for a load
// balancer (ip route show table local proto 251).
const VIPProtocol = 251

// ClusterIPProtocol marks the local routes of ClusterIPs at which this process listens.
const ClusterIPProtocol = 252

// SetVIPs makes addrs, and no others of earlier calls, addresses of this machine by
// routes of table local, without giving them to a device. What the machine sends there leaves from the first of sources that is of
// the family, or from the address itself without one: its listener takes that for the client's.
func SetVIPs(addrs, sources []netip.Addr) error { return setLocal(VIPProtocol, addrs, sources) }

// SetClusterIPs is SetVIPs for ClusterIPs: other ports of the ClusterIP lead to other machines, which have to answer the source.
func SetClusterIPs(addrs, sources []netip.Addr) error {
	return setLocal(ClusterIPProtocol, addrs, sources)
}

// ClusterIPs returns the addresses of SetClusterIPs, also of an earlier process.
func ClusterIPs() ([]netip.Addr, error) { return addrsOf(localOf(ClusterIPProtocol)) }

// setLocal makes the local routes of a protocol.
func setLocal(protocol netlink.RouteProtocol, addrs, sources []netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	have, err := localOf(protocol)
	errs := []error{err}
	wanted, present := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, a := range addrs {
		wanted[a] = true
	}
	var old []netlink.Route
	for _, r := range have {
		switch a := addrOf(&r); {
		case !wanted[a]:
			old = append(old, r)
		case len(sources) == 0 || r.Src.Equal(sourceFor(a, sources)):
			present[a] = true
		}
	}
	for _, a := range addrs {
		if present[a] {
			continue
		}
		r := &netlink.Route{
			LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: protocol, Dst: network(single(a)),
			Src: sourceFor(a, sources),
		}
		if a.Is4() {
			r.Scope = netlink.SCOPE_HOST
		}
		if err := netlink.RouteReplace(r); err != nil {
			errs = append(errs, fmt.Errorf("make %s an address of this machine: %w", a, err))
		}
	}
	return errors.Join(append(errs, removeLocal(old))...)
}
