package socket_test

import (
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

func TestPeerAndFiles(t *testing.T) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if pid, uid, err := socket.Peer(s); pid != os.Getpid() || uid != os.Geteuid() || err != nil {
		t.Errorf("Peer = %d, %d, %v", pid, uid, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, _, err := c.WriteMsgUnix([]byte("x"), socket.PackFiles(r, w), nil); err != nil {
		t.Fatal(err)
	}
	w.Close()
	buf, oob := make([]byte, 1), make([]byte, socket.FilesSpace(2))
	_, n, _, _, err := s.ReadMsgUnix(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	files, err := socket.UnpackFiles(oob[:n])
	if err != nil || len(files) != 2 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	defer files[0].Close()
	if _, err := files[1].WriteString("hello"); err != nil {
		t.Fatal(err)
	}
	files[1].Close()
	if b, err := io.ReadAll(files[0]); string(b) != "hello" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
	if socket.PackFiles() != nil {
		t.Error("a control message for no files")
	}
	if _, err := socket.UnpackFiles([]byte{1, 2, 3}); err != nil {
		t.Errorf("too short for a message: %v", err)
	}
}

// A socket may have an address that is not this machine's, and share it; what it
// answers leaves from the address that was asked.
func TestListenConfig(t *testing.T) {
	foreign := netip.MustParseAddrPort("192.0.2.77:0")
	lc := socket.ListenConfig(foreign, socket.Options{AnyAddress: true})
	l, err := lc.Listen(t.Context(), "tcp4", foreign.String())
	if err != nil {
		t.Fatalf("with AnyAddress: %v", err)
	}
	l.Close()
	for _, c := range []struct{ network, any, at string }{{"udp4", "0.0.0.0:0", "127.0.0.2"}, {"udp6", "[::]:0", "::1"}} {
		addr := netip.MustParseAddrPort(c.any)
		lc = socket.ListenConfig(addr, socket.Options{Shared: true, Destination: true})
		pc, err := lc.ListenPacket(t.Context(), c.network, c.any)
		if err != nil {
			t.Fatal(err)
		}
		defer pc.Close()
		conn := pc.(*net.UDPConn)
		asked := netip.AddrPortFrom(netip.MustParseAddr(c.at), conn.LocalAddr().(*net.UDPAddr).AddrPort().Port())
		second, err := lc.ListenPacket(t.Context(), c.network, netip.AddrPortFrom(addr.Addr(), asked.Port()).String())
		if err != nil {
			t.Fatalf("sharing the port: %v", err)
		}
		second.Close()
		client, err := net.DialUDP(c.network, nil, net.UDPAddrFromAddrPort(asked))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := client.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		buf, oob := make([]byte, 10), make([]byte, 100)
		_, n, _, from, err := conn.ReadMsgUDPAddrPort(buf, oob)
		if err != nil {
			t.Fatal(err)
		}
		control := socket.AnswerFrom(oob[:n])
		if control == nil {
			t.Fatal("no destination came with the datagram")
		}
		if _, _, err := conn.WriteMsgUDPAddrPort([]byte("y"), control, from); err != nil {
			t.Fatal(err)
		}
		// A connected socket drops what comes from any other address.
		if _, err := client.Read(buf); err != nil || buf[0] != 'y' {
			t.Errorf("%s: %q, %v", c.network, buf, err)
		}
	}
	if socket.AnswerFrom(nil) != nil {
		t.Error("an address out of nothing")
	}
}
