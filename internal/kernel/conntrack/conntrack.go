// Package conntrack removes entries of the kernel's connection tracking table that
// would lead packets to where nothing is any more.
package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// The status bits IPS_SEEN_REPLY, IPS_ASSURED and IPS_DST_NAT of nf_conntrack_common.h.
const (
	statusSeenReply = 1 << 1
	statusAssured   = 1 << 2
	statusDstNAT    = 1 << 5
)

// The attributes of nfnetlink_conntrack.h that x/sys/unix does not name.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaTimeout    = 7
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25
	ctaStatusMask = 26

	ctaTupleIP    = 1
	ctaTupleProto = 2

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaProtoInfoTCP      = 1
	ctaProtoInfoTCPState = 1
	tcpSynSent           = 1 // TCP_CONNTRACK_SYN_SENT

	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
	msgStats  = unix.NFNL_SUBSYS_CTNETLINK<<8 | 5
)

// Conn is a connection to connection tracking of one network namespace: that of
// the thread which called Dial. One goroutine uses it at a time.
type Conn struct {
	nl *netlink.Conn
	// noFilter is set once the kernel has rejected a deletion by a filter.
	noFilter bool
}

// Dial opens a connection.
func Dial() (*Conn, error) {
	nl, err := netlink.Dial()
	if err != nil {
		return nil, err
	}
	return &Conn{nl: nl}, nil
}

// Close releases the connection.
func (c *Conn) Close() error { return c.nl.Close() }

// Delete removes every entry that matches one of the flows, in the network
// namespace of the calling thread, and returns how many there were. A Flow
// without ReplySrc matches only entries whose destination was translated. The
// table is read once, and never flushed: what is deleted was read before, one
// entry at a time. An entry that ends in the meantime is no error.
func Delete(ctx context.Context, flows []Flow) (deleted int, err error) {
	if len(flows) == 0 {
		return 0, nil
	}
	c, err := Dial()
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	wanted, scope := index(flows)
	return c.deleteWhere(ctx, scope, func(en *entry) bool {
		anyAddr := netip.IPv4Unspecified()
		if svc.FamilyOf(en.OrigDst.Addr()) == svc.IPv6 {
			anyAddr = netip.IPv6Unspecified()
		}
		return matches(wanted[front{en.Protocol, en.OrigDst}], en) ||
			matches(wanted[front{en.Protocol, netip.AddrPortFrom(anyAddr, en.OrigDst.Port())}], en)
	})
}

// Scope is what a Sweep has to look at. The kernel leaves out the rest as far as it
// can: the protocol from Linux 5.8 and only with a family, the answered from Linux 5.15.
type Scope struct {
	Family   svc.Family   // 0 for both
	Protocol svc.Protocol // 0 for all
	// Unreplied is set if only connections without an answer count.
	Unreplied bool
}

// has reports whether an entry is in scope.
func (s Scope) has(en *entry) bool {
	return (s.Protocol == 0 || s.Protocol == en.Protocol) && !(s.Unreplied && en.Replied)
}

// Sweep removes every entry in scope for which stale returns true, and returns how
// many there were. It reads the table once, whose cost is that of its buckets even
// when there are no entries: 11 ms for 262,144. It is otherwise like Delete.
func (c *Conn) Sweep(ctx context.Context, scope Scope, stale func(Entry) bool) (deleted int, err error) {
	return c.deleteWhere(ctx, scope, func(en *entry) bool { return stale(en.Entry) })
}

// EachUnanswered calls f for every connection of a protocol that had no answer yet. It reads the table once for each family.
func (c *Conn) EachUnanswered(p svc.Protocol, f func(Entry)) error {
	for _, family := range []svc.Family{svc.IPv4, svc.IPv6} {
		err := dump(c.nl, Scope{Family: family, Protocol: p, Unreplied: true}, func(en *entry) { f(en.Entry) })
		if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
			return fmt.Errorf("read unanswered connections: %w", err)
		}
	}
	return nil
}

// Unanswer removes the connection of src to dst if it had no answer yet, and reports whether there was one. Its next packet is a new
// connection's.
func (c *Conn) Unanswer(p svc.Protocol, src, dst netip.AddrPort) (bool, error) {
	var e netlink.Encoder
	e.Begin(msgGet, 0, kernelFamily(svc.FamilyOf(dst.Addr())), 0)
	pairOf(&e, p, src, dst)
	e.End()
	var message []byte
	errs := c.nl.Ask(e.Buf, func(body []byte) {
		if en, ok := parse(body); ok && !en.Replied {
			message = en.deleteMessage()
		}
	})
	err := errors.Join(errs...)
	if err == nil && message != nil {
		err = errors.Join(c.nl.Send(message)...)
	}
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("delete the connection of %s to %s: %w", src, dst, err)
	}
	return message != nil, nil
}

// deleteWhere deletes the entries in scope for which test returns true.
func (c *Conn) deleteWhere(ctx context.Context, scope Scope, test func(*entry) bool) (deleted int, err error) {
	found, err := matching(c.nl, scope, test)
	// A dump that was disturbed has still shown most of the table. What it
	// missed is no worse than a connection that began a moment later.
	if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
		return 0, fmt.Errorf("delete stale connections: %w", err)
	}
	var errs []error
	for _, msg := range found {
		if ctx.Err() != nil {
			errs = append(errs, ctx.Err())
			break
		}
		switch e := errors.Join(c.nl.Send(msg)...); {
		case e == nil:
			deleted++
		case !errors.Is(e, unix.ENOENT):
			errs = append(errs, e)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return deleted, fmt.Errorf("delete stale connections: %w", err)
	}
	return deleted, nil
}

