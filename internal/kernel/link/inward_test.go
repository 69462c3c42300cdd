package link_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// What root's processes of this machine send to one port of a Pod comes to a socket of this machine, which sees the Pod's
// address; other ports, and what Pods send, go to the Pod. Without a socket it is refused, and afterwards all is as before.
func TestInward(t *testing.T) {
	node(t)
	a, b := pod(t, 2), pod(t, 3)
	for _, addr := range a.Addrs {
		for _, port := range []uint16{7001, 7002} {
			listen(t, a.Netns, netip.AddrPortFrom(addr, port))
		}
	}
	defer func() { _ = link.CloseInward() }()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	leads := func(from string, to netip.AddrPort, want string) {
		t.Helper()
		if got, err := ask(from, to); err != nil || got != want {
			t.Errorf("from %s to %s: %q, %v; want %q", from, to, got, err, want)
		}
	}
	must(link.ProbeInward())
	must(link.SetInward(7009, a.Addrs)) // an earlier port
	must(link.SetInward(7001, a.Addrs))
	for i, addr := range a.Addrs {
		to := netip.AddrPortFrom(addr, 7001)
		if got, err := ask(self, to); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s without a socket: %q, %v, want refused", to, got, err)
		}
		accept(t, addr.Is4(), 7001)
		leads(self, to, "here for "+to.String())
		leads(self, netip.AddrPortFrom(addr, 7002), gateways[i].String())
		leads(b.Netns, to, b.Addrs[i].String())
	}
	must(link.SetInward(7001, nil))
	for i, addr := range a.Addrs {
		leads(self, netip.AddrPortFrom(addr, 7001), gateways[i].String())
	}
	must(link.SetInward(7001, a.Addrs))
	for range 2 {
		must(link.CloseInward())
	}
	if left := run(t, "", "nft", "list", "ruleset"); strings.Contains(left, "fairlead-drain") {
		t.Errorf("it leaves\n%s", left)
	}
}

// accept opens the socket of a server that answers each connection with the address that it was sent to.
func accept(t *testing.T, is4 bool, port uint16) {
	t.Helper()
	at := netip.AddrPortFrom(netip.IPv6Loopback(), port)
	if is4 {
		at = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
	}
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			to, err := socket.OriginalDestination(c.(*net.TCPConn))
			if err != nil {
				fmt.Fprint(c, err)
			}
			fmt.Fprint(c, "here for ", to)
			c.Close()
		}
	}()
}
