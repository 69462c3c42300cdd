// Package socket has what the net package does not do with sockets: to look for
// bound ones, and to move several datagrams with one system call.
package socket

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Taken reports whether some socket is bound to a TCP or UDP address of the
// network namespace of the calling thread, or to that port of all its addresses.
// It finds out by binding a socket that never listens and is closed at once; if
// that is not possible, it returns false.
func Taken(p svc.Protocol, at netip.AddrPort) bool {
	kind := unix.SOCK_STREAM
	if p == svc.UDP {
		kind = unix.SOCK_DGRAM
	} else if p != svc.TCP {
		return false
	}
	family := unix.AF_INET
	var to unix.Sockaddr = &unix.SockaddrInet4{Port: int(at.Port()), Addr: [4]byte(at.Addr().AsSlice()[:4])}
	if at.Addr().Is6() {
		family, to = unix.AF_INET6, &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	if p == svc.TCP {
		// Connections that have ended do not count.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	return errors.Is(unix.Bind(fd, to), unix.EADDRINUSE)
}
