package link

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/vishvananda/netlink"
)

// Up sets a device up, for example the loopback device of a fresh namespace.
func Up(name string) error {
	dev, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(dev)
	}
	if err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return nil
}

// DefaultTo sends everything that has no better route to a device, in both
// families. A namespace without a way out needs it: the kernel refuses to send to
// a ClusterIP that no route leads to, before any rule could translate it.
func DefaultTo(name string) error {
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("default route to %s: %w", name, err)
	}
	dsts := []*net.IPNet{{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}}
	if HasIPv6() {
		dsts = append(dsts, &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)})
	}
	var errs []error
	for _, dst := range dsts {
		r := &netlink.Route{LinkIndex: dev.Attrs().Index, Dst: dst, Protocol: Protocol}
		if err := netlink.RouteReplace(r); err != nil && !errors.Is(err, syscall.EEXIST) {
			errs = append(errs, fmt.Errorf("default route to %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
