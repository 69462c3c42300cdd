package link_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/testbed"
)

// checked are Sources of the test's namespace, which signal changes by others.
func checked(t *testing.T) (*link.Sources, <-chan struct{}) {
	t.Helper()
	changed := make(chan struct{}, 1)
	s, err := link.NewSources(func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, changed
}

// senders are the ways in which a process sends a datagram from an address that its machine need not have.
var senders = map[string]func(from, to netip.AddrPort, text string) error{"freebind": sendFreebind, "raw": sendRaw}

// sendFreebind needs no right for IPv6 and IPv4: IPV6_FREEBIND and IP_FREEBIND are open to all.
func sendFreebind(from, to netip.AddrPort, text string) error {
	level, option, family := unix.SOL_IP, unix.IP_FREEBIND, unix.AF_INET
	if from.Addr().Is6() {
		level, option, family = unix.SOL_IPV6, unix.IPV6_FREEBIND, unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return err
	}
	if err := unix.Bind(fd, sockaddr(from)); err != nil {
		return err
	}
	return unix.Sendto(fd, []byte(text), 0, sockaddr(to))
}

// sendRaw writes the IP header by itself, as root of a privileged Pod can.
func sendRaw(from, to netip.AddrPort, text string) error {
	udp := binary.BigEndian.AppendUint16(nil, from.Port())
	udp = binary.BigEndian.AppendUint16(udp, to.Port())
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(text)))
	udp = append(append(udp, 0, 0), text...)
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	family, packet := unix.AF_INET, []byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	if from.Addr().Is6() {
		family, packet = unix.AF_INET6, []byte{0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64}
		sum := uint32(unix.IPPROTO_UDP) + uint32(len(udp)) // UDP over IPv6 needs the checksum
		whole := slices.Concat(src, dst, udp)
		if len(whole)%2 == 1 {
			whole = append(whole, 0)
		}
		for i := 0; i < len(whole); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(whole[i:]))
		}
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		binary.BigEndian.PutUint16(udp[6:], ^uint16(sum))
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.Sendto(fd, slices.Concat(packet, src, dst, udp), 0, sockaddr(netip.AddrPortFrom(to.Addr(), 0)))
}

func sockaddr(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}
	}
	return &unix.SockaddrInet6{Addr: at.Addr().As16(), Port: int(at.Port())}
}

// receiver is a socket that receives datagrams in ns.
func receiver(t *testing.T, ns string, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	err := netns.Do(ns, func() (err error) { c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)); return err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// reach sends until something arrives: a device that is new drops what it is given before the kernel has activated it.
func reach(t *testing.T, c *net.UDPConn, send func(text string) error) {
	t.Helper()
	testbed.Until(t, "the first datagram at "+c.LocalAddr().String(), func() error {
		if err := send("first"); err != nil {
			return err
		}
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err := c.Read(make([]byte, 100))
		return err
	})
}

// received are the datagrams up to the one called "last", with their sources, without the ones of reach.
func received(t *testing.T, c *net.UDPConn) (out []string) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	buf := make([]byte, 100)
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			t.Fatalf("%v; before that came %q", err, out)
		}
		if string(buf[:n]) == "last" {
			return out
		}
		if text := string(buf[:n]); text != "first" {
			out = append(out, text+" from "+from.Addr().Unmap().String())
		}
	}
}

