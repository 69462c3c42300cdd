package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// anywhere is an address of each family that no network has (RFC 5737, RFC 3849). No packet is sent to it.
func anywhere() map[int]string {
	return map[int]string{netlink.FAMILY_V4: "192.0.2.1:9", netlink.FAMILY_V6: "[2001:db8::1]:9"}
}

// LeaveSources has new connections of the node to the addresses of a device begin at the address from which it sends to other networks. By
// itself the kernel takes the address that is called as the source, and such a connection hangs once the device has gone. It does nothing
// without the device; nor for IPv6 while the device is down, and for a family in which the node sends nowhere. RestoreSources undoes it:
// the kernel removes the route to an address with the address only if its source is the same.
func LeaveSources(device string) error {
	sources := map[int]net.IP{}
	for family, to := range anywhere() {
		sources[family] = sourceTo(to)
	}
	return setSources(device, func(family int, _ net.IP) net.IP { return sources[family] })
}

// RestoreSources has new connections of the node to the addresses of a device begin at these addresses, as they do by themselves.
func RestoreSources(device string) error {
	return setSources(device, func(_ int, to net.IP) net.IP { return to })
}

// setSources sets the sources of the routes to a device's own addresses. Those for which choose returns nil stay.
func setSources(device string, choose func(family int, to net.IP) net.IP) error {
	dev, err := netlink.LinkByName(device)
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
		return nil
	}
	if err != nil {
		return err
	}
	for family := range anywhere() {
		of := &netlink.Route{LinkIndex: dev.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
		routes, err := Whole(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, of, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		})
		if err != nil {
			return fmt.Errorf("list the routes of %s: %w", device, err)
		}
		for i := range routes {
			r := &routes[i]
			if r.Dst == nil || r.Dst.IP.IsLinkLocalUnicast() {
				continue
			}
			source := choose(family, r.Dst.IP)
			if source == nil || r.Src.Equal(source) {
				continue
			}
			r.Src = source
			err := netlink.RouteReplace(r)
			if errors.Is(err, unix.ENETDOWN) {
				break
			}
			if err != nil {
				return fmt.Errorf("change the source of the route to %s: %w", r.Dst, err)
			}
		}
	}
	return nil
}

// sourceTo is the address from which the node sends to another one, nil if it cannot.
func sourceTo(to string) net.IP {
	c, err := net.Dial("udp", to) //nolint:noctx // it only asks the kernel
	if err != nil {
		return nil
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).IP
}

// ConnectionsFrom calls f for each connection of TCP that the node itself has from an address of a device, unless it has closed it. It
// calls f for none without the device.
func ConnectionsFrom(device string, f func(from, to netip.AddrPort)) error {
	dev, err := net.InterfaceByName(device)
	if err != nil {
		return nil //nolint:nilerr // it has none
	}
	addrs, err := dev.Addrs()
	if err != nil {
		return err
	}
	has := map[netip.Addr]bool{}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			has[p.Addr()] = true
		}
	}
	for family := range anywhere() {
		sockets, err := Whole(func() ([]*netlink.Socket, error) { return netlink.SocketDiagTCP(uint8(family)) }) //nolint:gosec // a constant
		if err != nil {
			return fmt.Errorf("list the connections of the node: %w", err)
		}
		for _, s := range sockets {
			from, to := addressOf(s.ID.Source, s.ID.SourcePort), addressOf(s.ID.Destination, s.ID.DestinationPort)
			if (s.State == netlink.TCP_ESTABLISHED || s.State == netlink.TCP_CLOSE_WAIT) && has[from.Addr()] {
				f(from, to)
			}
		}
	}
	return nil
}

func addressOf(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}
