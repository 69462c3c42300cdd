package socket

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxPassword is the longest TCP MD5 password in bytes (TCP_MD5SIG_MAXKEYLEN).
const MaxPassword = unix.TCP_MD5SIG_MAXKEYLEN

// DialOptions are the options of a client's TCP socket. Its method Control is a
// net.Dialer's.
type DialOptions struct {
	// Password signs every segment (RFC 2385). Segments without the signature, or with
	// that of another password, are dropped by both ends without an answer.
	Password string
	// TTL is the hop limit of packets, 0 for the system's.
	TTL int
	// Interface is the only one to be used, if any; SO_BINDTODEVICE.
	Interface string
}

// Control sets the options on a socket that will be connected to address.
func (o DialOptions) Control(_, address string, c syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	var failed error
	err = c.Control(func(fd uintptr) { failed = o.set(int(fd), to.Addr().Unmap()) })
	return errors.Join(err, failed)
}

func (o DialOptions) set(fd int, to netip.Addr) error {
	if o.Interface != "" {
		if err := unix.BindToDevice(fd, o.Interface); err != nil {
			return fmt.Errorf("bind to interface %s: %w", o.Interface, err)
		}
	}
	if o.TTL != 0 {
		level, name := unix.IPPROTO_IP, unix.IP_TTL
		if to.Is6() {
			level, name = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		if err := unix.SetsockoptInt(fd, level, name, o.TTL); err != nil {
			return os.NewSyscallError("setsockopt TTL", err)
		}
	}
	if o.Password == "" {
		return nil
	}
	if len(o.Password) > MaxPassword {
		return fmt.Errorf("the TCP MD5 password has %d bytes, and %d are the most", len(o.Password), MaxPassword)
	}
	// struct tcp_md5sig begins with a sockaddr: after the family, sockaddr_in has a
	// port of two bytes, sockaddr_in6 a port and four bytes of flow information.
	sig := unix.TCPMD5Sig{Keylen: uint16(len(o.Password))}
	sig.Addr.Family = unix.AF_INET
	at := 2
	if to.Is6() {
		sig.Addr.Family = unix.AF_INET6
		at = 6
	}
	copy(sig.Addr.Data[at:], to.AsSlice())
	copy(sig.Key[:], o.Password)
	return os.NewSyscallError("setsockopt TCP_MD5SIG", unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig))
}
