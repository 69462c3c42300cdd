package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// The parts of CTA_FILTER (nfnetlink_conntrack.h): a set of bits for each direction,
// which names what of its tuple is compared (nf_internals.h).
const (
	ctaFilterOrigFlags  = 1
	ctaFilterReplyFlags = 2

	filterSrc      = 1 << 0
	filterDst      = 1 << 1
	filterProtocol = 1 << 3
	filterSrcPort  = 1 << 4
	filterDstPort  = 1 << 5

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaStatsGlobalEntries = 1
)

// maxForgetWork bounds what Forget asks of the kernel: flows times entries. Each flow
// costs a walk over all entries.
const maxForgetWork = 1 << 17

// Forget removes the connections of flows that had no answer yet, and reports whether it
// could. The kernel compares, and skips empty buckets: 0.3 ms for a flow at 262,144
// buckets with few entries, a thirtieth of what a Sweep costs. It cannot
//
//   - before Linux 6.12, which rejects the filter for its missing attributes,
//   - for IPv6, where the kernel compares addresses the wrong way round (ipv6_addr_cmp in
//     ctnetlink_filter_match_tuple, up to Linux 6.18 at least),
//   - where a Sweep costs less, because there are many flows and many entries.
//
// Then it has removed nothing, or only some of them. Each flow has a ReplySrc.
func (c *Conn) Forget(ctx context.Context, flows []Flow) (done bool, err error) {
	if c.noFilter || !filterable(flows) {
		return false, nil
	}
	entries, err := c.entries()
	if err != nil {
		return false, fmt.Errorf("forget connections without an answer: %w", err)
	}
	if len(flows)*entries > maxForgetWork {
		return false, nil
	}
	for _, fl := range flows {
		if err := ctx.Err(); err != nil {
			return false, fmt.Errorf("forget connections without an answer: %w", err)
		}
		err := errors.Join(c.nl.Send(fl.forgetMessage())...)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			c.noFilter = true
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("forget connections without an answer: %w", err)
		}
	}
	return true, nil
}

// filterable reports whether the kernel can compare what the flows have. The protocols
// whose ports it compares are TCP and UDP.
func filterable(flows []Flow) bool {
	for _, fl := range flows {
		if !fl.OrigDst.Addr().Is4() || !fl.ReplySrc.Addr().Is4() || fl.OrigDst.Addr().IsUnspecified() {
			return false
		}
		if fl.Protocol != svc.TCP && fl.Protocol != svc.UDP {
			return false
		}
	}
	return true
}

// forgetMessage deletes by a filter: the table is flushed of what matches. Without
// support the message has a tuple without a source, which is invalid.
func (f *Flow) forgetMessage() []byte {
	var e netlink.Encoder
	e.Begin(msgDelete, unix.NLM_F_ACK, unix.AF_INET, 0)
	tupleOf(&e, ctaTupleOrig, f.Protocol, ctaIPv4Dst, ctaProtoDstPort, f.OrigDst)
	tupleOf(&e, ctaTupleReply, f.Protocol, ctaIPv4Src, ctaProtoSrcPort, f.ReplySrc)
	unreplied(&e)
	filterBy(&e, filterDst|filterProtocol|filterDstPort, filterSrc|filterProtocol|filterSrcPort)
	e.End()
	return e.Buf
}

func tupleOf(e *netlink.Encoder, typ uint16, p svc.Protocol, ip, port uint16, at netip.AddrPort) {
	whole := e.Nest(typ)
	part := e.Nest(ctaTupleIP)
	e.Bytes(ip, at.Addr().AsSlice())
	e.Close(part)
	part = e.Nest(ctaTupleProto)
	e.Uint8(ctaProtoNum, uint8(p))
	e.Uint16(port, at.Port())
	e.Close(part)
	e.Close(whole)
}

// pairOf appends the original direction of a connection.
func pairOf(e *netlink.Encoder, p svc.Protocol, src, dst netip.AddrPort) {
	ipSrc, ipDst := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if svc.FamilyOf(dst.Addr()) == svc.IPv6 {
		ipSrc, ipDst = ctaIPv6Src, ctaIPv6Dst
	}
	whole := e.Nest(ctaTupleOrig)
	part := e.Nest(ctaTupleIP)
	e.Bytes(ipSrc, src.Addr().AsSlice())
	e.Bytes(ipDst, dst.Addr().AsSlice())
	e.Close(part)
	part = e.Nest(ctaTupleProto)
	e.Uint8(ctaProtoNum, uint8(p))
	e.Uint16(ctaProtoSrcPort, src.Port())
	e.Uint16(ctaProtoDstPort, dst.Port())
	e.Close(part)
	e.Close(whole)
}

// protocolFilter restricts a dump to a protocol. A kernel before Linux 5.8 ignores it.
func protocolFilter(e *netlink.Encoder, p svc.Protocol) {
	whole := e.Nest(ctaTupleOrig)
	part := e.Nest(ctaTupleProto)
	e.Uint8(ctaProtoNum, uint8(p))
	e.Close(part)
	e.Close(whole)
	filterBy(e, filterProtocol, 0)
}

// filterBy appends CTA_FILTER, whose numbers are in the machine's order.
func filterBy(e *netlink.Encoder, orig, reply uint32) {
	at := e.Nest(ctaFilter)
	e.Bytes(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, orig))
	e.Bytes(ctaFilterReplyFlags, binary.NativeEndian.AppendUint32(nil, reply))
	e.Close(at)
}

// unreplied restricts a request to entries without an answer. A kernel that supports
// the mask (Linux 5.15) compares, an older one ignores it.
func unreplied(e *netlink.Encoder) {
	e.Uint32(ctaStatus, 0)
	e.Uint32(ctaStatusMask, statusSeenReply)
}

// entries returns how many connections the network namespace of the socket has.
func (c *Conn) entries() (int, error) {
	var e netlink.Encoder
	e.Begin(msgStats, 0, unix.AF_UNSPEC, 0)
	e.End()
	n := -1
	errs := c.nl.Ask(e.Buf, func(body []byte) {
		if v := netlink.Attr(body, ctaStatsGlobalEntries); len(v) == 4 {
			n = int(binary.BigEndian.Uint32(v))
		}
	})
	if len(errs) > 0 {
		return 0, fmt.Errorf("count tracked connections: %w", errors.Join(errs...))
	}
	if n < 0 {
		return 0, errors.New("count tracked connections: no number from the kernel")
	}
	return n, nil
}
