package netlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is one netlink socket. It belongs to the network namespace in which
// Dial was called, whatever thread uses it later. It is used by one goroutine
// at a time.
type Conn struct {
	fd  int
	seq uint32
	buf []byte
}

const (
	// headerLen is the size of nlmsghdr, genLen of nfgenmsg behind it.
	headerLen = 16
	genLen    = 4
	// wantedSendBuffer is asked for as root; a transaction must fit into it.
	wantedSendBuffer = 64 << 20
	wantedRecvBuffer = 4 << 20
	// answerTimeout bounds the wait for one datagram of an answer.
	answerTimeout = 30 * time.Second
)

// Dial opens a socket in the network namespace of the calling thread.
func Dial() (*Conn, error) { return dial(unix.NETLINK_NETFILTER, 0) }

// DialGeneric is Dial for generic netlink, whose header (genlmsghdr) has the
// size and the place of nfgenmsg: the command stands where that has the address
// family.
func DialGeneric() (*Conn, error) { return dial(unix.NETLINK_GENERIC, 0) }

// DialRoute is Dial for links, addresses and routes. A socket that is notified of
// what happens to groups (unix.RTMGRP_...) is only for Events.
func DialRoute(groups uint32) (*Conn, error) { return dial(unix.NETLINK_ROUTE, groups) }

func dial(protocol int, groups uint32) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	c := &Conn{fd: fd, seq: uint32(time.Now().UnixNano()), buf: make([]byte, 64<<10)}
	if err := c.setUp(groups); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("set up a netlink socket: %w", err)
	}
	return c, nil
}

func (c *Conn) setUp(groups uint32) error {
	if err := unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return err
	}
	// Beyond net.core.[rw]mem_max only with CAP_NET_ADMIN outside of user
	// namespaces; else as much as there is.
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wantedSendBuffer) != nil {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wantedSendBuffer)
	}
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, wantedRecvBuffer) != nil {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, wantedRecvBuffer)
	}
	// Answers carry the header of the message they answer, not all of it.
	if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1); err != nil {
		return err
	}
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	tv := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	return unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
}

// Close releases the socket. A further call does nothing: the number may be another file's by then.
func (c *Conn) Close() error {
	fd := c.fd
	if c.fd = -1; fd < 0 {
		return nil
	}
	return unix.Close(fd)
}

// MaxMessage is how many bytes one Send may have.
func (c *Conn) MaxMessage() int {
	n, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return 64 << 10
	}
	return n - 4096 // the kernel's own share of the buffer
}

// Burst is how many answers of a page each the socket holds at once.
func (c *Conn) Burst() int {
	n, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return 1
	}
	return max(n/8192, 1)
}

// Error is the kernel's rejection of one message.
type Error struct {
	// Index is the position of the rejected message among those sent; -1 if the
	// kernel named none of them.
	Index int
	Errno unix.Errno
	// Text is the kernel's explanation, often empty.
	Text string
}

