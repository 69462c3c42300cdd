package ipset

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// The numbers of linux/netfilter/ipset/ip_set.h.
const (
	protocolVersion = 6

	cmdProtocol = 1
	cmdCreate   = 2
	cmdDestroy  = 3
	cmdFlush    = 4
	cmdList     = 7
	cmdAdd      = 9
	cmdDel      = 10

	attrProtocol = 1
	attrFlags    = 6
	attrSetName  = 2
	attrTypeName = 3
	attrRevision = 4
	attrFamily   = 5
	attrData     = 7
	attrADT      = 8

	dataIP      = 1
	dataCIDR    = 3
	dataPort    = 4
	dataTimeout = 6
	dataProto   = 7
	dataFlags   = 8 // IPSET_ATTR_CADT_FLAGS
	dataLine    = 9 // IPSET_ATTR_LINENO
	dataMaxElem = 19
	dataIP2     = 20
	dataCIDR2   = 21
	dataPackets = 25
	dataSkbMark = 27
	dataSize    = 24     // IPSET_ATTR_ELEMENTS
	listHeader  = 1 << 2 // IPSET_FLAG_LIST_HEADER, in attrFlags
	dataIPv4    = 1      // within dataIP
	dataIPv6    = 2
	flagCounter = 1 << 3 // IPSET_FLAG_WITH_COUNTERS
	flagSkbinfo = 1 << 6 // IPSET_FLAG_WITH_SKBINFO
	maxElements = 1 << 22
	perMessage  = 200 // elements; all of them must fit into 64 KiB
	errBusy     = 4100
)

// revisions are the revisions of each type since Linux 4.6, which all kernels that we
// run on have.
var revisions = map[Type]uint8{HashIP: 4, HashNet: 6, HashIPPort: 5, HashIPPortIP: 5, HashIPPortNet: 7}

// ErrInUse is the error of destroying a set that a rule names.
var ErrInUse = errors.New("set is in use")

// Conn talks to the kernel's sets of one network namespace. It is used by one
// goroutine at a time.
type Conn struct{ nl *netlink.Conn }

// Dial opens a Conn in the network namespace of the calling thread.
func Dial() (*Conn, error) {
	nl, err := netlink.Dial()
	if err != nil {
		return nil, err
	}
	return &Conn{nl}, nil
}

// Close releases the socket.
func (c *Conn) Close() error { return c.nl.Close() }

func begin(e *netlink.Encoder, cmd, flags uint16, set string) {
	e.Begin(unix.NFNL_SUBSYS_IPSET<<8|cmd, flags, unix.AF_INET, 0)
	e.Uint8(attrProtocol, protocolVersion)
	if set != "" {
		e.String(attrSetName, set)
	}
}

// Probe reports whether the kernel has sets, and this process may change them.
func (c *Conn) Probe() error {
	var e netlink.Encoder
	begin(&e, cmdProtocol, unix.NLM_F_ACK, "")
	e.End()
	if errs := c.nl.Send(e.Buf); len(errs) > 0 {
		return fmt.Errorf("ipset: %w", errs[0])
	}
	return nil
}

// Create makes sets that are not there yet. One of the same name and another
// type is an error.
func (c *Conn) Create(sets ...Set) error {
	var e netlink.Encoder
	for _, s := range sets {
		// Without NLM_F_EXCL the kernel is content with a set that is the same.
		begin(&e, cmdCreate, unix.NLM_F_ACK|unix.NLM_F_CREATE, s.Name)
		e.String(attrTypeName, string(s.Type))
		e.Uint8(attrRevision, revisions[s.Type])
		e.Uint8(attrFamily, familyNumber(s.Family))
		at := e.Nest(attrData)
		e.Uint32(dataMaxElem|unix.NLA_F_NET_BYTEORDER, cmp.Or(s.Size, maxElements))
		if s.Timeout > 0 {
			e.Uint32(dataTimeout|unix.NLA_F_NET_BYTEORDER, uint32(s.Timeout/time.Second))
		}
		if flags := s.flags(); flags != 0 {
			e.Uint32(dataFlags|unix.NLA_F_NET_BYTEORDER, flags)
		}
		e.Close(at)
		e.End()
	}
	return c.send(&e, func(i int) string { return "create set " + sets[i].Name })
}

