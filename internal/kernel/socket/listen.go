package socket

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Options are the options of a server's socket.
type Options struct {
	// AnyAddress allows an address that is not this machine's (yet).
	AnyAddress bool
	// Transparent is AnyAddress for a socket that also gets packets for other addresses, which a rule of the packet filter
	// leads to it (TPROXY). It needs CAP_NET_ADMIN.
	Transparent bool
	// Shared allows several sockets of one user with the same address; the kernel
	// spreads what comes in among them (SO_REUSEPORT).
	Shared bool
	// Destination has each datagram come with a control message of the address that
	// it was sent to; AnswerFrom makes use of it.
	Destination bool
	// KeepAlive has the kernel probe the peers of silent connections, every 15 seconds, and has them inherit that from the
	// listener: to set it for each costs four system calls.
	KeepAlive bool
}

// ListenConfig returns what opens a socket on addr.
func ListenConfig(addr netip.AddrPort, o Options) net.ListenConfig {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var errs []error
		err := c.Control(func(fd uintptr) {
			set := func(on bool, level, option int) {
				if on {
					errs = append(errs, unix.SetsockoptInt(int(fd), level, option, 1))
				}
			}
			is4 := addr.Addr().Is4()
			set(o.AnyAddress && is4, unix.IPPROTO_IP, unix.IP_FREEBIND)
			set(o.AnyAddress && !is4, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND)
			set(o.Transparent && is4, unix.IPPROTO_IP, unix.IP_TRANSPARENT)
			set(o.Transparent && !is4, unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT)
			set(o.Shared, unix.SOL_SOCKET, unix.SO_REUSEPORT)
			set(o.Destination && is4, unix.IPPROTO_IP, unix.IP_PKTINFO)
			set(o.Destination && !is4, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO)
			set(o.KeepAlive, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
			if o.KeepAlive {
				errs = append(errs, unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveSeconds),
					unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveSeconds))
			}
		})
		return errors.Join(append(errs, err)...)
	}}
	if o.KeepAlive {
		lc.KeepAlive = -1 // package net would do it for each connection
	}
	return lc
}

// keepAliveSeconds are as of package net.
const keepAliveSeconds = 15

// Share lets further sockets with Options.Shared have the address that c, of UDP or TCP, is bound to,
// if they are of the same user: SO_REUSEPORT after bind(2). The kernel spreads what
// comes in among them and c from the first one that joins (Linux 4.5,
// reuseport_add_sock). In this way c has been the only one of its address for a moment.
// It returns an error if c, a net.Listener or a net.PacketConn, has no socket.
func Share(c any) error {
	s, ok := c.(syscall.Conn)
	if !ok {
		return fmt.Errorf("%T is not a socket", c)
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	return errors.Join(err, os.NewSyscallError("setsockopt SO_REUSEPORT", failed))
}

// AcceptAll returns the connections that wait to be accepted. With an error it returns the connections before it.
func AcceptAll(l *net.TCPListener) ([]net.Conn, error) {
	raw, err := l.SyscallConn()
	if err != nil {
		return nil, err
	}
	var out []net.Conn
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			n, _, err := unix.Accept4(int(fd), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			switch {
			case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
				continue
			case errors.Is(err, unix.EAGAIN):
				return
			case err != nil:
				failed = os.NewSyscallError("accept4", err)
				return
			}
			f := os.NewFile(uintptr(n), "accepted")
			c, err := net.FileConn(f)
			if err = errors.Join(err, f.Close()); err != nil {
				failed = err
				return
			}
			out = append(out, c)
		}
	})
	return out, errors.Join(err, failed)
}

// AnswerFrom turns the control message with the address that a datagram was sent
// to into one that makes the answer leave from there, nil if there is none. It
// works in place: in_pktinfo has the address to send from in the middle,
// in6_pktinfo at the beginning; the interface is left to routing.
func AnswerFrom(control []byte) []byte {
	msgs, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			clear(m.Data[:4]) // ipi_ifindex
			return control
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			if !(m.Data[0] == 0xfe && m.Data[1]&0xc0 == 0x80) { // link-local needs its interface
				clear(m.Data[16:20])
			}
			return control
		}
	}
	return nil
}
