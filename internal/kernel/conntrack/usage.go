package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// Traffic is what went in one direction.
type Traffic struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Usage is what one connection that is tracked now has carried. Without Accounting both directions are 0.
type Usage struct {
	Protocol svc.Protocol
	Client   netip.Addr
	// OrigDst is where the client sent to, ReplySrc who answers.
	OrigDst, ReplySrc netip.AddrPort
	// Sent is from the client, Received what it got. Bytes count whole IP packets, with their headers.
	Sent, Received Traffic
	// Closed reports a connection of TCP that both ends have closed, which is remembered for a while.
	Closed bool
}

const (
	accounting        = parameters + "acct"
	ctaCountersOrig   = 9
	ctaCountersReply  = 10
	ctaCounterPackets = 1
	ctaCounterBytes   = 2
	tcpTimeWait       = 7 // TCP_CONNTRACK_TIME_WAIT of nf_conntrack_tcp.h; TCP_CONNTRACK_CLOSE is the next
	tcpClose          = 8
)

// Accounting reports whether the kernel counts packets and bytes of new connections, in the calling thread's network namespace.
func Accounting() bool {
	b, err := os.ReadFile("/proc/sys/" + accounting)
	return err == nil && strings.TrimSpace(string(b)) == "1"
}

// EachUsage calls each for every tracked connection of TCP, UDP and SCTP, in the network namespace of the calling thread.
func EachUsage(ctx context.Context, each func(*Usage)) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var e netlink.Encoder
	e.Begin(msgGet, unix.NLM_F_DUMP, kernelFamily(0), 0)
	e.End()
	err = c.nl.Dump(e.Buf, func(body []byte) {
		if u, ok := parseUsage(body); ok && ctx.Err() == nil {
			each(&u)
		}
	})
	// A dump that was disturbed has still shown most of the table.
	if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
		return fmt.Errorf("read connection tracking: %w", err)
	}
	return ctx.Err()
}

func parseUsage(body []byte) (u Usage, ok bool) {
	var orig, reply []byte
	netlink.Attrs(body, func(typ uint16, v []byte) {
		switch typ {
		case ctaTupleOrig:
			orig = v
		case ctaTupleReply:
			reply = v
		case ctaCountersOrig:
			u.Sent = traffic(v)
		case ctaCountersReply:
			u.Received = traffic(v)
		case ctaProtoInfo:
			u.Closed = closed(v)
		}
	})
	p, src, dst, ok1 := tuple(orig)
	_, from, _, ok2 := tuple(reply)
	u.Protocol, u.Client, u.OrigDst, u.ReplySrc = p, src.Addr(), dst, from
	return u, ok1 && ok2
}

func closed(protoInfo []byte) (out bool) {
	netlink.Attrs(protoInfo, func(typ uint16, v []byte) {
		if typ != ctaProtoInfoTCP {
			return
		}
		netlink.Attrs(v, func(typ uint16, v []byte) {
			if typ == ctaProtoInfoTCPState && len(v) == 1 {
				out = v[0] == tcpTimeWait || v[0] == tcpClose
			}
		})
	})
	return out
}

func traffic(b []byte) (t Traffic) {
	netlink.Attrs(b, func(typ uint16, v []byte) {
		if len(v) != 8 {
			return
		}
		switch n := binary.BigEndian.Uint64(v); typ {
		case ctaCounterPackets:
			t.Packets = n
		case ctaCounterBytes:
			t.Bytes = n
		}
	})
	return t
}
