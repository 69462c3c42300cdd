package relay

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls that each connection makes, most of them several times. Package unix
// allocates memory for addresses, asks each accepted socket once more what it is,
// and notifies the Go scheduler of a call that might take long; what follows never
// waits, for all sockets are non-blocking.

// sockName is room for a socket's address as the kernel has it.
type sockName struct {
	raw  unix.RawSockaddrInet6 // or RawSockaddrInet4, which is shorter
	size uint32
}

// set makes n an address.
func (n *sockName) set(a netip.AddrPort) {
	port := (*[2]byte)(unsafe.Pointer(&n.raw.Port))
	binary.BigEndian.PutUint16(port[:], a.Port())
	if a.Addr().Is4() {
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&n.raw))
		v4.Family, v4.Addr, v4.Zero = unix.AF_INET, a.Addr().As4(), [8]uint8{}
		n.size = unix.SizeofSockaddrInet4
		return
	}
	n.raw.Family, n.raw.Addr = unix.AF_INET6, a.Addr().As16()
	n.raw.Flowinfo, n.raw.Scope_id = 0, 0
	n.size = unix.SizeofSockaddrInet6
}

// addr is the address in n, without its port.
func (n *sockName) addr() netip.Addr {
	if n.raw.Family == unix.AF_INET {
		return netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(&n.raw)).Addr)
	}
	return netip.AddrFrom16(n.raw.Addr)
}

// addrPort is the address in n.
func (n *sockName) addrPort() netip.AddrPort {
	port := (*[2]byte)(unsafe.Pointer(&n.raw.Port))
	return netip.AddrPortFrom(n.addr(), binary.BigEndian.Uint16(port[:]))
}

// accept takes a connection from a listener. Its client is in n then.
func (n *sockName) accept(listener int) (fd int, err error) {
	n.size = unix.SizeofSockaddrInet6
	return result(unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listener), uintptr(unsafe.Pointer(&n.raw)),
		uintptr(unsafe.Pointer(&n.size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0))
}

// connect begins to connect a socket to a.
func (n *sockName) connect(fd int, a netip.AddrPort) error {
	n.set(a)
	_, err := result(unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&n.raw)), uintptr(n.size)))
	return err
}

// readFrom and writeTo are for buffers that are not empty.
func readFrom(fd int, b []byte) (int, error) {
	return retry(func() (int, error) {
		return result(unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b))))
	})
}

func writeTo(fd int, b []byte) (int, error) {
	return retry(func() (int, error) {
		return result(unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b))))
	})
}

// send is writeTo for a socket, with flags.
func send(fd int, b []byte, flags int) (int, error) {
	return retry(func() (int, error) {
		return result(unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
			uintptr(flags|unix.MSG_NOSIGNAL), 0, 0))
	})
}

// result makes what a call returns an error of Go, if it is one.
func result(r, _ uintptr, e syscall.Errno) (int, error) {
	if e != 0 {
		return -1, e
	}
	return int(r), nil
}
