package connect

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// sends is how many sockets of UDP TestSocketsLeaveNothing opens, sends with, and closes: go test … -args -sends 10000000
//
//nolint:gochecknoglobals // a flag
var sends = flag.Int("sends", 100_000, "sockets that send and are closed")

// attached has programs attached, with a Service of UDP at front whose endpoint is the returned socket.
func attached(t *testing.T) (*Programs, *net.UDPConn) {
	t.Helper()
	cfg := Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)}
	server := listenLocal(t)
	p, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	at := server.LocalAddr().(*net.UDPAddr).AddrPort()
	if err := serveUDP(p, at); err != nil {
		t.Fatal(err)
	}
	if err := p.Attach(); err != nil {
		t.Fatal(err)
	}
	return p, server
}

// listenLocal is a socket of UDP on the loopback device, which it sets up.
func listenLocal(t *testing.T) *net.UDPConn {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatal(err)
	}
	server, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	return server
}

// Clients that connect sockets until there is no room leave the others to the packet filter, and the sockets of which
// nothing is left make room again.
func TestNoRoomForConnectedSockets(t *testing.T) {
	p, server := attached(t)
	connects := func() error {
		c, err := net.Dial("udp4", front.String())
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_, _, err = server.ReadFromUDPAddrPort(make([]byte, 8))
		return err
	}
	if err := connects(); err != nil {
		t.Fatal(err)
	}
	room := int(p.maps.Sockets.MaxEntries())
	cookies, closed := make([]uint64, room), make([]programConnected, room)
	for i := range cookies {
		cookies[i] = 1<<60 + uint64(i)
	}
	if _, err := p.maps.Sockets.BatchUpdate(cookies, closed, nil); err != nil {
		t.Fatal(err)
	}
	if err := connects(); !errors.Is(err, unix.ENETUNREACH) { // there is no packet filter here, and no route to the Service
		t.Errorf("without room: %v, want an untranslated address", err)
	}
	if n, err := p.EndSockets(func(_, _ netip.AddrPort) bool { return true }); n != 0 || err != nil {
		t.Errorf("all may stay: %d ended, %v", n, err)
	}
	if n, err := p.EndSockets(func(_, _ netip.AddrPort) bool { return false }); n != 0 || err != nil {
		t.Errorf("all are gone: %d ended, %v", n, err)
	}
	if err := connects(); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// What is remembered of a socket that sends datagrams goes with it, however many come and go.
func TestSocketsLeaveNothing(t *testing.T) {
	p, server := attached(t)
	to := &unix.SockaddrInet4{Addr: front.Addr().As4(), Port: int(front.Port())}
	send := func() int {
		fd := open(t)
		if err := unix.Sendto(fd, []byte("x"), 0, to); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	held := send()
	defer func() { _ = unix.Close(held) }()
	if n, _, err := server.ReadFromUDPAddrPort(make([]byte, 8)); err != nil || n != 1 {
		t.Fatalf("the endpoint received %d bytes: %v", n, err)
	}
	if !remembered(t, p, held) {
		t.Fatal("a socket that has sent to a Service is not remembered")
	}
	before := sockets(t)
	for range *sends {
		_ = unix.Close(send())
	}
	fresh := open(t)
	if remembered(t, p, fresh) {
		t.Error("a new socket is remembered")
	}
	_ = unix.Close(fresh)
	testbed.Until(t, "the closed sockets to be gone", func() error {
		if n := sockets(t); n > before {
			return fmt.Errorf("%d sockets, %d before", n, before)
		}
		return nil
	})
}

// open is a new socket.
func open(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// remembered reports whether the programs have storage for a socket: from user space its key is the descriptor.
func remembered(t *testing.T, p *Programs, fd int) bool {
	t.Helper()
	value, err := p.maps.Sends.LookupBytes(int32(fd))
	if err != nil {
		t.Fatal(err)
	}
	return value != nil
}

// sockets is how many sockets of UDP the network namespace has, which are what storage belongs to.
func sockets(t *testing.T) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/thread-self/net/sockstat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "UDP: inuse ")
	if _, err := fmt.Sscan(rest, &n); err != nil {
		t.Fatal(err)
	}
	return n
}
