package testbed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// HasSCTP reports whether this kernel has SCTP sockets.
func HasSCTP() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err == nil
}

// listenSCTP opens a one-to-one style SCTP listener: to its user it is like
// one of TCP.
func listenSCTP(at netip.AddrPort) (net.Listener, error) {
	fd, sa, err := sctpSocket(at)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "sctp")
	defer func() { _ = f.Close() }()
	if err := unix.Bind(fd, sa); err != nil {
		return nil, fmt.Errorf("bind SCTP %s: %w", at, err)
	}
	if err := unix.Listen(fd, 64); err != nil {
		return nil, fmt.Errorf("listen on SCTP %s: %w", at, err)
	}
	return net.FileListener(f)
}

func dialSCTP(ctx context.Context, from, to netip.AddrPort) (net.Conn, error) {
	fd, sa, err := sctpSocket(to)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "sctp")
	defer func() { _ = f.Close() }()
	if from.IsValid() {
		if err := unix.Bind(fd, sockaddr(from)); err != nil {
			return nil, fmt.Errorf("bind SCTP %s: %w", from, err)
		}
	}
	// Without this an ICMP error, with which nodes refuse, is not told.
	for _, o := range [][2]int{{unix.IPPROTO_IP, unix.IP_RECVERR}, {unix.IPPROTO_IPV6, unix.IPV6_RECVERR}} {
		if o[0] == unix.IPPROTO_IPV6 && to.Addr().Is4() {
			continue
		}
		if err := unix.SetsockoptInt(fd, o[0], o[1], 1); err != nil {
			return nil, fmt.Errorf("ask for errors: %w", err)
		}
	}
	// An error that comes while the first packet is still being sent is lost; the
	// next one is sent after this time, not after 3 s.
	if err := unix.SetsockoptString(fd, unix.IPPROTO_SCTP, sctpRTOInfo, rtoInfo(200, 1000, 100)); err != nil {
		return nil, fmt.Errorf("set retransmission times: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	err = unix.Connect(fd, sa)
	if errors.Is(err, unix.EINPROGRESS) {
		err = connected(ctx, fd)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to SCTP %s: %w", to, err)
	}
	return net.FileConn(f)
}

// sctpRTOInfo is SCTP_RTOINFO of linux/sctp.h.
const sctpRTOInfo = 0

// rtoInfo is struct sctp_rtoinfo, of milliseconds.
func rtoInfo(initial, most, least uint32) string {
	var b []byte
	for _, v := range []uint32{0, initial, most, least} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return string(b)
}

// connected waits until a socket is connected, or will not be.
func connected(ctx context.Context, fd int) error {
	for {
		wait := -1
		if deadline, ok := ctx.Deadline(); ok {
			wait = max(0, int(time.Until(deadline).Milliseconds()))
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, wait)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return os.ErrDeadlineExceeded
		default:
			errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && errno != 0 {
				err = unix.Errno(errno)
			}
			return err
		}
	}
}

func sctpSocket(a netip.AddrPort) (int, unix.Sockaddr, error) {
	family := unix.AF_INET6
	if a.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return -1, nil, fmt.Errorf("open an SCTP socket: %w", err)
	}
	return fd, sockaddr(a), nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
