package link_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

const (
	wireguardPort = 51820
	// secret is in what nodes send in TestWireGuard.
	secret = "not to be read between the nodes"
)

// encrypting is a node that reaches its peers by WireGuard.
type encrypting struct {
	*member
	w      *link.WireGuard
	routes link.Routes
	at     netip.Addr // its own address
}

func newEncrypting(t *testing.T, h *testbed.Host, n int, at netip.Addr) *encrypting {
	e := &encrypting{member: newMember(t, h, n), at: at}
	e.do(func() (err error) {
		e.w, err = link.OpenWireGuard(filepath.Join(t.TempDir(), "key"), wireguardPort)
		return err
	})
	t.Cleanup(func() { _ = e.w.Close() })
	return e
}

func (e *encrypting) peer() link.Peer {
	return link.Peer{Addr: e.at, Pods: e.pods, Key: e.w.PublicKey()}
}

// leads makes peers the only ones; what has no route to one is unreachable.
func (e *encrypting) leads(peers ...link.Peer) {
	e.t.Helper()
	e.do(func() error {
		routes, err := e.w.Set(peers, []netip.Addr{e.at}, e.gateways, cluster)
		for _, c := range cluster {
			routes = append(routes, link.Route{Dst: c})
		}
		return errors.Join(err, e.routed(routes))
	})
}

func (e *encrypting) routed(routes []link.Route) error {
	failed, err := e.routes.Set(routes)
	for _, f := range failed {
		err = errors.Join(err, f)
	}
	return err
}

// echo answers at an address of a node's with what it gets.
func echo(t *testing.T, h *testbed.Host, at netip.Addr) netip.AddrPort {
	l := h.ListenTCP(netip.AddrPortFrom(at, 0))
	testbed.Serve(t, l, func(c net.Conn) { _, _ = io.Copy(c, c) })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// asks sends a body that is larger than any packet, from an address if it is valid, and
// returns an error if it does not come back within limit.
func asks(h *testbed.Host, from netip.Addr, to netip.AddrPort, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := h.DialFrom(ctx, svc.TCP, netip.AddrPortFrom(from, 0), to)
	if err != nil {
		return err
	}
	defer c.Close()
	body := bytes.Repeat([]byte(secret), 200_000/len(secret))
	sent := make(chan error, 1)
	go func() { _, err := c.Write(body); sent <- err }()
	got := make([]byte, len(body))
	_, err = io.ReadFull(c, got)
	if err = errors.Join(err, <-sent); err == nil && !bytes.Equal(got, body) {
		err = errors.New("another body came back")
	}
	return err
}

// Two nodes whose addresses are of either family reach each other's pods of both by the
// kernel's own WireGuard, and nothing of it can be read between them: neither when the device
// is gone, nor when the peer's key is another.
func TestWireGuard(t *testing.T) {
	if _, _, err := link.ProbeWireGuard(); err != nil {
		t.Skipf("%v; make bench RUN=wireguard runs this on Debian's kernel", err)
	}
	for f, mtu := range map[svc.Family]int{svc.IPv4: 1440, svc.IPv6: 1420} {
		t.Run(f.String(), func(t *testing.T) { testWireGuard(t, f, mtu) })
	}
}

func testWireGuard(t *testing.T, f svc.Family, mtu int) {
	n := testbed.NewNetwork(t)
	ha, hb := n.Outside("a"), n.Outside("b")
	a, b := newEncrypting(t, ha, 1, ha.Addr(f)), newEncrypting(t, hb, 2, hb.Addr(f))
	wire := ha.Wire(secret, cluster, wireguardPort)
	a.leads(b.peer())
	b.leads(a.peer())
	if a.w.MTU() != mtu {
		t.Errorf("the MTU is %d, want %d", a.w.MTU(), mtu)
	}
	var servers []netip.AddrPort
	for _, g := range b.gateways {
		at := echo(t, hb, g)
		servers = append(servers, at)
		if err := asks(ha, netip.Addr{}, at, time.Minute); err != nil {
			t.Errorf("%s: %v", at, err)
		}
		// One of the node's own addresses is none of its pods', and becomes one.
		if err := asks(ha, ha.Addr(svc.FamilyOf(g)), at, time.Minute); err != nil {
			t.Errorf("%s from the node's own address: %v", at, err)
		}
	}
	if by := a.output("ip", "-d", "link", "show", link.WireGuardDevice); !strings.Contains(by, "wireguard") {
		t.Errorf("the device is not the kernel's: %s", by)
	}
	if err := wire.Check(f == svc.IPv4, 500); err != nil {
		t.Fatal(err)
	}

	const closed = 2 * time.Second
	a.output("ip", "link", "delete", link.WireGuardDevice)
	for _, at := range servers {
		if err := asks(ha, netip.Addr{}, at, closed); err == nil {
			t.Errorf("%s answers without the device", at)
		}
	}
	stranger := newEncrypting(t, n.Outside("stranger"), 2, hb.Addr(f))
	a.leads(stranger.peer())
	for _, at := range servers {
		if err := asks(ha, netip.Addr{}, at, closed); err == nil {
			t.Errorf("%s answers though its key is another", at)
		}
	}
	a.leads(b.peer())
	for _, at := range servers {
		if err := asks(ha, netip.Addr{}, at, time.Minute); err != nil {
			t.Errorf("%s after a new device: %v", at, err)
		}
	}
	if err := wire.Check(f == svc.IPv4, 500); err != nil {
		t.Error(err)
	}
	testWithoutWireGuard(t, a, b, servers)
}

// testWithoutWireGuard compares what two nodes carry with and without encryption, and checks
// that nothing of it is left.
func testWithoutWireGuard(t *testing.T, a, b *encrypting, servers []netip.AddrPort) {
	const rounds = 20
	carries := func() float64 {
		begin := time.Now()
		for range rounds {
			if err := asks(a.h, netip.Addr{}, servers[0], time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		return 2 * rounds * 200_000 / 1e6 / time.Since(begin).Seconds()
	}
	encrypted := carries()
	for _, e := range []struct{ own, other *encrypting }{{a, b}, {b, a}} {
		e.own.do(func() error {
			if err := link.RemoveWireGuard(); err != nil {
				return err
			}
			var routes []link.Route
			for _, p := range e.other.pods {
				routes = append(routes, link.Route{Dst: p, Via: e.other.h.Addr(svc.FamilyOf(p.Addr()))})
			}
			return e.own.routed(routes)
		})
		left := e.own.output("ip", "link") + e.own.output("ip", "route") + e.own.output("ip", "-6", "route") +
			e.own.output("nft", "list", "tables")
		for _, what := range []string{link.WireGuardDevice, "fairlead-wireguard", "unreachable 10.244", "unreachable fd00:10:244"} {
			if strings.Contains(left, what) {
				t.Errorf("%s: %q is left in\n%s", e.own.h.Name(), what, left)
			}
		}
	}
	plain := carries()
	t.Logf("between addresses of %s WireGuard carries %.1f MB/s, plain routes %.1f MB/s", svc.FamilyOf(a.at), encrypted, plain)
}
