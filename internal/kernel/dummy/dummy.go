// Package dummy keeps virtual IPs on a network device that leads nowhere, so that
// the kernel takes packets to them for its own.
//
// All functions work in the network namespace of the calling thread.
package dummy

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Ensure makes the device name and marks it as ours by an alias (ip link shows
// it), unless it is there. One without the alias is an error.
func Ensure(name, alias string) error {
	dev, err := netlink.LinkByName(name)
	if isMissing(err) {
		return create(name, alias)
	}
	if err != nil {
		return fmt.Errorf("find device %s: %w", name, err)
	}
	if dev.Type() != "dummy" || dev.Attrs().Alias != alias {
		return fmt.Errorf("a device %s that is not fairlead's is in the way: remove it", name)
	}
	if dev.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := netlink.LinkSetUp(dev); err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return nil
}

// genModeNone is IN6_ADDR_GEN_MODE_NONE of linux/if_link.h.
const genModeNone = 1

func create(name, alias string) error {
	d := &netlink.Dummy{LinkAttrs: netlink.NewLinkAttrs()}
	d.Name = name
	err := netlink.LinkAdd(d)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("add device %s: the kernel has no dummy devices (module dummy): %w", name, err)
	}
	if err != nil {
		return fmt.Errorf("add device %s: %w", name, err)
	}
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find device %s: %w", name, err)
	}
	if err := netlink.LinkSetAlias(dev, alias); err != nil {
		return fmt.Errorf("name device %s ours: %w", name, err)
	}
	// No address but those that are given. Kernels without IPv6 know no mode.
	_ = netlink.LinkSetIP6AddrGenMode(dev, genModeNone)
	if err := netlink.LinkSetUp(dev); err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return nil
}

// Remove removes the device, if it is ours.
func Remove(name, alias string) error {
	dev, err := netlink.LinkByName(name)
	if isMissing(err) {
		return nil
	}
	if err == nil && dev.Attrs().Alias == alias {
		err = netlink.LinkDel(dev)
	}
	if err != nil && !isMissing(err) {
		return fmt.Errorf("remove device %s: %w", name, err)
	}
	return nil
}

// Addresses returns the addresses on the device (mine) and those on all others
// (others). A device that is not there has none.
func Addresses(name string) (mine, others map[netip.Addr]bool, err error) {
	index := -1
	dev, err := netlink.LinkByName(name)
	switch {
	case err == nil:
		index = dev.Attrs().Index
	case !isMissing(err):
		return nil, nil, fmt.Errorf("find device %s: %w", name, err)
	}
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, nil, fmt.Errorf("list addresses: %w", err)
	}
	mine, others = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for i := range list {
		a, ok := netip.AddrFromSlice(list[i].IP)
		if !ok {
			continue
		}
		if list[i].LinkIndex == index {
			mine[a.Unmap()] = true
		} else {
			others[a.Unmap()] = true
		}
	}
	return mine, others, nil
}

// Add gives the device addresses, some of which it may have already. The errors
// are by address.
func Add(name string, addrs []netip.Addr) map[netip.Addr]error {
	return change(name, "add", addrs, netlink.AddrReplace)
}

// Del takes addresses away, some of which the device may lack. The errors are by
// address.
func Del(name string, addrs []netip.Addr) map[netip.Addr]error {
	return change(name, "remove", addrs, func(l netlink.Link, a *netlink.Addr) error {
		err := netlink.AddrDel(l, a)
		if errors.Is(err, unix.EADDRNOTAVAIL) {
			return nil
		}
		return err
	})
}

func change(name, verb string, addrs []netip.Addr, do func(netlink.Link, *netlink.Addr) error) map[netip.Addr]error {
	if len(addrs) == 0 {
		return nil
	}
	failed := map[netip.Addr]error{}
	dev, err := netlink.LinkByName(name)
	for _, a := range addrs {
		one := err
		if one == nil {
			one = do(dev, address(a))
		}
		if one != nil {
			failed[a] = fmt.Errorf("%s address %s on device %s: %w", verb, a, name, one)
		}
	}
	return failed
}

// address is never a source for what the machine sends elsewhere: IPv4 keeps
// addresses of scope host for itself, and IPv6 avoids deprecated ones.
func address(a netip.Addr) *netlink.Addr {
	out := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is4() {
		out.Scope = unix.RT_SCOPE_HOST
	} else {
		out.Flags = unix.IFA_F_NODAD
		out.ValidLft = math.MaxUint32
	}
	return out
}

func isMissing(err error) bool {
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing)
}
