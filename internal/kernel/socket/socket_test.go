package socket_test

import (
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

func TestTaken(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		tcp, err := net.Listen("tcp", addr)
		if err != nil {
			t.Skipf("no %s here: %v", addr, err)
		}
		at := tcp.Addr().(*net.TCPAddr).AddrPort()
		if addr == ":0" {
			at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
		}
		if !socket.Taken(svc.TCP, at) {
			t.Errorf("%s: the address is in use", at)
		}
		_ = tcp.Close()
		if socket.Taken(svc.TCP, at) {
			t.Errorf("%s: the address is free again", at)
		}
		udp, err := net.ListenPacket("udp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		if !socket.Taken(svc.UDP, at) || socket.Taken(svc.TCP, at) {
			t.Errorf("%s: the address is in use for UDP alone", at)
		}
		_ = udp.Close()
		if socket.Taken(svc.UDP, at) {
			t.Errorf("%s: the address is free for UDP again", at)
		}
	}
}

// Connections inherit the probes of their listener.
func TestKeepAliveIsInherited(t *testing.T) {
	lc := socket.ListenConfig(netip.MustParseAddrPort("127.0.0.1:0"), socket.Options{KeepAlive: true})
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	raw, err := got.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		for option, want := range map[[2]int]int{
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE}: 1, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}: 15, {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}: 15,
		} {
			if got, err := unix.GetsockoptInt(int(fd), option[0], option[1]); got != want || err != nil {
				t.Errorf("%v: %d, %v, want %d", option, got, err, want)
			}
		}
	})
}