// front is what flows are looked up by; the rest of a Flow is compared.
type front struct {
	protocol svc.Protocol
	dst      netip.AddrPort
}

// index returns the flows by their front, and the least scope that has them all.
func index(flows []Flow) (map[front][]Flow, Scope) {
	m := map[front][]Flow{}
	var scope Scope
	for _, fl := range flows {
		if !fl.OrigDst.IsValid() {
			continue
		}
		f := svc.FamilyOf(fl.OrigDst.Addr())
		if len(m) == 0 {
			scope = Scope{Family: f, Protocol: fl.Protocol}
		}
		if scope.Family != f {
			scope.Family = 0
		}
		if scope.Protocol != fl.Protocol {
			scope.Protocol = 0
		}
		k := front{fl.Protocol, fl.OrigDst}
		m[k] = append(m[k], fl)
	}
	return m, scope
}

// matching returns one delete message for each entry in scope for which test returns
// true.
func matching(c *netlink.Conn, scope Scope, test func(*entry) bool) ([][]byte, error) {
	var found [][]byte
	err := dump(c, scope, func(en *entry) {
		if test(en) {
			found = append(found, en.deleteMessage())
		}
	})
	return found, err
}

// dump calls f for each entry in scope.
func dump(c *netlink.Conn, scope Scope, f func(*entry)) error {
	var e netlink.Encoder
	e.Begin(msgGet, unix.NLM_F_DUMP, kernelFamily(scope.Family), 0)
	if scope.Protocol != 0 && scope.Family != 0 {
		protocolFilter(&e, scope.Protocol)
	}
	if scope.Unreplied {
		unreplied(&e)
	}
	e.End()
	return c.Dump(e.Buf, func(body []byte) {
		if en, ok := parse(body); ok && scope.has(&en) {
			f(&en)
		}
	})
}

func matches(fls []Flow, en *entry) bool {
	for _, fl := range fls {
		if fl.ReplySrc == en.ReplySrc || !fl.ReplySrc.IsValid() && en.Translated() {
			return true
		}
	}
	return false
}

// entry is one tracked connection as the kernel sent it.
type entry struct {
	Entry
	// What names the entry to the kernel; a part of the message that was parsed.
	orig, id, zone []byte
}

func parse(body []byte) (entry, bool) {
	var en entry
	var reply []byte
	netlink.Attrs(body, func(typ uint16, v []byte) {
		switch typ {
		case ctaTupleOrig:
			en.orig = v
		case ctaTupleReply:
			reply = v
		case ctaStatus:
			if len(v) == 4 {
				status := binary.BigEndian.Uint32(v)
				en.Replied, en.Assured, en.Marked = status&statusSeenReply != 0, status&statusAssured != 0, status&statusDstNAT != 0
			}
		case ctaTimeout:
			if len(v) == 4 {
				en.Left = time.Duration(binary.BigEndian.Uint32(v)) * time.Second
			}
		case ctaID:
			en.id = v
		case ctaZone:
			en.zone = v
		}
	})
	var ok1, ok2 bool
	en.Protocol, _, en.OrigDst, ok1 = tuple(en.orig)
	_, en.ReplySrc, _, ok2 = tuple(reply)
	return en, ok1 && ok2
}

// tuple reads one direction of a connection. Protocols without ports are not
// of interest.
func tuple(b []byte) (p svc.Protocol, src, dst netip.AddrPort, ok bool) {
	var srcIP, dstIP netip.Addr
	var srcPort, dstPort []byte
	netlink.Attrs(b, func(typ uint16, v []byte) {
		switch typ {
		case ctaTupleIP:
			netlink.Attrs(v, func(typ uint16, v []byte) {
				switch a, _ := netip.AddrFromSlice(v); typ {
				case 1, 3: // CTA_IP_V4_SRC, CTA_IP_V6_SRC
					srcIP = a
				case 2, 4: // CTA_IP_V4_DST, CTA_IP_V6_DST
					dstIP = a
				}
			})
		case ctaTupleProto:
			netlink.Attrs(v, func(typ uint16, v []byte) {
				switch typ {
				case ctaProtoNum:
					if len(v) == 1 {
						p = svc.Protocol(v[0])
					}
				case ctaProtoSrcPort:
					srcPort = v
				case ctaProtoDstPort:
					dstPort = v
				}
			})
		}
	})
	if !srcIP.IsValid() || !dstIP.IsValid() || len(srcPort) != 2 || len(dstPort) != 2 {
		return p, src, dst, false
	}
	return p, netip.AddrPortFrom(srcIP, binary.BigEndian.Uint16(srcPort)), netip.AddrPortFrom(dstIP, binary.BigEndian.Uint16(dstPort)), true
}

// deleteMessage names the entry by its original direction and its ID, so that
// a later connection of the same addresses stays.
func (en *entry) deleteMessage() []byte {
	var e netlink.Encoder
	e.Begin(msgDelete, unix.NLM_F_ACK, kernelFamily(svc.FamilyOf(en.OrigDst.Addr())), 0)
	e.Bytes(ctaTupleOrig|unix.NLA_F_NESTED, en.orig)
	if en.zone != nil {
		e.Bytes(ctaZone, en.zone)
	}
	if en.id != nil {
		e.Bytes(ctaID, en.id)
	}
	e.End()
	return e.Buf
}

// kernelFamily returns the kernel's number of a family, AF_UNSPEC for 0.
func kernelFamily(f svc.Family) uint8 {
	switch f {
	case svc.IPv4:
		return unix.AF_INET
	case svc.IPv6:
		return unix.AF_INET6
	default:
		return unix.AF_UNSPEC
	}
}
