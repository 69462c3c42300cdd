// Package packet sends and receives whole Ethernet frames of one protocol at one
// interface (packet(7)). It needs CAP_NET_RAW.
package packet

import (
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Numbers of protocols for Listen.
const (
	ARP  = unix.ETH_P_ARP
	IPv6 = unix.ETH_P_IPV6
)

// Conn is a socket for the frames of one protocol at one interface, of the network
// namespace of the thread that opened it. It is safe for concurrent use, but for
// Join, Leave and AllMulticast.
type Conn struct {
	file  *os.File
	raw   syscall.RawConn
	index int
	// groups is a socket that joins groups of IPv6, -1 before the first.
	groups int
}

// Listen opens a Conn. With protocol IPv6 it receives neighbour solicitations and
// advertisements (RFC 4861) only.
func Listen(index int, protocol uint16) (*Conn, error) {
	// Without a protocol it receives nothing before it is bound and has its filter.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	if protocol == IPv6 {
		if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, neighbours()); err != nil {
			_ = unix.Close(fd)
			return nil, fmt.Errorf("filter a packet socket: %w", err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol<<8 | protocol>>8, Ifindex: index}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("bind a packet socket to interface %d: %w", index, err)
	}
	file := os.NewFile(uintptr(fd), "packet")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return &Conn{file: file, raw: raw, index: index, groups: -1}, nil
}

// neighbours is a filter of classic BPF: next header 58 (ICMPv6) and type 135 or 136,
// without extension headers, which RFC 6980 forbids the kernel's peers as fragments.
func neighbours() *unix.SockFprog {
	const (
		ethernet = 14
		header   = 40
	)
	code := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: ethernet + 6},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 4, K: unix.IPPROTO_ICMPV6},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: ethernet + header},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: 135},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: 136},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	return &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
}

// Receive waits for a frame and returns its length. A frame that is longer than buf is
// cut. After Close it returns os.ErrClosed, and syscall.ENETDOWN when the interface
// goes down.
func (c *Conn) Receive(buf []byte) (n int, err error) {
	waitErr := c.raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), buf)
		return err != unix.EAGAIN && err != unix.EINTR
	})
	if waitErr != nil { // os.ErrInvalid or an internal one of package poll
		return 0, os.ErrClosed
	}
	return n, err
}

// Send sends a frame. It does not wait: if the interface's queue is full, the frame
// is lost and the error is syscall.ENOBUFS.
func (c *Conn) Send(frame []byte) (err error) {
	controlErr := c.raw.Control(func(fd uintptr) { _, err = unix.Write(int(fd), frame) })
	if controlErr != nil {
		return controlErr
	}
	return err
}

// Join makes the interface receive packets to a multicast group of IPv6, and
// the network send it there (RFC 3810).
func (c *Conn) Join(group netip.Addr) error {
	if c.groups < 0 {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a socket for multicast: %w", err)
		}
		c.groups = fd
	}
	return unix.SetsockoptIPv6Mreq(c.groups, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, c.member(group))
}

// Leave undoes Join.
func (c *Conn) Leave(group netip.Addr) error {
	return unix.SetsockoptIPv6Mreq(c.groups, unix.IPPROTO_IPV6, unix.IPV6_LEAVE_GROUP, c.member(group))
}

func (c *Conn) member(group netip.Addr) *unix.IPv6Mreq {
	return &unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(c.index)}
}

// AllMulticast makes the interface receive all multicast until Close: for more
// groups than a socket may join.
func (c *Conn) AllMulticast() (err error) {
	controlErr := c.raw.Control(func(fd uintptr) {
		err = unix.SetsockoptPacketMreq(int(fd), unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP,
			&unix.PacketMreq{Ifindex: int32(c.index), Type: unix.PACKET_MR_ALLMULTI})
	})
	if controlErr != nil {
		return controlErr
	}
	return err
}

// Close releases the socket and wakes Receive.
func (c *Conn) Close() error {
	if c.groups >= 0 {
		_ = unix.Close(c.groups)
		c.groups = -1
	}
	return c.file.Close()
}
