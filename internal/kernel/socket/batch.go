package socket

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// controlSize has room for one control message with a datagram's destination
// (in6_pktinfo).
const controlSize = 64

// Batch receives several datagrams with one system call and sends the answers to
// them with another (recvmmsg(2), sendmmsg(2)). A server that does little for each
// request spends most of its time in system calls. It is used by one goroutine.
type Batch struct {
	conn    syscall.RawConn
	in, out []header // out has those queued
	slots   []slot
	count   int // datagrams received
	queued  int // answers

	// The calls that the runtime's poller makes, and what they return.
	receive, send func(fd uintptr) bool
	result        int
	errno         syscall.Errno
	sent          int
}

// header is struct mmsghdr.
type header struct {
	unix.Msghdr
	size uint32
}

// slot is the memory of one datagram.
type slot struct {
	buf       []byte
	name      unix.RawSockaddrInet6 // the larger one of the two families
	control   [controlSize]byte
	in, reply unix.Iovec
}

// NewBatch makes a Batch of up to n datagrams; those longer than size bytes are
// truncated. With control, control messages are received, for which the socket
// must have IP_PKTINFO or IPV6_RECVPKTINFO.
func NewBatch(c *net.UDPConn, n, size int, control bool) (*Batch, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("system calls on %s: %w", c.LocalAddr(), err)
	}
	b := &Batch{conn: raw, in: make([]header, n), out: make([]header, n), slots: make([]slot, n)}
	for i := range b.slots {
		s := &b.slots[i]
		s.buf = make([]byte, size)
		s.in.Base = &s.buf[0]
		s.in.SetLen(size)
		h := &b.in[i]
		h.Name, h.Iov = (*byte)(unsafe.Pointer(&s.name)), &s.in
		h.SetIovlen(1)
		if control {
			h.Control = &s.control[0]
		}
	}
	b.receive = func(fd uintptr) bool {
		r, _, e := unix.Syscall6(unix.SYS_RECVMMSG, fd,
			uintptr(unsafe.Pointer(&b.in[0])), uintptr(len(b.in)), unix.MSG_DONTWAIT, 0, 0)
		b.result, b.errno = int(r), e
		return e != unix.EAGAIN
	}
	b.send = func(fd uintptr) bool {
		r, _, e := unix.Syscall6(unix.SYS_SENDMMSG, fd,
			uintptr(unsafe.Pointer(&b.out[b.sent])), uintptr(b.queued-b.sent), unix.MSG_DONTWAIT, 0, 0)
		b.result, b.errno = int(r), e
		return e != unix.EAGAIN
	}
	return b, nil
}

// Receive waits for at least one datagram and returns how many there are. Its
// error is net.ErrClosed when the socket has been closed, else the socket's
// pending error, such as an ICMP error for an earlier answer.
func (b *Batch) Receive() (int, error) {
	b.queued = 0
	for i := range b.in {
		b.in[i].Namelen = unix.SizeofSockaddrInet6
		if b.in[i].Control != nil {
			b.in[i].SetControllen(controlSize)
		}
	}
	if err := b.conn.Read(b.receive); err != nil {
		return 0, closedError(err)
	}
	if b.errno != 0 {
		return 0, b.errno
	}
	b.count = b.result
	return b.count, nil
}

// closedError is net.ErrClosed for a socket that has been closed.
func closedError(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return net.ErrClosed
	}
	return err
}

// Datagram returns number i of those received; it is valid until the next Receive.
func (b *Batch) Datagram(i int) []byte { return b.slots[i].buf[:b.in[i].size] }

// Is4 reports whether the sender of datagram i has an IPv4 address.
func (b *Batch) Is4(i int) bool { return b.slots[i].name.Family == unix.AF_INET }

// From returns the sender of datagram i.
func (b *Batch) From(i int) netip.AddrPort {
	s := &b.slots[i].name
	// The port is in network order, at the same place in both families.
	p := (*[2]byte)(unsafe.Pointer(&s.Port))
	at := uint16(p[0])<<8 | uint16(p[1])
	if s.Family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(s)).Addr), at)
	}
	a := netip.AddrFrom16(s.Addr)
	if s.Scope_id != 0 {
		a = a.WithZone(fmt.Sprint(s.Scope_id))
	}
	return netip.AddrPortFrom(a, at)
}

// Control returns the control message of datagram i, empty without one.
func (b *Batch) Control(i int) []byte { return b.slots[i].control[:b.in[i].Controllen] }

// Reply queues an answer to datagram i, to be sent by Flush; until then out must
// stay as it is. control is the control message with the source address, if any.
func (b *Batch) Reply(i int, out, control []byte) {
	s := &b.slots[i]
	s.reply.Base = unsafe.SliceData(out)
	s.reply.SetLen(len(out))
	h := &b.out[b.queued]
	h.Name, h.Namelen, h.Iov = b.in[i].Name, b.in[i].Namelen, &s.reply
	h.SetIovlen(1)
	h.Control = unsafe.SliceData(control)
	h.SetControllen(len(control))
	b.queued++
}

// Flush sends the answers. One that cannot be sent is skipped: it concerns one
// client, which asks again.
func (b *Batch) Flush() error {
	for b.sent = 0; b.sent < b.queued; b.sent++ {
		if err := b.conn.Write(b.send); err != nil {
			return closedError(err)
		}
		if b.errno == 0 {
			b.sent += b.result - 1
		}
	}
	b.queued = 0
	return nil
}
