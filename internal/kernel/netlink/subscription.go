package netlink

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Subscription is a socket on which the kernel reports what happens to multicast
// groups of a netlink protocol, in the network namespace in which it was opened.
// Its methods may be called from several goroutines.
type Subscription struct {
	file *os.File
	raw  syscall.RawConn
	buf  []byte // of Receive
}

// Subscribe opens a Subscription to groups (unix.RTNLGRP_..., unix.NFNLGRP_...) of
// protocol, in the network namespace of the calling thread.
func Subscribe(protocol int, groups ...int) (*Subscription, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	s := &Subscription{file: os.NewFile(uintptr(fd), "netlink"), buf: make([]byte, 64<<10)}
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
		s.raw, err = s.file.SyscallConn()
	}
	for _, g := range groups {
		if err == nil {
			err = s.Join(g)
		}
	}
	if err != nil {
		_ = s.file.Close()
		return nil, fmt.Errorf("subscribe to netlink notifications: %w", err)
	}
	return s, nil
}

// Enlarge lets the socket hold as much as a Conn does, as far as the process may, for groups that report much in a short time.
func (s *Subscription) Enlarge() error {
	var err error
	e := s.raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, wantedRecvBuffer) != nil {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, wantedRecvBuffer)
		}
	})
	return errors.Join(e, err)
}

// Join subscribes to a group.
func (s *Subscription) Join(group int) error { return s.set(unix.NETLINK_ADD_MEMBERSHIP, group) }

// Leave ends the subscription to a group. With no subscriber left, the kernel
// does not prepare its messages.
func (s *Subscription) Leave(group int) error { return s.set(unix.NETLINK_DROP_MEMBERSHIP, group) }

func (s *Subscription) set(option, group int) error {
	var err error
	if e := s.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, option, group) }); e != nil {
		return e
	}
	return err
}

// Receive waits for messages and calls f with the type and the body of each. An
// error that wraps unix.ENOBUFS means that some were dropped and that Receive can
// be called again; after Close the error wraps os.ErrClosed. One goroutine
// receives at a time.
func (s *Subscription) Receive(f func(typ uint16, body []byte)) error {
	var n int
	var err error
	e := s.raw.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), s.buf, unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	switch {
	case errors.Is(e, os.ErrDeadlineExceeded):
		err = e
	case e != nil: // what package os does not export (poll.ErrFileClosing)
		err = os.ErrClosed
	}
	if err != nil {
		return fmt.Errorf("receive netlink notifications: %w", err)
	}
	messages(s.buf[:n], func(typ, _ uint16, _ uint32, body []byte) { f(typ, body) })
	return nil
}

// Pending calls f with the type and the body of each message that has come by now. It does not wait; its errors are those of
// Receive.
func (s *Subscription) Pending(f func(typ uint16, body []byte)) error {
	for {
		var n int
		var err error
		if e := s.raw.Control(func(fd uintptr) { n, _, err = unix.Recvfrom(int(fd), s.buf, unix.MSG_DONTWAIT) }); e != nil {
			return os.ErrClosed
		}
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("receive netlink notifications: %w", err)
		}
		messages(s.buf[:n], func(typ, _ uint16, _ uint32, body []byte) { f(typ, body) })
	}
}

// Ask sends the one message in b, which has NLM_F_ACK, and returns the kernel's rejection, an *Error. It is called before the first
// Receive.
func (s *Subscription) Ask(b []byte) error {
	var err error
	if e := s.raw.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return !errors.Is(err, unix.EINTR)
	}); e != nil || err != nil {
		return errors.Join(e, err)
	}
	if err := s.file.SetReadDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	var rejected error
	for answered := false; !answered; {
		err := s.Receive(func(typ uint16, body []byte) {
			if typ != unix.NLMSG_ERROR {
				return
			}
			answered = true
			if e := answer(body); e != nil {
				rejected = e
			}
		})
		if err != nil {
			return err
		}
	}
	return errors.Join(rejected, s.file.SetReadDeadline(time.Time{}))
}

// maxDiscard bounds the datagrams that one Discard reads: the receive buffer holds fewer.
const maxDiscard = 1 << 14

// Discard throws away what has come and was not received, and returns how many datagrams that were.
func (s *Subscription) Discard() (n int) {
	_ = s.raw.Control(func(fd uintptr) {
		var none [1]byte
		for n < maxDiscard {
			_, _, err := unix.Recvfrom(int(fd), none[:], unix.MSG_DONTWAIT|unix.MSG_TRUNC)
			switch {
			case err == nil:
				n++
			case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS):
			default:
				return
			}
		}
	})
	return n
}

// Close releases the socket and ends a Receive.
func (s *Subscription) Close() error { return s.file.Close() }
