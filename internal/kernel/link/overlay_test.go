package link_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

var overlayOptions = link.OverlayOptions{VNI: 2500, Port: 4789}

// member is a node of the overlay's tests. Its pods are 10.244.N.0/24 and fd00:10:244:N::/64.
type member struct {
	t        *testing.T
	h        *testbed.Host
	v        *link.Overlay
	pods     []netip.Prefix
	gateways []netip.Addr
}

func newMember(t *testing.T, h *testbed.Host, n int) *member {
	m := &member{
		t: t, h: h, v: link.NewOverlay(overlayOptions),
		pods: []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", n)),
			netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%d::/64", n)),
		},
		gateways: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.244.%d.1", n)), netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%d::1", n))},
	}
	t.Cleanup(func() { _ = m.v.Close() })
	m.do(func() error { return link.EnsureNode("fl0", m.gateways) })
	return m
}

func (m *member) do(f func() error) {
	m.t.Helper()
	var err error
	m.h.Do(func() { err = f() })
	if err != nil {
		m.t.Fatalf("%s: %v", m.h.Name(), err)
	}
}

// carries makes the nodes with addresses the peers, and direct routes to neighbours.
func (m *member) carries(own netip.Addr, peers []link.Peer, direct ...link.Route) {
	m.t.Helper()
	m.do(func() error {
		routes, err := m.v.Set(peers, []netip.Addr{own}, m.gateways, cluster)
		if err != nil {
			return err
		}
		failed, err := new(link.Routes).Set(append(routes, direct...))
		for _, f := range failed {
			err = errors.Join(err, f)
		}
		return err
	})
}

func (m *member) peer(a netip.Addr) link.Peer { return link.Peer{Addr: a, Pods: m.pods} }

func (m *member) output(name string, args ...string) string {
	m.t.Helper()
	out, err := m.h.Command(m.t.Context(), name, args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s: %s %v: %v\n%s", m.h.Name(), name, args, err, out)
	}
	return string(out)
}

// listen opens a socket at one of the addresses among the node's pods.
func (m *member) listen(i int) net.PacketConn {
	m.t.Helper()
	var c net.PacketConn
	m.do(func() (err error) {
		c, err = net.ListenPacket("udp", netip.AddrPortFrom(m.gateways[i], 9999).String())
		return err
	})
	m.t.Cleanup(func() { _ = c.Close() })
	return c
}

// send sends a packet that may not be fragmented, of size bytes with its headers, from an
// address among the node's pods to the socket of another.
func (m *member) send(to *member, i, size int, word string) (err error) {
	headers, from := 28, m.gateways[i]
	if from.Is6() {
		headers = 48
	}
	body := append([]byte(word), make([]byte, max(0, size-headers-len(word)))...)
	m.h.Do(func() {
		var c *net.UDPConn
		local := net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
		c, err = net.DialUDP("udp", local, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.gateways[i], 9999)))
		if err != nil {
			return
		}
		defer c.Close()
		raw, rawErr := c.SyscallConn()
		err = errors.Join(rawErr, raw.Control(func(fd uintptr) {
			if from.Is6() {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
			}
		}))
		if err == nil {
			_, err = c.Write(body)
		}
	})
	return err
}

// reaches sends until the word arrives, and returns the words that arrived before it.
func (m *member) reaches(to *member, at net.PacketConn, i, size int, word string) (before []string) {
	m.t.Helper()
	testbed.Until(m.t, m.h.Name()+" "+word, func() error {
		if err := m.send(to, i, size, word); err != nil {
			return err
		}
		if err := at.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		for buf := make([]byte, 65536); ; {
			n, _, err := at.ReadFrom(buf)
			if err != nil {
				return err
			}
			if got := string(bytes.TrimRight(buf[:n], "\x00")); got != word {
				before = append(before, got)
				continue
			}
			return nil
		}
	})
	return before
}

