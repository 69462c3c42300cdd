package nodelocal

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// table is the one nft table of this package.
const table = "fairlead-dns"

// protocol marks our routes in the kernel, as that of package link does.
const protocol = 250

// Patience is how long after the local server has last sent a packet from the
// Service's address and port this node's own programs are still led to it: a
// server with nothing to say sends one to itself now and then. What comes from
// Pods is led by whether the server's socket is there.
const Patience = 2 * time.Second

// MaxOthers bounds the other servers that packets fall back to.
const MaxOthers = 16

// Config is what is to be served on this node.
type Config struct {
	// Addrs are the addresses of the Service, Port its port, of UDP and TCP.
	Addrs []netip.Addr
	Port  uint16
	// Source are this node's own addresses. Connections of the node itself to
	// other ports of the Service leave from them.
	Source []netip.Addr
	// Others are servers elsewhere, used while the local one is not there. With
	// none, the proxy's rules decide. Those beyond MaxOthers are left out.
	Others []netip.AddrPort
}

// Install makes the kernel do what c says, in place of what an earlier call, or
// an earlier process, made it do. The nft table changes in one transaction. The
// server must listen already: it counts as one that has just spoken.
func Install(c Config) error {
	var errs []error
	for _, a := range c.Addrs {
		if err := addRoute(a, c.Source); err != nil {
			errs = append(errs, fmt.Errorf("make %s an address of this node: %w", a, err))
		}
	}
	// Kernels before 4.18, or without the module, cannot ask for sockets.
	err := write(c, true)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		err = write(c, false)
	}
	if err != nil {
		errs = append(errs, fmt.Errorf("write nft table inet %s: %w", table, err))
	}
	return errors.Join(errs...)
}

// Intact says whether what Install made is still there.
func Intact(c Config) (bool, error) {
	conn, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("talk to nf_tables: %w", err)
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, fmt.Errorf("list nft tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == table }) {
		return false, nil
	}
	have, err := ours()
	return len(have) == len(c.Addrs), err
}

// Remove takes back what Install did. What is not there is no error.
func Remove() error { return errors.Join(removeRoutes(), removeTable()) }

func removeTable() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("talk to nf_tables: %w", err)
	}
	c.DelTable(&nftables.Table{Name: table, Family: nftables.TableFamilyINet})
	err = c.Flush()
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return fmt.Errorf("remove nft table inet %s: %w", table, err)
}

// addRoute makes a an address of this node without giving it to a device: node
// ports do not answer there, and nobody takes it for the machine's own name.
func addRoute(a netip.Addr, source []netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	r := &netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: protocol,
		Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())},
	}
	if a.Is4() {
		r.Scope = netlink.SCOPE_HOST
	}
	if i := slices.IndexFunc(source, func(s netip.Addr) bool { return s.Is4() == a.Is4() }); i >= 0 {
		r.Src = source[i].AsSlice()
	}
	return netlink.RouteReplace(r)
}

// ours lists the routes of addRoute.
func ours() ([]netlink.Route, error) {
	const filter = netlink.RT_FILTER_PROTOCOL | netlink.RT_FILTER_TABLE | netlink.RT_FILTER_TYPE
	var out []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		want := &netlink.Route{Protocol: protocol, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
		routes, err := link.Whole(func() ([]netlink.Route, error) { return netlink.RouteListFiltered(family, want, filter) })
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		out = append(out, routes...)
	}
	return out, nil
}

func removeRoutes() error {
	routes, err := ours()
	errs := []error{err}
	for _, r := range routes {
		if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove local route to %s: %w", r.Dst, err))
		}
	}
	return errors.Join(errs...)
}