// What a Pod sends with a source that is not its own reaches no other Pod, not the node, and nothing beyond it. That
// holds without rp_filter, and is put back when another program removes it.
func TestForgedSources(t *testing.T) {
	node(t)
	out := outside(t)
	s, changed := checked(t)
	if err := link.ProbeSources(); err != nil {
		t.Error(err)
	}
	if left := run(t, "", "nft", "list", "ruleset"); left != "" {
		t.Errorf("the probe has left\n%s", left)
	}
	addrs := func(n string) []netip.Addr {
		return []netip.Addr{netip.MustParseAddr("10.244.1." + n), netip.MustParseAddr("fd00:10:244:1::" + n)}
	}
	s.Adopt("fltest3", addrs("3"))
	if err := s.Add("fltest2", addrs("2")); err != nil {
		t.Fatal(err)
	}
	a, b := pod(t, 2), pod(t, 3)
	for _, name := range []string{"all", a.Device} {
		if err := sysctl.Write("net/ipv4/conf/"+name+"/rp_filter", "0"); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = sysctl.Write("net/ipv4/conf/all/rp_filter", "0") })
	targets := map[string][]netip.AddrPort{b.Netns: nil, self: nil, out: nil}
	for ns, texts := range map[string][]string{
		b.Netns: {"10.244.1.3", "fd00:10:244:1::3"}, self: {"10.244.1.1", "fd00:10:244:1::1"}, out: {"192.0.2.2", "2001:db8::2"},
	} {
		for _, text := range texts {
			targets[ns] = append(targets[ns], netip.AddrPortFrom(netip.MustParseAddr(text), 7000))
		}
	}
	foreign := [][]string{ // by family: another Pod's, the node's, an outside host's, nobody's
		{"10.244.1.77", "10.244.1.1", "192.0.2.2", "203.0.113.9"}, {"fd00:10:244:1::77", "fd00:10:244:1::1", "2001:db8::2", "2001:db8:ffff::9"},
	}
	attack := func(t *testing.T) {
		t.Helper()
		for ns, ats := range targets {
			for i, at := range ats {
				r := receiver(t, ns, at)
				own := netip.AddrPortFrom(a.Addrs[i], 7001)
				reach(t, r, func(text string) error {
					return netns.Do(a.Netns, func() error { return sendFreebind(own, at, text) })
				})
				if err := netns.Do(a.Netns, func() error {
					for name, send := range senders {
						for _, from := range foreign[i] {
							// The Pod's own kernel may refuse an address of its peer's.
							_ = send(netip.AddrPortFrom(netip.MustParseAddr(from), 7001), at, name+" forged")
						}
						if err := send(own, at, name); err != nil {
							return err
						}
					}
					return sendFreebind(own, at, "last")
				}); err != nil {
					t.Fatal(err)
				}
				got := received(t, r)
				slices.Sort(got)
				if want := []string{"freebind from " + a.Addrs[i].String(), "raw from " + a.Addrs[i].String()}; !slices.Equal(got, want) {
					t.Errorf("%s got %q, want %q", at, got, want)
				}
				_ = r.Close()
			}
		}
	}
	attack(t)
	if counts, err := s.Forged(); err != nil || counts[a.Device] < 24 || counts[b.Device] != 0 {
		t.Errorf("counted %v, %v; want at least 24 of %s alone", counts, err, a.Device)
	}
	run(t, "", "nft", "flush", "ruleset")
	select {
	case <-changed:
	case <-time.After(30 * time.Second):
		t.Error("not told that the rules were removed")
	}
	for _, tamper := range []string{"", "delete element ip6 fairlead-sources pods { \"fltest2\" }", "flush chain ip fairlead-sources pod"} {
		if tamper != "" {
			run(t, tamper, "nft", "-f", "-")
		}
		if repaired, err := s.Repair(); !repaired || err != nil {
			t.Errorf("after %q: repaired %v, %v", tamper, repaired, err)
		}
	}
	if repaired, err := s.Repair(); repaired || err != nil {
		t.Errorf("repaired without a change: %v, %v", repaired, err)
	}
	attack(t)
	for range 2 {
		if err := s.Remove(a.Device); err != nil {
			t.Error(err)
		}
	}
	for _, set := range []string{"pods", "own"} {
		left := run(t, "", "nft", "list", "set", "ip6", "fairlead-sources", set)
		if strings.Contains(left, a.Device) || !strings.Contains(left, b.Device) {
			t.Errorf("after the end of one of two pods:\n%s", left)
		}
	}
	for range 2 {
		if err := link.RemoveSources(); err != nil {
			t.Error(err)
		}
	}
	if left := run(t, "", "nft", "list", "ruleset"); left != "" {
		t.Errorf("left:\n%s", left)
	}
}

// linkLocalOf is the address in the output of ip, once duplicate address detection is over.
func linkLocalOf(t *testing.T, command []string) netip.Addr {
	t.Helper()
	out := ""
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		out = run(t, "", command[0], command[1:]...)
		f := strings.Fields(out)
		if i := slices.Index(f, "inet6"); i >= 0 && !strings.Contains(out, "tentative") {
			return netip.MustParsePrefix(f[i+1]).Addr()
		}
	}
	t.Fatalf("no link-local address in\n%s", out)
	return netip.Addr{}
}

// Neighbour and duplicate address detection work, and what the Pod sends from its link-local address.
func TestLinkLocalSources(t *testing.T) {
	node(t)
	s, _ := checked(t)
	if err := s.Add("fltest2", []netip.Addr{netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("fd00:10:244:1::2")}); err != nil {
		t.Fatal(err)
	}
	a := pod(t, 2)
	list := []string{"ip", "-o", "-6", "addr", "show", "scope", "link", "dev"}
	from := linkLocalOf(t, append([]string{"nsenter", "--net=" + a.Netns}, append(list, "eth0")...))
	to := linkLocalOf(t, append(list, a.Device))
	dev, err := net.InterfaceByName(a.Device) // package net keeps the indexes of names for a minute
	if err != nil {
		t.Fatal(err)
	}
	zone := strconv.Itoa(dev.Index)
	r := receiver(t, self, netip.AddrPortFrom(to.WithZone(zone), 7000))
	send := func(from netip.Addr, text string) {
		t.Helper()
		if err := netns.Do(a.Netns, func() error {
			eth, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer func() { _ = unix.Close(fd) }()
			zone := uint32(eth.Index)
			_ = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_FREEBIND, 1)
			if err := unix.Bind(fd, &unix.SockaddrInet6{Addr: from.As16(), Port: 7001, ZoneId: zone}); err != nil {
				return err
			}
			return unix.Sendto(fd, []byte(text), 0, &unix.SockaddrInet6{Addr: to.As16(), Port: 7000, ZoneId: zone})
		}); err != nil {
			t.Fatalf("from %s to %s: %v", from, to, err)
		}
	}
	send(netip.MustParseAddr("fe80::bad"), "forged")
	send(from, "own")
	send(from, "last")
	if got := received(t, r); len(got) != 1 || !strings.HasPrefix(got[0], "own from "+from.String()) {
		t.Errorf("got %q, want what came from %s", got, from)
	}
	// Another address of the Pod's link answers a neighbour solicitation, though it is not in the set.
	run(t, "", "nsenter", "--net="+a.Netns, "ip", "addr", "add", "fe80::99/64", "dev", "eth0", "nodad")
	inside := ""
	if err := netns.Do(a.Netns, func() error {
		eth, err := net.InterfaceByName("eth0")
		if err == nil {
			inside = strconv.Itoa(eth.Index)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	other := netip.AddrPortFrom(netip.MustParseAddr("fe80::99"), 7000)
	r = receiver(t, a.Netns, netip.AddrPortFrom(other.Addr().WithZone(inside), other.Port()))
	c, err := net.Dial("udp", netip.AddrPortFrom(other.Addr().WithZone(zone), other.Port()).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write([]byte("last")); err != nil {
		t.Fatal(err)
	}
	received(t, r)
}
