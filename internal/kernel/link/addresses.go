package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	wire "github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Addresses reads and changes the addresses of one device, and follows the addresses of
// all other interfaces by the kernel's notifications, so that cost follows
// change. It belongs to one network namespace, and is used by one goroutine at a
// time.
type Addresses struct {
	device      string
	nl, changes *wire.Conn
	// index is the device's as List found it, 0 if there was none.
	index uint32
	// mine are the addresses of the device, others the interfaces that have an
	// address, but for the device.
	mine   map[netip.Addr]bool
	others map[netip.Addr]map[uint32]bool
}

// DialAddresses opens the Addresses of the device called name, which need not
// exist yet, in the network namespace of the calling thread.
func DialAddresses(name string) (*Addresses, error) {
	nl, err := wire.DialRoute(0)
	if err != nil {
		return nil, err
	}
	changes, err := wire.DialRoute(unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	if err != nil {
		return nil, errors.Join(err, nl.Close())
	}
	c := &Addresses{device: name, nl: nl, changes: changes}
	if _, err := c.List(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close releases the sockets.
func (c *Addresses) Close() error { return errors.Join(c.nl.Close(), c.changes.Close()) }

// List returns the addresses on the device, and replaces the known addresses of all
// others. A device that does not exist has none.
func (c *Addresses) List() (map[netip.Addr]bool, error) {
	dev, err := netlink.LinkByName(c.device)
	switch {
	case err == nil:
		c.index = uint32(dev.Attrs().Index)
	case isMissing(err):
		c.index = 0
	default:
		return nil, fmt.Errorf("find device %s: %w", c.device, err)
	}
	// Discard the notifications that the list below includes. Later ones are
	// applied by CatchUp; applying one again does no harm.
	for err = unix.ENOBUFS; errors.Is(err, unix.ENOBUFS); {
		err = c.changes.Events(func(uint16, []byte) {})
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var e wire.Encoder
	e.Begin(unix.RTM_GETADDR, unix.NLM_F_DUMP, unix.AF_UNSPEC, 0)
	e.End()
	for range dumpTries {
		c.mine, c.others = map[netip.Addr]bool{}, map[netip.Addr]map[uint32]bool{}
		err = c.nl.Dump(e.Buf, func(body []byte) {
			if index, a, ok := decodeAddress(body); ok {
				c.record(unix.RTM_NEWADDR, index, a)
			}
		})
		if !errors.Is(err, wire.ErrInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return maps.Clone(c.mine), nil
}

// CatchUp applies the notifications since the last call. It lists all addresses
// again only if the kernel dropped notifications (ENOBUFS).
func (c *Addresses) CatchUp() error {
	err := c.changes.Events(func(typ uint16, body []byte) {
		if index, a, ok := decodeAddress(body); ok {
			c.record(typ, index, a)
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

func (c *Addresses) record(typ uint16, index uint32, a netip.Addr) {
	switch {
	case index == c.index && typ == unix.RTM_NEWADDR:
		c.mine[a] = true
	case index == c.index && typ == unix.RTM_DELADDR:
		delete(c.mine, a)
	case typ == unix.RTM_NEWADDR:
		if c.others[a] == nil {
			c.others[a] = map[uint32]bool{}
		}
		c.others[a][index] = true
	case typ == unix.RTM_DELADDR:
		if delete(c.others[a], index); len(c.others[a]) == 0 {
			delete(c.others, a)
		}
	}
}

// Has reports whether the device had the address at the last List or CatchUp.
func (c *Addresses) Has(a netip.Addr) bool { return c.mine[a] }

// Elsewhere reports whether another interface had the address at the last List or
// CatchUp.
func (c *Addresses) Elsewhere(a netip.Addr) bool { return c.others[a] != nil }

// Others returns all addresses for which Elsewhere is true, in order.
func (c *Addresses) Others() []netip.Addr {
	return slices.SortedFunc(maps.Keys(c.others), netip.Addr.Compare)
}

// perSend bounds the changes of one send, and with it the kernel's answers,
// which must fit into the socket's receive buffer.
const perSend = 500

// Add adds addresses to the device, some of which it may have already. It
// returns the errors by address. Packets to the others are this machine's when it
// returns.
func (c *Addresses) Add(addrs []netip.Addr) map[netip.Addr]error {
	failed := c.change("add", unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, addrs)
	deadline := time.Now().Add(localTime)
	for _, a := range addrs {
		for a.Is6() && failed[a] == nil && !c.local(a) && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
	}
	return failed
}

// localTime bounds the wait for IPv6 addresses to be the machine's: the kernel
// adds their local routes later, from a work queue (addrconf_dad_work). Until then
// packets to them leave by another route, and connection tracking keeps what became
// of the first one. Without a carrier that is for good.
const localTime = time.Second

// local reports whether the kernel takes packets to a for this machine's.
func (c *Addresses) local(a netip.Addr) bool {
	var e wire.Encoder
	e.BeginWith(unix.RTM_GETROUTE, unix.NLM_F_ACK, unix.AF_INET6, byte(a.BitLen()), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) // rtmsg
	e.Bytes(unix.RTA_DST, a.AsSlice())
	e.End()
	local := false
	const typeAt = 3 // rtm_type, behind the first four bytes of rtmsg
	_ = c.nl.Ask(e.Buf, func(body []byte) { local = len(body) > typeAt && body[typeAt] == unix.RTN_LOCAL })
	return local
}

// Del removes addresses, some of which the device may lack. It returns the errors
// by address.
func (c *Addresses) Del(addrs []netip.Addr) map[netip.Addr]error {
	return c.change("remove", unix.RTM_DELADDR, 0, addrs)
}

func (c *Addresses) change(verb string, typ, flags uint16, addrs []netip.Addr) map[netip.Addr]error {
	failed := map[netip.Addr]error{}
	fail := func(a netip.Addr, err error) {
		failed[a] = fmt.Errorf("%s address %s on device %s: %w", verb, a, c.device, err)
	}
	for len(addrs) > 0 {
		part := addrs[:min(perSend, len(addrs))]
		addrs = addrs[len(part):]
		var e wire.Encoder
		for _, a := range part {
			c.encode(&e, typ, flags|unix.NLM_F_ACK, a)
		}
		for _, err := range c.nl.Send(e.Buf) {
			var rejected *wire.Error
			switch {
			case errors.As(err, &rejected) && rejected.Index >= 0:
				if typ != unix.RTM_DELADDR || rejected.Errno != unix.EADDRNOTAVAIL {
					fail(part[rejected.Index], err)
				}
			default: // which of them were made is unknown
				for _, a := range part {
					fail(a, err)
				}
			}
		}
	}
	return failed
}

// encode appends a message about an address that is never chosen as the source
// of what the machine sends: IPv4 keeps addresses of scope host for itself, and
// IPv6 avoids deprecated ones.
func (c *Addresses) encode(e *wire.Encoder, typ, flags uint16, a netip.Addr) {
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

// decodeAddress reads a message about an address, behind the first four bytes of
// ifaddrmsg.
func decodeAddress(body []byte) (index uint32, a netip.Addr, ok bool) {
	if len(body) < 4 {
		return 0, a, false
	}
	var local, address []byte
	wire.Attrs(body[4:], func(typ uint16, v []byte) {
		switch typ {
		case unix.IFA_LOCAL:
			local = v
		case unix.IFA_ADDRESS:
			address = v
		}
	})
	if local == nil { // IPv6 has IFA_LOCAL only with a peer
		local = address
	}
	a, ok = netip.AddrFromSlice(local)
	return binary.NativeEndian.Uint32(body), a.Unmap(), ok
}
