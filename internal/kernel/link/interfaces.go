package link

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	wire "github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Interface is a network interface that has a hardware address of Ethernet's form.
type Interface struct {
	Index int
	Name  string
	MAC   [6]byte
	// Running is true if it is up and has a carrier.
	Running bool
	// Networks are the networks of its addresses: neighbours there are reached
	// directly.
	Networks []netip.Prefix
	// Gateways are the gateways of the default routes by it.
	Gateways []netip.Addr
}

// Interfaces returns the interfaces of the network namespace of the calling thread,
// without ports of a bridge or a bond, and without pods'.
func Interfaces() ([]Interface, error) {
	links, err := Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	addrs, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	routes, err := Whole(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	var out []Interface
	at := map[int]int{}
	for _, l := range links {
		a := l.Attrs()
		if len(a.HardwareAddr) != 6 || a.Flags&unix.IFF_LOOPBACK != 0 || a.MasterIndex != 0 || isPod(l) || l.Type() == "dummy" {
			continue
		}
		at[a.Index] = len(out)
		out = append(out, Interface{
			Index: a.Index, Name: a.Name, MAC: [6]byte(a.HardwareAddr),
			Running: a.RawFlags&unix.IFF_UP != 0 && a.RawFlags&unix.IFF_RUNNING != 0,
		})
	}
	for _, a := range addrs {
		i, known := at[a.LinkIndex]
		if !known {
			continue
		}
		ones, _ := a.Mask.Size()
		if p := netip.PrefixFrom(toAddr(a.IP), ones); p.Addr().IsGlobalUnicast() && !p.IsSingleIP() {
			out[i].Networks = append(out[i].Networks, p.Masked())
		}
	}
	for _, r := range routes {
		i, known := at[r.LinkIndex]
		if gw := toAddr(r.Gw); known && gw.IsValid() && isDefault(&r) {
			out[i].Gateways = append(out[i].Gateways, gw)
		}
	}
	return out, nil
}

func isDefault(r *netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// WatchInterfaces calls changed whenever what Interfaces returns may have changed, as
// WatchAddresses does.
func WatchInterfaces(changed func()) (stop func(), err error) {
	return watch(changed, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
}

func watch(changed func(), groups ...int) (stop func(), err error) {
	return receive(func(uint16, []byte) {}, func(bool) { changed() }, groups...)
}

// receive calls message with each message about groups, and after, once for some of
// them, until stop is called. dropped reports that some got lost, after which it is
// unknown what has changed.
func receive(message func(typ uint16, body []byte), after func(dropped bool), groups ...int) (stop func(), err error) {
	sub, err := wire.Subscribe(unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return nil, err
	}
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			err := sub.Receive(message)
			dropped := errors.Is(err, unix.ENOBUFS)
			if err != nil && !dropped {
				return
			}
			after(dropped)
		}
	})
	return func() {
		_ = sub.Close()
		ended.Wait()
	}, nil
}

// FiltersBridged reports whether packets that come by a bridge pass the packet filter inside of it, in the network namespace
// of the calling thread: the kernel has the module br_netfilter, and there is a bridge.
func FiltersBridged() bool {
	if _, err := os.Stat("/proc/sys/net/bridge"); err != nil {
		return false
	}
	links, err := Whole(netlink.LinkList)
	return err == nil && slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Type() == "bridge" })
}
