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

// The status bits IPS_SEEN_REPLY and IPS_ASSURED of nf_conntrack_common.h.
const (
	statusSeenReply = 1 << 1
	statusAssured   = 1 << 2
)

// The attributes of nfnetlink_conntrack.h that x/sys/unix does not name.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaTimeout    = 7
	ctaID         = 12
	ctaZone       = 18
	ctaStatusMask = 26

	ctaTupleIP    = 1
	ctaTupleProto = 2

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
)

// Conn is a connection to connection tracking of one network namespace: that of
// the thread which called Dial. One goroutine uses it at a time.
type Conn struct{ nl *netlink.Conn }

// Dial opens a connection.
func Dial() (*Conn, error) {
	nl, err := netlink.Dial()
	if err != nil {
		return nil, err
	}
	return &Conn{nl}, nil
}

// Close releases the connection.
func (c *Conn) Close() error { return c.nl.Close() }

// Delete removes every entry that matches one of the flows, in the network
// namespace of the calling thread, and returns how many there were. A Flow
// without ReplySrc matches only entries whose destination was translated. The
// table is read once for each family that the flows have, and never flushed:
// what is deleted was read before, one entry at a time. Entries that end by
// on their own are no error.
func Delete(ctx context.Context, flows []Flow) (deleted int, err error) {
	if len(flows) == 0 {
		return 0, nil
	}
	c, err := Dial()
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	return c.deleteWhere(ctx, func(f svc.Family) (func(*entry) bool, bool) {
		w := index(flows, f)
		if len(w) == 0 {
			return nil, false
		}
		anyAddr := netip.IPv4Unspecified()
		if f == svc.IPv6 {
			anyAddr = netip.IPv6Unspecified()
		}
		return func(en *entry) bool {
			return matches(w[front{en.Protocol, en.OrigDst}], en) ||
				matches(w[front{en.Protocol, netip.AddrPortFrom(anyAddr, en.OrigDst.Port())}], en)
		}, false
	})
}

// Sweep removes every entry for which stale returns true, and returns how many
// there were. It reads the whole table once for each family, and is otherwise like
// Delete. With unreplied only entries of connections that were not answered yet
// are read, as far as the kernel can tell them (from Linux 5.15); of others they
// cost little.
func (c *Conn) Sweep(ctx context.Context, unreplied bool, stale func(Entry) bool) (deleted int, err error) {
	return c.deleteWhere(ctx, func(svc.Family) (func(*entry) bool, bool) {
		return func(en *entry) bool { return stale(en.Entry) }, unreplied
	})
}

// deleteWhere deletes the entries for which a test returns true. tests returns the
// test of a family, nil to leave the family out, and whether only entries without a
// reply can be of interest.
func (c *Conn) deleteWhere(ctx context.Context, tests func(svc.Family) (test func(*entry) bool, unreplied bool)) (deleted int, err error) {
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		test, unreplied := tests(f)
		if test == nil {
			continue
		}
		n, e := deleteFamily(ctx, c.nl, f, test, unreplied)
		deleted += n
		err = errors.Join(err, e)
	}
	if err != nil {
		return deleted, fmt.Errorf("delete stale connections: %w", err)
	}
	return deleted, nil
}

// front is what flows are looked up by; the rest of a Flow is compared.
type front struct {
	protocol svc.Protocol
	dst      netip.AddrPort
}

func index(flows []Flow, f svc.Family) map[front][]Flow {
	m := map[front][]Flow{}
	for _, fl := range flows {
		if fl.OrigDst.IsValid() && svc.FamilyOf(fl.OrigDst.Addr()) == f {
			k := front{fl.Protocol, fl.OrigDst}
			m[k] = append(m[k], fl)
		}
	}
	return m
}

func deleteFamily(ctx context.Context, c *netlink.Conn, f svc.Family, test func(*entry) bool, unreplied bool) (int, error) {
	found, err := matching(c, f, test, unreplied)
	// A dump that was disturbed has still shown most of the table. What it
	// missed is no worse than a connection that began a moment later.
	if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
		return 0, err
	}
	deleted := 0
	var errs []error
	for _, msg := range found {
		if ctx.Err() != nil {
			return deleted, errors.Join(append(errs, ctx.Err())...)
		}
		switch e := errors.Join(c.Send(msg)...); {
		case e == nil:
			deleted++
		case !errors.Is(e, unix.ENOENT):
			errs = append(errs, e)
		}
	}
	return deleted, errors.Join(errs...)
}

// matching returns one delete message for each entry for which test returns true.
func matching(c *netlink.Conn, f svc.Family, test func(*entry) bool, unreplied bool) ([][]byte, error) {
	var e netlink.Encoder
	e.Begin(msgGet, unix.NLM_F_DUMP, kernelFamily(f), 0)
	if unreplied {
		// A kernel that supports the mask sends only these, an older one everything.
		e.Uint32(ctaStatus, 0)
		e.Uint32(ctaStatusMask, statusSeenReply)
	}
	e.End()
	var found [][]byte
	err := c.Dump(e.Buf, func(body []byte) {
		en, ok := parse(body)
		if !ok {
			return
		}
		if test(&en) {
			found = append(found, en.deleteMessage(f))
		}
	})
	return found, err
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
	// What names the entry to the kernel.
	orig, id, zone []byte
}

func parse(body []byte) (entry, bool) {
	var en entry
	var reply []byte
	netlink.Attrs(body, func(typ uint16, v []byte) {
		switch typ {
		case ctaTupleOrig:
			en.orig = append([]byte(nil), v...)
		case ctaTupleReply:
			reply = v
		case ctaStatus:
			if len(v) == 4 {
				status := binary.BigEndian.Uint32(v)
				en.Replied, en.Assured = status&statusSeenReply != 0, status&statusAssured != 0
			}
		case ctaTimeout:
			if len(v) == 4 {
				en.Left = time.Duration(binary.BigEndian.Uint32(v)) * time.Second
			}
		case ctaID:
			en.id = append([]byte(nil), v...)
		case ctaZone:
			en.zone = append([]byte(nil), v...)
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
func (en *entry) deleteMessage(f svc.Family) []byte {
	var e netlink.Encoder
	e.Begin(msgDelete, unix.NLM_F_ACK, kernelFamily(f), 0)
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

func kernelFamily(f svc.Family) uint8 {
	if f == svc.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
