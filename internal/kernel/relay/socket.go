package relay

import (
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

func domain(f svc.Family) int {
	if f == svc.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// reset closes a TCP socket so that its peer gets a reset.
func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	_ = unix.Close(fd)
}

// retry calls f until no signal interrupts it.
func retry(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if !is(err, unix.EINTR) {
			return n, err
		}
	}
}

// noFiles reports whether err is for want of something that ended connections give
// back.
func noFiles(err error) bool {
	return is(err, unix.EMFILE) || is(err, unix.ENFILE) || is(err, unix.ENOBUFS) || is(err, unix.ENOMEM)
}

// is compares what a system call returned, which is never wrapped, without the
// cost of errors.Is.
func is(err error, e syscall.Errno) bool {
	got, ok := err.(syscall.Errno) //nolint:errorlint // see above
	return ok && got == e
}