func (s *Set) flags() uint32 {
	var flags uint32
	if s.Marks {
		flags |= flagSkbinfo
	}
	if s.Counters {
		flags |= flagCounter
	}
	return flags
}

func familyNumber(f svc.Family) uint8 {
	if f == svc.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// Destroy removes sets. One that is not there is no error; the error of one
// that a rule names wraps ErrInUse.
func (c *Conn) Destroy(names ...string) error { return c.byName(cmdDestroy, "destroy set ", names) }

// Flush empties sets. One that is not there is no error.
func (c *Conn) Flush(names ...string) error { return c.byName(cmdFlush, "empty set ", names) }

func (c *Conn) byName(cmd uint16, what string, names []string) error {
	var errs []error
	for _, n := range names {
		var e netlink.Encoder
		begin(&e, cmd, unix.NLM_F_ACK, n)
		e.End()
		err := c.send(&e, func(int) string { return what + n })
		if !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Add adds elements to a set; Del removes them. That one is there already, or
// is not, is no error. An element that is there gets the mark of the new one and
// the set's whole Timeout again, and keeps its counter.
func (c *Conn) Add(set string, list []Element) error { return c.change(cmdAdd, "add to", set, list) }

// Del removes elements from a set, see Add.
func (c *Conn) Del(set string, list []Element) error {
	return c.change(cmdDel, "remove from", set, list)
}

func (c *Conn) change(cmd uint16, what, set string, list []Element) error {
	for len(list) > 0 {
		part := list[:min(perMessage, len(list))]
		list = list[len(part):]
		var e netlink.Encoder
		begin(&e, cmd, unix.NLM_F_ACK, set)
		e.Uint32(dataLine, 0)
		adt := e.Nest(attrADT)
		for i := range part {
			at := e.Nest(attrData)
			part[i].encode(&e)
			e.Uint32(dataLine|unix.NLA_F_NET_BYTEORDER, uint32(i+1))
			e.Close(at)
		}
		e.Close(adt)
		e.End()
		if err := c.send(&e, func(int) string { return fmt.Sprintf("%s set %s (%s and %d more)", what, set, part[0], len(part)-1) }); err != nil {
			return err
		}
	}
	return nil
}

func (el *Element) encode(e *netlink.Encoder) {
	if el.IP.IsValid() {
		address(e, dataIP, el.IP)
	} else {
		address(e, dataIP, el.Net.Addr())
		e.Uint8(dataCIDR, uint8(el.Net.Bits()))
	}
	if el.Proto != 0 {
		e.Uint16(dataPort|unix.NLA_F_NET_BYTEORDER, el.Port)
		e.Uint8(dataProto, uint8(el.Proto))
	}
	switch {
	case el.IP2.IsValid():
		address(e, dataIP2, el.IP2)
	case el.Net.IsValid() && el.IP.IsValid():
		address(e, dataIP2, el.Net.Addr())
		e.Uint8(dataCIDR2, uint8(el.Net.Bits()))
	}
	if el.Mark != 0 {
		e.Uint64(dataSkbMark|unix.NLA_F_NET_BYTEORDER, uint64(el.Mark)<<32|0xffffffff)
	}
}

func address(e *netlink.Encoder, typ uint16, a netip.Addr) {
	at := e.Nest(typ)
	if a.Is4() {
		e.Bytes(dataIPv4|unix.NLA_F_NET_BYTEORDER, a.AsSlice())
	} else {
		e.Bytes(dataIPv6|unix.NLA_F_NET_BYTEORDER, a.AsSlice())
	}
	e.Close(at)
}

// send sends the messages; what names the i-th of them.
func (c *Conn) send(e *netlink.Encoder, what func(i int) string) error {
	var errs []error
	for _, err := range c.nl.Send(e.Buf) {
		i := 0
		var refused *netlink.Error
		if errors.As(err, &refused) {
			i = max(0, refused.Index)
			if refused.Errno == errBusy || refused.Errno == unix.EBUSY {
				err = ErrInUse
			}
		}
		errs = append(errs, fmt.Errorf("ipset: %s: %w", what(i), err))
	}
	return errors.Join(errs...)
}

// List calls f for each element of a set. A set that is not there is an error
// that wraps unix.ENOENT.
func (c *Conn) List(set string, f func(Element)) error {
	return c.list(set, func(v []byte) { f(decode(v)) })
}

// Counts is List with what elements have counted.
func (c *Conn) Counts(set string, f func(Count)) error {
	return c.list(set, func(v []byte) {
		n := Count{Element: decode(v)}
		if b := netlink.Attr(v, dataPackets); len(b) == 8 {
			n.Packets = binary.BigEndian.Uint64(b)
		}
		if b := netlink.Attr(v, dataTimeout); len(b) == 4 {
			n.Left = time.Duration(binary.BigEndian.Uint32(b)) * time.Second
		}
		f(n)
	})
}

func (c *Conn) list(set string, f func(v []byte)) error {
	err := c.dump(set, func(body []byte) {
		netlink.Attrs(netlink.Attr(body, attrADT), func(_ uint16, v []byte) { f(v) })
	})
	if err != nil {
		return fmt.Errorf("ipset: list set %s: %w", set, err)
	}
	return nil
}

// Len returns how many elements a set has. A set that is not there is an error that
// wraps unix.ENOENT.
func (c *Conn) Len(set string) (int, error) {
	var e netlink.Encoder
	begin(&e, cmdList, unix.NLM_F_DUMP, set)
	e.Uint32(attrFlags|unix.NLA_F_NET_BYTEORDER, listHeader)
	e.End()
	n := -1
	err := c.nl.Dump(e.Buf, func(body []byte) {
		if v := netlink.Attr(netlink.Attr(body, attrData), dataSize); len(v) == 4 {
			n = int(binary.BigEndian.Uint32(v))
		}
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("ipset: size of set %s: %w", set, err)
	case n < 0:
		return 0, fmt.Errorf("ipset: size of set %s: the kernel did not tell", set)
	}
	return n, nil
}

// Names returns the names of all sets.
func (c *Conn) Names() ([]string, error) {
	var names []string
	err := c.dump("", func(body []byte) {
		if n := netlink.CString(netlink.Attr(body, attrSetName)); len(names) == 0 || names[len(names)-1] != n {
			names = append(names, n)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("ipset: list sets: %w", err)
	}
	return names, nil
}

func (c *Conn) dump(set string, f func(body []byte)) error {
	var e netlink.Encoder
	begin(&e, cmdList, unix.NLM_F_DUMP, set)
	e.End()
	return c.nl.Dump(e.Buf, f)
}

func decode(v []byte) Element {
	var el Element
	var first, second netip.Addr
	bits, bits2 := -1, -1
	netlink.Attrs(v, func(typ uint16, v []byte) {
		switch typ {
		case dataIP:
			first = addressOf(v)
		case dataIP2:
			second = addressOf(v)
		case dataCIDR:
			bits = oneByte(v)
		case dataCIDR2:
			bits2 = oneByte(v)
		case dataPort:
			if len(v) == 2 {
				el.Port = binary.BigEndian.Uint16(v)
			}
		case dataProto:
			el.Proto = svc.Protocol(oneByte(v))
		case dataSkbMark:
			if len(v) == 8 {
				el.Mark = binary.BigEndian.Uint32(v)
			}
		}
	})
	switch {
	case bits >= 0 && el.Proto == 0:
		el.Net = netip.PrefixFrom(first, bits)
	case bits2 >= 0:
		el.IP, el.Net = first, netip.PrefixFrom(second, bits2)
	default:
		el.IP, el.IP2 = first, second
	}
	return el
}

func oneByte(v []byte) int {
	if len(v) == 0 {
		return 0
	}
	return int(v[0])
}

func addressOf(v []byte) netip.Addr {
	var a netip.Addr
	netlink.Attrs(v, func(_ uint16, v []byte) {
		if b, ok := netip.AddrFromSlice(v); ok {
			a = b
		}
	})
	return a
}

// NotSupported reports whether err means a kernel without sets, or a process that may
// not ask for them, in whose network namespace none was made then.
func NotSupported(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM)
}
