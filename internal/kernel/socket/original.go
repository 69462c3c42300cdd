package socket

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// soOriginalDst is SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h).
const soOriginalDst = 80

// OriginalDestination returns the address that the other end of an accepted connection of TCP has called, where the kernel's
// connection tracking of this machine has translated it; an error where it knows no such connection.
func OriginalDestination(c *net.TCPConn) (to netip.AddrPort, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return to, err
	}
	local, _ := c.LocalAddr().(*net.TCPAddr)
	is4 := local != nil && local.AddrPort().Addr().Unmap().Is4()
	var failed error
	err = raw.Control(func(fd uintptr) {
		if is4 {
			var in *unix.IPv6Mreq // is as large as a sockaddr_in, and 4 bytes
			if in, failed = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); failed == nil {
				at := in.Multiaddr
				to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(at[4:8])), binary.BigEndian.Uint16(at[2:4]))
			}
			return
		}
		var in *unix.IPv6MTUInfo // begins with a sockaddr_in6
		if in, failed = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, soOriginalDst); failed == nil {
			port := binary.NativeEndian.AppendUint16(nil, in.Addr.Port)
			to = netip.AddrPortFrom(netip.AddrFrom16(in.Addr.Addr), binary.BigEndian.Uint16(port))
		}
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return to, fmt.Errorf("original destination: %w", err)
	}
	return to, nil
}
