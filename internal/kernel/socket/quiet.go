package socket

import (
	"net"
	"syscall"
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
