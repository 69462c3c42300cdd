package socket

import (
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Probe looks at a connection of TCP that is kept for later. It is used by one goroutine at a time.
type Probe struct {
	raw   syscall.RawConn
	look  func(fd uintptr)
	quiet bool
	buf   [1]byte
}

// NewProbe returns a Probe of c.
func NewProbe(c *net.TCPConn) (*Probe, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	p := &Probe{raw: raw}
	p.look = func(fd uintptr) {
		_, _, e := unix.Syscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&p.buf)), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
		p.quiet = e == unix.EAGAIN
	}
	return p, nil
}

// Quiet reports whether the other end has sent nothing that was not read: neither bytes nor the end.
func (p *Probe) Quiet() bool {
	p.quiet = false
	return p.raw.Control(p.look) == nil && p.quiet
}

// SetUserTimeout bounds how long what was sent may wait for its acknowledgement before the connection ends (TCP_USER_TIMEOUT, RFC
// 5482), and how long a receiver may keep its window closed; 0 for the system's bounds.
func SetUserTimeout(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	}); err != nil {
		return err
	}
	return failed
}

// UserTimeout returns what SetUserTimeout has set.
func UserTimeout(c *net.TCPConn) (d time.Duration, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	if err2 := raw.Control(func(fd uintptr) {
		n := 0
		n, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		d = time.Duration(n) * time.Millisecond
	}); err2 != nil {
		return 0, err2
	}
	return d, err
}

// Ended reports whether the other end of a connection of TCP has closed it, or at least its own direction.
func Ended(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	const established = 1 // TCP_ESTABLISHED of enum in include/net/tcp_states.h
	ended := true
	err = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		ended = err != nil || info.State != established
	})
	return err != nil || ended
}
