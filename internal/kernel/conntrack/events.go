package conntrack

import (
	"errors"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// Connection is a new connection when its first packet has passed all rules.
type Connection struct {
	Protocol svc.Protocol
	// Source and Destination are the ones of the client's packet.
	Source, Destination netip.AddrPort
	// Endpoint is what answers: Destination, unless that was translated.
	Endpoint netip.AddrPort
	// AnsweredTo is where answers go: Source, unless that was translated.
	AnsweredTo netip.AddrPort
	// SYN reports that the packet was the first one of a TCP connection (SYN without ACK).
	SYN bool
}

// ErrMissed is the error of Receive when the kernel had to drop reports. Receive can be called again.
var ErrMissed = errors.New("the kernel dropped reports of connections")

// Events are the kernel's reports of new connections in one network namespace. While nobody receives them the kernel does not
// make them: a report costs about as much as the connection's own entry.
type Events struct{ sub *netlink.Subscription }

// Watch returns the reports in the network namespace of the calling thread.
func Watch() (*Events, error) {
	sub, err := netlink.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_CONNTRACK_NEW)
	if err != nil {
		return nil, err
	}
	return &Events{sub}, nil
}

// EventsOff reports whether the calling thread's network namespace has reports turned off (net.netfilter.nf_conntrack_events).
func EventsOff() bool {
	text, err := os.ReadFile("/proc/sys/" + parameters + "events")
	return err == nil && strings.TrimSpace(string(text)) == "0"
}

// Receive waits for reports and calls f with each. After Close its error wraps os.ErrClosed.
func (e *Events) Receive(f func(*Connection)) error {
	err := e.sub.Receive(func(typ uint16, body []byte) {
		const genLen = 4
		if typ != unix.NFNL_SUBSYS_CTNETLINK<<8 || len(body) < genLen { // IPCTNL_MSG_CT_NEW
			return
		}
		if c, ok := parseNew(body[genLen:]); ok {
			f(&c)
		}
	})
	if errors.Is(err, unix.ENOBUFS) {
		return ErrMissed
	}
	return err
}

// Pause ends the reports until Resume, and returns how many it has thrown away.
func (e *Events) Pause() (int, error) {
	if err := e.sub.Leave(unix.NFNLGRP_CONNTRACK_NEW); err != nil {
		return 0, err
	}
	return e.sub.Discard(), nil
}

// Resume begins with reports again.
func (e *Events) Resume() error { return e.sub.Join(unix.NFNLGRP_CONNTRACK_NEW) }

// Close releases the socket and ends a Receive.
func (e *Events) Close() error { return e.sub.Close() }

func parseNew(body []byte) (c Connection, ok bool) {
	var orig, reply []byte
	netlink.Attrs(body, func(typ uint16, v []byte) {
		switch typ {
		case ctaTupleOrig:
			orig = v
		case ctaTupleReply:
			reply = v
		case ctaProtoInfo:
			state := netlink.Attr(netlink.Attr(v, ctaProtoInfoTCP), ctaProtoInfoTCPState)
			c.SYN = len(state) == 1 && state[0] == tcpSynSent
		}
	})
	var ok1, ok2 bool
	c.Protocol, c.Source, c.Destination, ok1 = tuple(orig)
	_, c.Endpoint, c.AnsweredTo, ok2 = tuple(reply)
	return c, ok1 && ok2
}