// Packets of both families and of any size that is allowed pass between two nodes, over
// either family; what others than the nodes send is dropped; a node may get another address,
// become a neighbour, and go.
func TestOverlay(t *testing.T) {
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			network := testbed.NewNetwork(t)
			a, b, forger := newMember(t, network.Outside("a"), 1), newMember(t, network.Outside("b"), 2), newMember(t, network.Outside("forger"), 1)
			at, bt := a.h.Addr(f), b.h.Addr(f)
			mtu := map[svc.Family]int{svc.IPv4: 1450, svc.IPv6: 1430}[f]
			a.carries(at, []link.Peer{b.peer(bt)})
			b.carries(bt, []link.Peer{a.peer(at)})
			forger.carries(forger.h.Addr(f), []link.Peer{b.peer(bt)})
			sockets := []net.PacketConn{b.listen(0), b.listen(1)}
			for i, c := range sockets {
				a.reaches(b, c, i, mtu, fmt.Sprintf("the largest packet to %s", b.gateways[i]))
				if err := a.send(b, i, mtu+1, "too large"); !errors.Is(err, unix.EMSGSIZE) {
					t.Errorf("a packet of %d bytes: %v, want %v", mtu+1, err, unix.EMSGSIZE)
				}
				if err := forger.send(b, i, 100, "forged"); err != nil {
					t.Fatal(err)
				}
				if before := a.reaches(b, c, i, 100, "after the forged one"); slices.Contains(before, "forged") {
					t.Errorf("a machine that is no node got in %q", before)
				}
				// It is no accident that it was dropped.
				b.carries(bt, []link.Peer{a.peer(at), {Addr: forger.h.Addr(f)}})
				forger.reaches(b, c, i, 100, "of a node")
				b.carries(bt, []link.Peer{a.peer(at)})
			}
			moved := bt.Next().Next().Next().Next()
			b.output("ip", "addr", "add", netip.PrefixFrom(moved, bt.BitLen()).String(), "dev", "eth0")
			b.carries(moved, []link.Peer{a.peer(at)})
			a.carries(at, []link.Peer{b.peer(moved)})
			c, back := sockets[0], a.listen(0)
			a.reaches(b, c, 0, mtu, "to the address that is new")
			b.reaches(a, back, 0, mtu, "from the address that is new")
			now := a.output("bridge", "fdb", "show")
			if strings.Contains(now, "dst "+bt.String()+" ") || !strings.Contains(now, "dst "+moved.String()+" ") {
				t.Errorf("the forwarding table after the move to %s:\n%s", moved, now)
			}
			index := 0
			if f == svc.IPv6 {
				index = 1
			}
			a.carries(at, nil, link.Route{Dst: b.pods[index], Via: moved})
			b.carries(moved, nil, link.Route{Dst: a.pods[index], Via: at})
			if index == 0 {
				a.reaches(b, c, 0, 1500, "as a neighbour")
			}
			left := a.output("ip", "-o", "link") + a.output("nft", "list", "ruleset")
			if strings.Contains(left, "vxlan") || strings.Contains(left, "overlay") {
				t.Errorf("without peers there is still:\n%s", left)
			}
		})
	}
}

// What a pod sends to the port of a peer does not leave the node: it would have the node's
// address, which the peer accepts, and any packet inside.
func TestPodsSendNoVXLAN(t *testing.T) {
	node(t)
	peer := outside(t)
	p := pod(t, 2)
	if err := masquerade(t, func() {}).Set(cluster, cluster); err != nil {
		t.Fatal(err)
	}
	v := link.NewOverlay(overlayOptions)
	t.Cleanup(func() { _ = v.Close() })
	for i, addrs := range [][3]string{{"192.0.2.1", "192.0.2.2", "192.0.2.3"}, {"2001:db8::1", "2001:db8::2", "2001:db8::3"}} {
		local, addr, second := netip.MustParseAddr(addrs[0]), netip.MustParseAddr(addrs[1]), netip.MustParseAddr(addrs[2])
		run(t, "", "nsenter", "--net="+peer, "ip", "addr", "add", netip.PrefixFrom(second, second.BitLen()).String(), "dev", "eth0", "nodad")
		pods := []netip.Prefix{netip.MustParsePrefix("10.244.9.0/24")}
		if _, err := v.Set([]link.Peer{{Addr: addr, Pods: pods}}, []netip.Addr{local}, gateways, cluster); err != nil {
			t.Fatal(err)
		}
		var vxlan, other net.PacketConn
		err := netns.Do(peer, func() (err error) {
			if vxlan, err = net.ListenPacket("udp", netip.AddrPortFrom(netip.IPv6Unspecified(), overlayOptions.Port).String()); err != nil {
				return err
			}
			other, err = net.ListenPacket("udp", netip.AddrPortFrom(addr, overlayOptions.Port+1).String())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		send := func(to netip.Addr, port uint16) error {
			return netns.Do(p.Netns, func() error {
				c, err := net.Dial("udp", netip.AddrPortFrom(to, port).String())
				if err != nil {
					return err
				}
				defer c.Close()
				_, err = c.Write([]byte("from a pod"))
				return err
			})
		}
		buf := make([]byte, 100)
		testbed.Until(t, "a packet to another port", func() error {
			err := errors.Join(send(addr, overlayOptions.Port), send(second, overlayOptions.Port), send(addr, overlayOptions.Port+1),
				other.SetReadDeadline(time.Now().Add(time.Second)))
			if err != nil {
				return err
			}
			_, _, err = other.ReadFrom(buf)
			return err
		})
		if err := vxlan.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if n, from, err := vxlan.ReadFrom(buf); err == nil {
			t.Errorf("the peer got %q from the pod %s as %s", buf[:n], p.Addrs[i], from)
		}
		_, _ = vxlan.Close(), other.Close()
	}
}
