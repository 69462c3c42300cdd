// Package nflog receives packets that rules of the kernel log to a group (nfnetlink_log).
package nflog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// Packet is the head of a logged packet.
type Packet struct {
	Protocol            svc.Protocol
	Source, Destination netip.AddrPort
	// SYN reports that it is a TCP segment with the flag SYN and without ACK.
	SYN bool
}

// The messages and attributes of nfnetlink_log.h.
const (
	msgPacket = unix.NFNL_SUBSYS_ULOG << 8
	msgConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1

	cfgCommand   = 1
	cfgMode      = 2
	cfgTimeout   = 4
	cfgThreshold = 5

	commandBind = 1
	copyPacket  = 2

	attrPayload = 9
)

// HeadBytes is how much of a packet is copied: both headers.
const HeadBytes = 128

const (
	// flushTime, in hundredths of a second, and flushCount are when the kernel sends what it has gathered.
	flushTime  = 10
	flushCount = 20
)

// ErrMissed is the error of Receive when the kernel had to drop packets. Receive can be called again.
var ErrMissed = errors.New("the kernel dropped logged packets")

// Log receives the packets of one group in one network namespace.
type Log struct{ sub *netlink.Subscription }

// Open receives group in the network namespace of the calling thread. A group has one receiver: the error of a second one wraps
// os.ErrExist. One that wraps errors.ErrUnsupported means that the kernel has no such log.
func Open(group uint16) (*Log, error) {
	c, err := netlink.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	l := &Log{c}
	if err := l.bind(group); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("cannot receive the packets that are logged to group %d: %w", group, err)
	}
	return l, nil
}

func (l *Log) bind(group uint16) error {
	for _, set := range []func(*netlink.Encoder){
		func(e *netlink.Encoder) { e.Uint8(cfgCommand, commandBind) },
		func(e *netlink.Encoder) {
			e.Bytes(cfgMode, append(binary.BigEndian.AppendUint32(nil, HeadBytes), copyPacket, 0))
			e.Uint32(cfgTimeout, flushTime)
			e.Uint32(cfgThreshold, flushCount)
		},
	} {
		var e netlink.Encoder
		e.Begin(msgConfig, unix.NLM_F_ACK, unix.AF_UNSPEC, group)
		set(&e)
		e.End()
		if err := l.sub.Ask(e.Buf); err != nil {
			return explained(err)
		}
	}
	return nil
}

func explained(err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: another program receives them", os.ErrExist)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: the kernel has no nfnetlink_log: %w", errors.ErrUnsupported, err)
	}
	return err
}

// Receive waits for packets and calls f with each that has a protocol of Services. After Close its error wraps os.ErrClosed.
func (l *Log) Receive(f func(*Packet)) error {
	err := l.sub.Receive(func(typ uint16, body []byte) {
		const genLen = 4
		if typ != msgPacket || len(body) < genLen {
			return
		}
		var p Packet
		var head []byte
		netlink.Attrs(body[genLen:], func(typ uint16, v []byte) {
			if typ == attrPayload {
				head = v
			}
		})
		if p.parse(head) {
			f(&p)
		}
	})
	if errors.Is(err, unix.ENOBUFS) {
		return ErrMissed
	}
	return err
}

// Close releases the group and ends a Receive.
func (l *Log) Close() error { return l.sub.Close() }

// parse reads the headers of an IP packet. Packets with extension headers of IPv6, and all but first fragments, have no ports
// that it finds.
func (p *Packet) parse(b []byte) bool {
	if len(b) < 20 {
		return false
	}
	var from, to netip.Addr
	var transport []byte
	switch b[0] >> 4 {
	case 4:
		n := int(b[0]&0x0f) * 4
		if n < 20 || len(b) < n || binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return false
		}
		from, to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		p.Protocol, transport = svc.Protocol(b[9]), b[n:]
	case 6:
		if len(b) < 40 {
			return false
		}
		from, to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		p.Protocol, transport = svc.Protocol(b[6]), b[40:]
	default:
		return false
	}
	if p.Protocol != svc.TCP && p.Protocol != svc.UDP && p.Protocol != svc.SCTP || len(transport) < 4 {
		return false
	}
	p.Source = netip.AddrPortFrom(from, binary.BigEndian.Uint16(transport))
	p.Destination = netip.AddrPortFrom(to, binary.BigEndian.Uint16(transport[2:]))
	const syn, ack = 0x02, 0x10
	p.SYN = p.Protocol == svc.TCP && len(transport) > 13 && transport[13]&(syn|ack) == syn
	return true
}
