package drain

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
)

// anywhere is an address of each family that no network has (RFC 5737, RFC 3849). No packet is sent to it.
func anywhere() map[int]string {
	return map[int]string{netlink.FAMILY_V4: "192.0.2.1:9", netlink.FAMILY_V6: "[2001:db8::1]:9"}
}

// ownSources has new connections of the node itself begin at an address that the node keeps. While kube-proxy's device has the addresses of
// Services, the kernel takes the address of the Service as the source, and the connection would hang once the device has gone.
func ownSources() error {
	device, err := netlink.LinkByName(svc.KubeProxyDevice)
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
		return nil
	}
	if err != nil {
		return err
	}
	for family, to := range anywhere() {
		source := sourceTo(to)
		if source == nil {
			continue // without a way out there is no better one
		}
		of := &netlink.Route{LinkIndex: device.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
		routes, err := netlink.RouteListFiltered(family, of, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		if err != nil {
			return fmt.Errorf("list the routes of %s: %w", svc.KubeProxyDevice, err)
		}
		for i := range routes {
			if r := &routes[i]; !r.Src.Equal(source) && r.Dst != nil && !r.Dst.IP.IsLinkLocalUnicast() {
				r.Src = source
				err := netlink.RouteReplace(r)
				if errors.Is(err, unix.ENETDOWN) { // IPv6: kube-proxy leaves its device down
					break
				}
				if err != nil {
					return fmt.Errorf("change the source of the route to %s: %w", r.Dst, err)
				}
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

// fromServices calls f for each connection of TCP that the node itself has opened at an address of kube-proxy's device, and which does
// not go through IPVS.
func fromServices(through map[netip.AddrPort]bool, f func(ipvs.Connection)) error {
	device, err := net.InterfaceByName(svc.KubeProxyDevice)
	if err != nil {
		return nil //nolint:nilerr // it has none
	}
	addrs, err := device.Addrs()
	if err != nil {
		return err
	}
	virtual := map[netip.Addr]bool{}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			virtual[p.Addr()] = true
		}
	}
	for family := range anywhere() {
		sockets, err := netlink.SocketDiagTCP(uint8(family)) //nolint:gosec // a constant
		if err != nil {
			return fmt.Errorf("list the connections of the node: %w", err)
		}
		for _, s := range sockets {
			from, to := addressOf(s.ID.Source, s.ID.SourcePort), addressOf(s.ID.Destination, s.ID.DestinationPort)
			if open := s.State == netlink.TCP_ESTABLISHED || s.State == netlink.TCP_CLOSE_WAIT; open && virtual[from.Addr()] && !through[from] {
				f(ipvs.Connection{Proto: svc.TCP, Client: from, Virtual: to})
			}
		}
	}
	return nil
}

func addressOf(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}