// Error returns the explanation and the errno's text.
func (e *Error) Error() string {
	if e.Text != "" {
		return e.Text + ": " + e.Errno.Error()
	}
	return e.Errno.Error()
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// number gives the messages in b their sequence numbers and returns the first
// and how many they are.
func (c *Conn) number(b []byte) (first uint32, n int) {
	first = c.seq + 1
	for len(b) >= headerLen {
		c.seq++
		n++
		binary.NativeEndian.PutUint32(b[8:], c.seq)
		size := int(binary.NativeEndian.Uint32(b))
		if size < headerLen {
			break // not a message; the kernel will report it
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return first, n
}

// Send sends the messages in b as one datagram and returns every rejection. At
// least one of the messages must ask for an answer (NLM_F_ACK). The kernel
// works before send returns, so all answers are there by then; if there is not
// even one, some were dropped and the error is ENOBUFS.
func (c *Conn) Send(b []byte) []error { return c.Ask(b, nil) }

// Ask is Send for messages that are answered by more than acknowledgements: f
// gets the body (behind nfgenmsg) of every other answer.
func (c *Conn) Ask(b []byte, f func(body []byte)) []error {
	c.drain()
	first, n := c.number(b)
	if err := c.write(b); err != nil {
		return []error{&Error{Index: -1, Errno: err.(unix.Errno)}} //nolint:errorlint // write returns Errno
	}
	var rejected []error
	answers := 0
	for {
		m, _, err := unix.Recvfrom(c.fd, c.buf, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EAGAIN:
			if answers == 0 {
				rejected = append(rejected, &Error{Index: -1, Errno: unix.ENOBUFS, Text: "no answer from the kernel"})
			}
			return rejected
		case err == unix.EINTR:
			continue
		case err != nil:
			answers++
			rejected = append(rejected, &Error{Index: -1, Errno: err.(unix.Errno)}) //nolint:errorlint // a syscall's error
			if err != unix.ENOBUFS {
				return rejected
			}
			continue
		}
		answers++
		messages(c.buf[:m], func(typ, _ uint16, seq uint32, body []byte) {
			if typ != unix.NLMSG_ERROR {
				if f != nil && seq-first < uint32(n) && len(body) >= genLen {
					f(body[genLen:])
				}
				return
			}
			if e := answer(body); e != nil {
				e.Index = int(int32(seq - first))
				if e.Index < 0 || e.Index >= n {
					e.Index = -1
				}
				rejected = append(rejected, e)
			}
		})
	}
}

// ErrInterrupted is the error of a Dump during which what it reads changed.
var ErrInterrupted = errors.New("the kernel's table changed while it was read")

// Dump sends the one message in b, which has NLM_F_DUMP, and calls f with the
// body (behind nfgenmsg) of each message of the answer. The body is valid
// until f returns.
func (c *Conn) Dump(b []byte, f func(body []byte)) error {
	c.drain()
	first, _ := c.number(b)
	if err := c.write(b); err != nil {
		return err
	}
	interrupted := false
	for {
		m, _, err := unix.Recvfrom(c.fd, c.buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("read a dump: %w", err)
		}
		done := false
		var failed error
		messages(c.buf[:m], func(typ, flags uint16, seq uint32, body []byte) {
			if seq != first || done {
				return
			}
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch typ {
			case unix.NLMSG_DONE:
				done = true
			case unix.NLMSG_ERROR:
				done = true
				if e := answer(body); e != nil {
					failed = e
				}
			default:
				if len(body) >= genLen {
					f(body[genLen:])
				}
			}
		})
		switch {
		case failed != nil:
			return failed
		case done && interrupted:
			return ErrInterrupted
		case done:
			return nil
		}
	}
}

// Events calls f with the type and the body (behind the first four bytes of its
// header, as Dump does) of each message that came by itself since the last call.
// It does not wait. An error that wraps unix.ENOBUFS means that some were dropped.
func (c *Conn) Events(f func(typ uint16, body []byte)) error {
	for {
		m, _, err := unix.Recvfrom(c.fd, c.buf, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EAGAIN:
			return nil
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("read events: %w", err)
		}
		messages(c.buf[:m], func(typ, _ uint16, _ uint32, body []byte) {
			if len(body) >= genLen {
				f(typ, body[genLen:])
			}
		})
	}
}

func (c *Conn) write(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err != unix.EINTR {
			return err
		}
	}
}

// drain throws away what an abandoned request left in the socket.
func (c *Conn) drain() {
	for {
		_, _, err := unix.Recvfrom(c.fd, c.buf, unix.MSG_DONTWAIT)
		if err == unix.EAGAIN || (err != nil && err != unix.EINTR && err != unix.ENOBUFS) {
			return
		}
	}
}

func messages(b []byte, f func(typ, flags uint16, seq uint32, body []byte)) {
	for len(b) >= headerLen {
		n := int(binary.NativeEndian.Uint32(b))
		if n < headerLen || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[headerLen:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// answer reads the body of an NLMSG_ERROR; nil is an acknowledgement. With
// NETLINK_CAP_ACK the attributes follow the rejected message's header at once.
func answer(body []byte) *Error {
	if len(body) < 4+headerLen {
		return &Error{Index: -1, Errno: unix.EPROTO}
	}
	code := int32(binary.NativeEndian.Uint32(body))
	if code == 0 {
		return nil
	}
	return &Error{Index: -1, Errno: unix.Errno(-code), Text: CString(Attr(body[4+headerLen:], unix.NLMSGERR_ATTR_MSG))}
}
