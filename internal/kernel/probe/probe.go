// Package probe sends one packet as a client would, and returns what came back. Of TCP it is the first segment of a connection (SYN)
// that is never made: no socket waits for the answer, so that the kernel resets it, and no program gets to know of it. Of UDP it is
// an empty datagram, which its receiver does get. It needs CAP_NET_RAW.
package probe

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// ErrNoRoute is in the error of Open where the kernel has no route to the destination, or no source for it.
var ErrNoRoute = errors.New("no route")

// Answer is what came back.
type Answer string

// The answers.
const (
	None     Answer = ""
	Accepted Answer = "accepted" // a segment with SYN and ACK, or a datagram
	Reset    Answer = "reset"    // a segment with RST
	Rejected Answer = "rejected" // an ICMP error
	Dropped  Answer = "dropped"  // by a rule of the sender's own output
)

// Probe is one packet to send, of the network namespace of the thread that called Open. One goroutine uses it at a time.
type Probe struct {
	// raw sends and receives, hold keeps the source port from others.
	raw, hold           int
	protocol            svc.Protocol
	source, destination netip.AddrPort
	sequence            uint32
}

// Open prepares a packet of TCP or UDP, from the address that the routes say.
func Open(p svc.Protocol, to netip.AddrPort) (*Probe, error) {
	o := &Probe{raw: -1, hold: -1, protocol: p, destination: to}
	if p != svc.TCP && p != svc.UDP {
		return nil, fmt.Errorf("cannot send a packet of %s: want TCP or UDP", p)
	}
	if err := o.open(); err != nil {
		_ = o.Close()
		return nil, err
	}
	return o, nil
}

func (o *Probe) open() (err error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if o.destination.Addr().Is6() {
		family = unix.AF_INET6
	}
	if o.protocol == svc.UDP {
		kind = unix.SOCK_DGRAM
	}
	const flags = unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	if o.raw, err = unix.Socket(family, unix.SOCK_RAW|flags, int(o.protocol)); err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	level, name := unix.IPPROTO_IP, unix.IP_RECVERR
	if family == unix.AF_INET6 {
		level, name = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	if err := unix.SetsockoptInt(o.raw, level, name, 1); err != nil { // ICMP errors that are not final, too
		return err
	}
	if err := unix.Connect(o.raw, sockaddr(netip.AddrPortFrom(o.destination.Addr(), 0))); err != nil {
		return fmt.Errorf("%w to %s: %w", ErrNoRoute, o.destination.Addr(), err)
	}
	local, err := address(o.raw)
	if err != nil {
		return err
	}
	if o.hold, err = unix.Socket(family, kind|flags, 0); err != nil {
		return err
	}
	if err := unix.Bind(o.hold, sockaddr(netip.AddrPortFrom(local.Addr(), 0))); err != nil {
		return fmt.Errorf("reserve a port of %s: %w", local.Addr(), err)
	}
	if o.source, err = address(o.hold); err != nil {
		return err
	}
	var number [4]byte
	if _, err := rand.Read(number[:]); err != nil {
		return err
	}
	o.sequence = binary.BigEndian.Uint32(number[:])
	return nil
}

// Source and Sequence are what the packet is known by.
func (o *Probe) Source() netip.AddrPort { return o.source }

// Sequence is the sequence number of a TCP segment.
func (o *Probe) Sequence() uint32 { return o.sequence }

// Send sends the packet. A packet that the sender's own rules drop is Dropped, and no error.
func (o *Probe) Send() (Answer, error) {
	err := unix.Send(o.raw, o.packet(), 0)
	switch {
	case err == nil:
		return None, nil
	case errors.Is(err, unix.EPERM):
		return Dropped, nil
	case rejection(err):
		return Rejected, err
	}
	return None, fmt.Errorf("send a packet to %s: %w", o.destination, err)
}

// Await waits until an answer comes, for at most wait. An answer of Rejected comes with the kernel's error.
func (o *Probe) Await(wait time.Duration) (Answer, error) {
	buf := make([]byte, 2048)
	for end := time.Now().Add(wait); ; {
		left := time.Until(end)
		fds := []unix.PollFd{{Fd: int32(o.raw), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, max(int(left.Milliseconds()), 0)); err != nil && !errors.Is(err, unix.EINTR) {
			return None, err
		}
		for {
			n, _, err := unix.Recvfrom(o.raw, buf, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if rejection(err) {
				return Rejected, err
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return None, err
			}
			if a := o.answer(buf[:max(n, 0)]); a != None {
				return a, nil
			}
		}
		if left <= 0 {
			return None, nil
		}
	}
}

// Close releases the port.
func (o *Probe) Close() error {
	var errs []error
	for _, fd := range []int{o.raw, o.hold} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	o.raw, o.hold = -1, -1
	return errors.Join(errs...)
}

// rejection reports whether an error is what ICMP said, or a route that rejects.
func rejection(err error) bool {
	for _, e := range []syscall.Errno{
		unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.ENOPROTOOPT, unix.EHOSTDOWN, unix.EPROTO, unix.EMSGSIZE,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// The flags of a TCP segment.
const syn, rst, ack = 0x02, 0x04, 0x10

// packet is what the IP header stands before, with the checksum of both.
func (o *Probe) packet() []byte {
	var b []byte
	b = binary.BigEndian.AppendUint16(b, o.source.Port())
	b = binary.BigEndian.AppendUint16(b, o.destination.Port())
	at := 6
	if o.protocol == svc.TCP {
		const words, window, mss = 6, 64240, 1400
		b = binary.BigEndian.AppendUint32(b, o.sequence)
		b = append(b, 0, 0, 0, 0, words<<4, syn)
		b = binary.BigEndian.AppendUint16(b, window)
		at = len(b)
		b = append(b, 0, 0, 0, 0) // checksum, urgent pointer
		b = append(b, 2, 4)       // the option of that name, and its length
		b = binary.BigEndian.AppendUint16(b, mss)
	} else {
		b = append(b, 0, 8, 0, 0) // length, checksum
	}
	binary.BigEndian.PutUint16(b[at:], checksum(o.source.Addr(), o.destination.Addr(), o.protocol, b))
	return b
}

// checksum is that of TCP and UDP (RFC 9293, 768 and 8200) over a packet of even length.
func checksum(from, to netip.Addr, p svc.Protocol, packet []byte) uint16 {
	sum := uint32(p) + uint32(len(packet))
	for _, part := range [][]byte{from.AsSlice(), to.AsSlice(), packet} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if sum == 0xffff && p == svc.UDP { // 0 is none
		return 0xffff
	}
	return ^uint16(sum)
}

// answer reads a packet that the raw socket got, with its IP header if it is of IPv4.
func (o *Probe) answer(b []byte) Answer {
	if o.destination.Addr().Is4() {
		if len(b) < 20 || len(b) < int(b[0]&0x0f)*4 {
			return None
		}
		b = b[int(b[0]&0x0f)*4:]
	}
	if len(b) < 8 || binary.BigEndian.Uint16(b) != o.destination.Port() || binary.BigEndian.Uint16(b[2:]) != o.source.Port() {
		return None
	}
	if o.protocol == svc.UDP {
		return Accepted
	}
	if len(b) < 20 || binary.BigEndian.Uint32(b[8:]) != o.sequence+1 {
		return None
	}
	switch b[13] & (syn | rst | ack) {
	case syn | ack:
		return Accepted
	case rst, rst | ack:
		return Reset
	}
	return None
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func address(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, err
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("an address of another kind: %T", sa)
}
