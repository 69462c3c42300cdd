package connect

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Each endpoint of a list of several entries is read back, is chosen by the programs and by Choose, and leaves nothing.
func TestEndpointsInBlocks(t *testing.T) {
	p, _ := attached(t)
	before := slotsOf(t, p)
	for _, c := range []struct{ network, loopback, front string }{
		{"tcp4", "127.0.0.1:0", "10.96.0.9:80"}, {"tcp6", "[::1]:0", "[fd00:10:96::9]:80"},
	} {
		front, taken := netip.MustParseAddrPort(c.front), make(chan netip.AddrPort)
		var all []netip.AddrPort
		for range inBlock4 + 3 {
			l, err := net.Listen(c.network, c.loopback)
			if err != nil {
				t.Fatal(err)
			}
			at := l.Addr().(*net.TCPAddr).AddrPort()
			all = append(all, at)
			testbed.Serve(t, l, func(net.Conn) { taken <- at })
		}
		if err := p.PutSlots(7, all); err != nil {
			t.Fatal(err)
		}
		r := Route{List: [2]uint32{7}, Count: [2]uint32{uint32(len(all))}}
		if err := p.PutFront(Front{Addr: front, Protocol: unix.IPPROTO_TCP}, r); err != nil {
			t.Fatal(err)
		}
		if got := slotsOf(t, p)[7]; !slices.Equal(got, all) {
			t.Errorf("%s: the slots have %v, want %v", c.network, got, all)
		}
		met, chosen := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
		// Not to meet one of them in so many tries is less likely than 1 in 10^20.
		for range 1000 {
			conn, err := net.DialTimeout(c.network, c.front, 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			select {
			case at := <-taken:
				met[at] = true
			case <-time.After(10 * time.Second):
				t.Fatal("no endpoint has the connection")
			}
			_ = conn.Close()
			to, err := p.Choose(&Attempt{Front: front, namespace: p.cookie})
			if err != nil {
				t.Fatal(err)
			}
			chosen[to] = true
		}
		for _, at := range all {
			if !met[at] || !chosen[at] {
				t.Errorf("%s: %s is met %v, chosen %v, want both", c.network, at, met[at], chosen[at])
			}
		}
		if len(chosen) > len(all) {
			t.Errorf("%s: %d endpoints are chosen of %d", c.network, len(chosen), len(all))
		}
		if err := p.DelFront(Front{Addr: front, Protocol: unix.IPPROTO_TCP}); err != nil {
			t.Fatal(err)
		}
		if err := p.DelSlots(7, all); err != nil {
			t.Fatal(err)
		}
		if got := slotsOf(t, p); len(got) != len(before) {
			t.Errorf("%s: slots are left: %v", c.network, got)
		}
	}
}

// A socket of IPv6 that connects with an address of IPv4 meets an endpoint beyond the first block.
func TestMappedSocketMeetsSecondBlock(t *testing.T) {
	p, _ := attached(t)
	front := netip.MustParseAddrPort("10.96.0.9:80")
	all := make([]netip.AddrPort, inBlock4)
	for i := range all {
		all[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 1) // nobody listens there
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	testbed.Serve(t, l, func(net.Conn) {})
	all = append(all, l.Addr().(*net.TCPAddr).AddrPort())
	if err := p.PutSlots(7, all); err != nil {
		t.Fatal(err)
	}
	r := Route{List: [2]uint32{7}, Count: [2]uint32{uint32(len(all))}}
	if err := p.PutFront(Front{Addr: front, Protocol: unix.IPPROTO_TCP}, r); err != nil {
		t.Fatal(err)
	}
	to := &unix.SockaddrInet6{Addr: front.Addr().As16(), Port: int(front.Port())}
	for range 2000 {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 10}), unix.Connect(fd, to))
		_ = unix.Close(fd)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	t.Error("the endpoint in the second block is never chosen")
}

// What is left of a list of which another program took entries is read with its holes, is chosen from without a refusal, and can
// be removed, as can entries with nothing in them.
func TestBrokenLists(t *testing.T) {
	p, _ := attached(t)
	entries := func() (n int) {
		if err := each(p.maps.Slots, func(*programSlotKey, *programBlock) { n++ }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := entries()
	nothing := programSlotKey{List: 8, Block: 1}
	if err := p.maps.Slots.Put(&nothing, &programBlock{Six: 1}); err != nil {
		t.Fatal(err)
	}
	if err := p.DelSlots(8, slotsOf(t, p)[8]); err != nil || entries() != before {
		t.Errorf("an empty entry: %d are left, want %d: %v", entries(), before, err)
	}
	for _, front := range []netip.AddrPort{netip.MustParseAddrPort("10.96.0.9:80"), netip.MustParseAddrPort("[fd00:10:96::9]:80")} {
		all := make([]netip.AddrPort, 2*inBlock4)
		for i := range all {
			all[i] = netip.AddrPortFrom(front.Addr(), uint16(i+1))
		}
		if err := p.PutSlots(7, all); err != nil {
			t.Fatal(err)
		}
		in := int(inBlock(front.Addr().Is6()))
		empty := &programBlock{}
		if in == inBlock6 {
			empty.Six = 1
		}
		last := programSlotKey{List: 7, Block: uint32(len(all)/in - 1)}
		if err := errors.Join(p.maps.Slots.Delete(&programSlotKey{List: 7}), p.maps.Slots.Put(&last, empty)); err != nil {
			t.Fatal(err)
		}
		got := slotsOf(t, p)[7]
		want := slices.Clone(all[:len(all)-in+1])
		clear(want[:in])
		want[len(want)-1] = netip.AddrPort{}
		if !slices.Equal(got, want) {
			t.Errorf("%s: read are %v, want %v", front, got, want)
		}
		r := Route{List: [2]uint32{7}, Count: [2]uint32{uint32(len(all))}}
		if err := p.PutFront(Front{Addr: front, Protocol: unix.IPPROTO_TCP}, r); err != nil {
			t.Fatal(err)
		}
		for range 100 {
			at, err := p.Choose(&Attempt{Front: front, namespace: p.cookie})
			if err != nil || at != (netip.AddrPort{}) && !slices.Contains(all, at) {
				t.Fatalf("%s: chosen is %s, %v", front, at, err)
			}
		}
		if err := p.DelFront(Front{Addr: front, Protocol: unix.IPPROTO_TCP}); err != nil {
			t.Fatal(err)
		}
		if err := p.DelSlots(7, got); err != nil || entries() != before {
			t.Errorf("%s: %d entries are left, want %d: %v", front, entries(), before, err)
		}
	}
}

// slotsOf returns what the map has, by list.
func slotsOf(t *testing.T, p *Programs) map[uint32][]netip.AddrPort {
	t.Helper()
	out := map[uint32][]netip.AddrPort{}
	err := p.Slots(func(list, slot uint32, at netip.AddrPort) {
		for len(out[list]) <= int(slot) {
			out[list] = append(out[list], netip.AddrPort{})
		}
		out[list][slot] = at
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
