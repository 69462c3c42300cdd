// Package echo asks machines whether they are there: by ICMP echo (RFC 792, RFC 4443), which the
// kernel of the other machine answers.
package echo

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Conn is a raw socket for echo requests and replies of one family; it needs CAP_NET_RAW. Its
// methods may be called concurrently.
type Conn struct {
	conn           *net.IPConn
	request, reply byte
	ipv4           bool
}

// Message is what a request has and the reply repeats.
type Message struct {
	ID, Seq uint16
	// Nonce shows that who replies has got the request.
	Nonce uint64
}

const (
	request4, reply4 = 8, 0
	request6, reply6 = 128, 129
	// length is that of a message: type, code, checksum, identifier, sequence number and nonce.
	length = 16
	// ipv4Header is the most that net reads, and takes away, before a message of IPv4.
	ipv4Header = 60
)

// ErrOther is returned by Receive for packets that do not reply to a message of this package.
var ErrOther = errors.New("no echo reply of this length")

// Open opens a socket in the network namespace of the calling thread. The kernel passes it echo
// only replies, all that the machine gets.
func Open(f svc.Family) (*Conn, error) {
	network, c := "ip4:icmp", &Conn{request: request4, reply: reply4, ipv4: true}
	if f == svc.IPv6 {
		network, c = "ip6:ipv6-icmp", &Conn{request: request6, reply: reply6}
	}
	p, err := net.ListenIP(network, nil)
	if err != nil {
		return nil, fmt.Errorf("open a socket for ICMP: %w", err)
	}
	c.conn = p
	raw, err := p.SyscallConn()
	if err == nil {
		var failed error
		err = raw.Control(func(fd uintptr) { failed = c.filter(int(fd)) })
		err = errors.Join(err, failed)
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return c, nil
}

// filter only lets replies through. The filters of both families have a bit for each type that
// is kept out.
func (c *Conn) filter(fd int) error {
	if c.ipv4 {
		// linux/icmp.h, which golang.org/x/sys/unix does not have.
		const icmpFilter = 1
		return os.NewSyscallError("setsockopt ICMP_FILTER", unix.SetsockoptInt(fd, unix.SOL_RAW, icmpFilter, int(^uint32(1<<reply4))))
	}
	var f unix.ICMPv6Filter
	for i := range f.Data {
		f.Data[i] = ^uint32(0)
	}
	f.Data[reply6/32] &^= 1 << (reply6 % 32)
	return os.NewSyscallError("setsockopt ICMPV6_FILTER", unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &f))
}

// Send sends a request to an address of the socket's family. syscall.EHOSTUNREACH and the like
// are errors of the way there.
func (c *Conn) Send(to netip.Addr, m Message) error {
	b := make([]byte, length)
	b[0] = c.request
	binary.BigEndian.PutUint16(b[4:], m.ID)
	binary.BigEndian.PutUint16(b[6:], m.Seq)
	binary.BigEndian.PutUint64(b[8:], m.Nonce)
	if c.ipv4 { // the kernel fills in that of ICMPv6 (RFC 3542, 3.1)
		binary.BigEndian.PutUint16(b[2:], checksum(b))
	}
	_, err := c.conn.WriteToIP(b, &net.IPAddr{IP: to.AsSlice(), Zone: to.Zone()})
	return err
}

// Receive waits for the next reply, also one to another process: ErrOther, or a message that the
// caller did not send. After Close it returns net.ErrClosed.
func (c *Conn) Receive() (from netip.Addr, m Message, err error) {
	b := make([]byte, ipv4Header+length+1)
	n, at, err := c.conn.ReadFromIP(b)
	if err != nil {
		return from, m, err
	}
	from, _ = netip.AddrFromSlice(at.IP)
	if n != length || b[0] != c.reply {
		return from, m, ErrOther
	}
	return from.Unmap(), Message{
		ID: binary.BigEndian.Uint16(b[4:]), Seq: binary.BigEndian.Uint16(b[6:]), Nonce: binary.BigEndian.Uint64(b[8:]),
	}, nil
}

// Close closes the socket.
func (c *Conn) Close() error { return c.conn.Close() }

// checksum is that of RFC 1071 over a message of even length whose checksum is 0.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
