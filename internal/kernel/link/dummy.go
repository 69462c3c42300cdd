package link

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// EnsureDummy creates a dummy device in the network namespace of the calling
// thread, unless it exists, and marks it as ours by alias. Virtual IPs on it make
// the kernel take packets to them for its own. A device of that name without the
// alias is an error.
func EnsureDummy(name, alias string) error {
	dev, err := netlink.LinkByName(name)
	if isMissing(err) {
		return createDummy(name, alias)
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

func createDummy(name, alias string) error {
	d := &netlink.Dummy{LinkAttrs: netlink.NewLinkAttrs()}
	d.Name = name
	dev, err := addDevice(d, fmt.Errorf("add device %s: the kernel has no dummy devices (module dummy): %w", name, unix.EOPNOTSUPP))
	if err != nil {
		return err
	}
	if err := netlink.LinkSetAlias(dev, alias); err != nil {
		return fmt.Errorf("name device %s ours: %w", name, err)
	}
	// No address but the given ones. Kernels without IPv6 know no mode.
	_ = netlink.LinkSetIP6AddrGenMode(dev, genModeNone)
	if err := netlink.LinkSetUp(dev); err != nil {
		return fmt.Errorf("set device %s up: %w", name, err)
	}
	return nil
}

// HasDevice reports whether there is a device called name.
func HasDevice(name string) (bool, error) {
	_, err := netlink.LinkByName(name)
	if isMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find device %s: %w", name, err)
	}
	return true, nil
}

// RemoveDevice removes the device called name if it has the alias; any other is
// not changed.
func RemoveDevice(name, alias string) error {
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
