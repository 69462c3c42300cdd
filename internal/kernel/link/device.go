package link

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// addDevice makes a device; unsupported is the error of a kernel that has none of its kind.
func addDevice(l netlink.Link, unsupported error) (netlink.Link, error) {
	name := l.Attrs().Name
	err := netlink.LinkAdd(l)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, unsupported
	}
	if err != nil {
		return nil, fmt.Errorf("add device %s: %w", name, err)
	}
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find device %s: %w", name, err)
	}
	return dev, nil
}

// take makes a device ours, by which packets from pods may arrive though the way back is
// another: neighbours' routes may differ in one direction, or a node's key be new here.
func take(dev netlink.Link) error {
	name := dev.Attrs().Name
	if err := netlink.LinkSetAlias(dev, alias); err != nil {
		return fmt.Errorf("name device %s ours: %w", name, err)
	}
	_ = sysctl.Write("net/ipv4/conf/"+name+"/rp_filter", "2")
	return nil
}

// bringUp sets a device up that leads to other nodes' pods. What the node itself sends there
// has one of gateways, its addresses among its pods: answers come back by the device, and a
// peer of WireGuard accepts no others.
func bringUp(dev netlink.Link, mtu int, gateways []netip.Addr) error {
	name := dev.Attrs().Name
	if err := netlink.LinkSetMTU(dev, mtu); err != nil {
		return fmt.Errorf("set the MTU of %s to %d: %w", name, mtu, err)
	}
	if err := netlink.LinkSetUp(dev); err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return ensureAddrs(dev, gateways)
}
