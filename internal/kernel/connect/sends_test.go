package connect

import (
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

// What is remembered of a socket that sends datagrams goes with it, however many come and go.
func TestSocketsLeaveNothing(t *testing.T) {
	cfg := Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)}
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
	defer func() { _ = server.Close() }()
	p, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	at := server.LocalAddr().(*net.UDPAddr).AddrPort()
	if err := p.PutSlots(1, []netip.AddrPort{at}); err != nil {
		t.Fatal(err)
	}
	if err := p.PutFront(Front{Addr: front, Protocol: unix.IPPROTO_UDP}, Route{List: [2]uint32{1}, Count: [2]uint32{1}}); err != nil {
		t.Fatal(err)
	}
	if err := p.Attach(); err != nil {
		t.Fatal(err)
	}
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
	for range 100_000 {
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
