package socket_test

import (
	"net"
	"net/netip"
	"testing"

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
