package dummy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	rtnl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Conn reads and changes the addresses of one device, and knows those of all
// other interfaces without asking for them again and again: the kernel tells it
// which come and go. It belongs to one network namespace, and is used by one
// goroutine at a time.
type Conn struct {
	device      string
	nl, changes *netlink.Conn
	// index is the device's as List found it, 0 if there was none.
	index uint32
	// others are the interfaces that have an address, but for the device.
	others map[netip.Addr]map[uint32]bool
}

// Dial opens a Conn in the network namespace of the calling thread, for the
// device called name, which need not be there yet.
func Dial(name string) (*Conn, error) {
	nl, err := netlink.DialRoute(0)
	if err != nil {
		return nil, err
	}
	changes, err := netlink.DialRoute(unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	if err != nil {
		return nil, errors.Join(err, nl.Close())
	}
	c := &Conn{device: name, nl: nl, changes: changes}
	if _, err := c.List(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close releases the sockets.
func (c *Conn) Close() error { return errors.Join(c.nl.Close(), c.changes.Close()) }

// listTries bounds how often a list is begun anew, since something changed while
// it was read.
const listTries = 10

// List returns the addresses on the device, and learns those of all others. A
// device that is not there has none.
func (c *Conn) List() (map[netip.Addr]bool, error) {
	dev, err := rtnl.LinkByName(c.device)
	switch {
	case err == nil:
		c.index = uint32(dev.Attrs().Index)
	case isMissing(err):
		c.index = 0
	default:
		return nil, fmt.Errorf("find device %s: %w", c.device, err)
	}
	// What changes from here on is told by CatchUp, too, which does no harm.
	for err = unix.ENOBUFS; errors.Is(err, unix.ENOBUFS); {
		err = c.changes.Events(func(uint16, []byte) {})
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var e netlink.Encoder
	e.Begin(unix.RTM_GETADDR, unix.NLM_F_DUMP, unix.AF_UNSPEC, 0)
	e.End()
	var mine map[netip.Addr]bool
	for range listTries {
		mine, c.others = map[netip.Addr]bool{}, map[netip.Addr]map[uint32]bool{}
		err = c.nl.Dump(e.Buf, func(body []byte) {
			index, a, ok := decode(body)
			switch {
			case !ok:
			case index == c.index:
				mine[a] = true
			default:
				c.note(unix.RTM_NEWADDR, index, a)
			}
		})
		if !errors.Is(err, netlink.ErrInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return mine, nil
}

// CatchUp hears which addresses came and went since the last call. It lists them
// anew only where there were so many that the kernel could not keep them.
func (c *Conn) CatchUp() error {
	err := c.changes.Events(func(typ uint16, body []byte) {
		if index, a, ok := decode(body); ok && index != c.index {
			c.note(typ, index, a)
		}
	})
	if errors.Is(err, unix.ENOBUFS) {
		_, err = c.List()
	}
	if err != nil {
		return fmt.Errorf("follow addresses: %w", err)
	}
	return nil
}

func (c *Conn) note(typ uint16, index uint32, a netip.Addr) {
	switch typ {
	case unix.RTM_NEWADDR:
		if c.others[a] == nil {
			c.others[a] = map[uint32]bool{}
		}
		c.others[a][index] = true
	case unix.RTM_DELADDR:
		if delete(c.others[a], index); len(c.others[a]) == 0 {
			delete(c.others, a)
		}
	}
}

// Elsewhere says whether another interface had the address at the last List or
// CatchUp.
func (c *Conn) Elsewhere(a netip.Addr) bool { return c.others[a] != nil }

// Others are all addresses for which Elsewhere is true, in order.
func (c *Conn) Others() []netip.Addr {
	return slices.SortedFunc(maps.Keys(c.others), netip.Addr.Compare)
}

// perSend bounds the changes of one message, and with it the kernel's answers,
// which must fit into the socket.
const perSend = 500

// Add gives the device addresses, some of which it may have already. The errors
// are by address.
func (c *Conn) Add(addrs []netip.Addr) map[netip.Addr]error {
	return c.change("add", unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, addrs)
}

// Del takes addresses away, some of which the device may lack. The errors are by
// address.
func (c *Conn) Del(addrs []netip.Addr) map[netip.Addr]error {
	return c.change("remove", unix.RTM_DELADDR, 0, addrs)
}

func (c *Conn) change(verb string, typ, flags uint16, addrs []netip.Addr) map[netip.Addr]error {
	failed := map[netip.Addr]error{}
	fail := func(a netip.Addr, err error) {
		failed[a] = fmt.Errorf("%s address %s on device %s: %w", verb, a, c.device, err)
	}
	for len(addrs) > 0 {
		part := addrs[:min(perSend, len(addrs))]
		addrs = addrs[len(part):]
		var e netlink.Encoder
		for _, a := range part {
			c.encode(&e, typ, flags|unix.NLM_F_ACK, a)
		}
		for _, err := range c.nl.Send(e.Buf) {
			var refused *netlink.Error
			switch {
			case errors.As(err, &refused) && refused.Index >= 0:
				if typ != unix.RTM_DELADDR || refused.Errno != unix.EADDRNOTAVAIL {
					fail(part[refused.Index], err)
				}
			default: // nobody knows which of them were made
				for _, a := range part {
					fail(a, err)
				}
			}
		}
	}
	return failed
}

// encode writes a message about an address that is never a source for what the
// machine sends elsewhere: IPv4 keeps addresses of scope host for itself, and
// IPv6 avoids deprecated ones.
func (c *Conn) encode(e *netlink.Encoder, typ, flags uint16, a netip.Addr) {
	family, addrFlags, scope := byte(unix.AF_INET), byte(0), byte(unix.RT_SCOPE_HOST)
	if a.Is6() {
		family, addrFlags, scope = unix.AF_INET6, unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE
	}
	header := []byte{family, byte(a.BitLen()), addrFlags, scope} // ifaddrmsg
	e.BeginWith(typ, flags, binary.NativeEndian.AppendUint32(header, c.index)...)
	e.Bytes(unix.IFA_LOCAL, a.AsSlice())
	e.Bytes(unix.IFA_ADDRESS, a.AsSlice())
	if a.Is6() {
		life := make([]byte, unix.SizeofIfaCacheinfo) // preferred for no time
		binary.NativeEndian.PutUint32(life[4:], math.MaxUint32)
		e.Bytes(unix.IFA_CACHEINFO, life)
	}
	e.End()
}

// decode reads a message about an address, behind the first four bytes of
// ifaddrmsg.
func decode(body []byte) (index uint32, a netip.Addr, ok bool) {
	if len(body) < 4 {
		return 0, a, false
	}
	var local, address []byte
	netlink.Attrs(body[4:], func(typ uint16, v []byte) {
		switch typ {
		case unix.IFA_LOCAL:
			local = v
		case unix.IFA_ADDRESS:
			address = v
		}
	})
	if local == nil { // IPv6 tells it only where there is a peer
		local = address
	}
	a, ok = netip.AddrFromSlice(local)
	return binary.NativeEndian.Uint32(body), a.Unmap(), ok
}
