package connecttime

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// open is an unconnected socket on a host; network is as net's.
func open(t testing.TB, h *testbed.Host, network string) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	var err error
	h.Do(func() { c, err = net.ListenUDP(network, nil) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// exchange sends a datagram, and returns who has answered it, and which address the answer seems to come from.
func exchange(t testing.TB, c *net.UDPConn, to netip.AddrPort) (name string, from netip.AddrPort) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.WriteToUDPAddrPort([]byte("?\n"), to); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 256)
	n, from, err := c.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatalf("no answer from %s: %v", to, err)
	}
	name, _, _ = strings.Cut(string(buf[:n]), " ")
	return name, netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
}

// udp is a Table with Services of UDP, one for each address; endpoints are as web's.
func udp(e *flows.Env, fronts []netip.AddrPort, serving string, names ...string) *table.Table {
	var ports []*table.ServicePort
	for i, at := range fronts {
		f := svc.FamilyOf(at.Addr())
		list := func(names ...string) (out []table.Endpoint) {
			for _, name := range names {
				h := e.Host(name)
				out = append(out, table.Endpoint{Addr: netip.AddrPortFrom(h.Addr(f), 9376), Local: h.Node() == e.Node})
			}
			return out
		}
		p := flows.Port(fmt.Sprintf("web%d", i), "udp", f, svc.UDP, table.Frontend{Addr: at, Endpoints: list(names...)})
		p.Serving = list(strings.Fields(serving)...)
		ports = append(ports, p)
	}
	return table.New(ports...)
}

// Datagrams of sockets that are not connected are translated, and show the Service as their sender; all others are nft's.
func TestUnconnected(t *testing.T) {
	r := newRig(t)
	e := flows.NewEnv(t, r.createKnown)
	e.Apply(t, web(e, "a"), nil)
	for _, c := range []struct {
		from, network string
		to            netip.AddrPort
		tracked       bool
	}{
		{"node", "udp4", web4, false},
		{"node", "udp6", web6, false},
		{"node", "udp", web4, false}, // a socket of IPv6
		{"b", "udp4", web4, false},
		{"c", "udp6", web6, false},
		{"a", "udp4", web4, true}, // may be sent to itself
		{"client", "udp4", web4, true},
	} {
		e.Forget(t)
		s := open(t, e.Host(c.from), c.network)
		for range 3 {
			if name, from := exchange(t, s, c.to); name != "a" || from != c.to {
				t.Errorf("%s to %s from %s: answered by %s as %s", c.network, c.to, c.from, name, from)
			}
		}
		if tracked := e.Node.Tracks(svc.UDP, c.to) == nil; tracked != c.tracked {
			t.Errorf("%s to %s from %s: tracked %v, want %v", c.network, c.to, c.from, tracked, c.tracked)
		}
	}
	r.group.Outside(func() {
		e.Forget(t)
		exchange(t, open(t, e.Node, "udp4"), web4)
		if e.Node.Tracks(svc.UDP, web4) != nil {
			t.Error("from outside of the group: not translated by nft")
		}
	})
}

// A socket that is bound to an address, or connected, is nft's.
func TestBoundSocketsAreLeft(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	e.Apply(t, web(e, "a"), nil)
	var bound *net.UDPConn
	var err error
	e.Node.Do(func() { bound, err = net.ListenUDP("udp4", &net.UDPAddr{IP: e.Node.Addr4().AsSlice()}) })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bound.Close() }()
	if _, from := exchange(t, bound, web4); from != web4 || e.Node.Tracks(svc.UDP, web4) != nil {
		t.Errorf("bound to an address: answered as %s, or not tracked", from)
	}
}

// A socket keeps its endpoint of each Service while that serves, whatever else changes, and gets another one afterwards.
func TestSocketKeepsItsEndpoint(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	fronts := []netip.AddrPort{web4}
	for _, names := range [][]string{{"a", "b"}, {"b", "a"}} {
		stays, leaves := names[0], names[1]
		e.Apply(t, udp(e, fronts, "", stays), nil)
		s := open(t, e.Node, "udp4")
		ask := func(want, when string) {
			t.Helper()
			for range 8 {
				if name, from := exchange(t, s, web4); name != want || from != web4 {
					t.Fatalf("%s: answered by %s as %s, want %s as %s", when, name, from, want, web4)
				}
			}
		}
		ask(stays, "at first")
		e.Apply(t, udp(e, fronts, "", stays, leaves, "d"), nil)
		ask(stays, "others came")
		e.Apply(t, udp(e, fronts, stays+" "+leaves, leaves), nil)
		ask(stays, "it only serves")
		e.Apply(t, udp(e, fronts, "", leaves), nil)
		ask(leaves, "it left")
		e.Apply(t, udp(e, fronts, "", stays, leaves), nil)
		ask(leaves, "it came back")
		e.Apply(t, udp(e, nil, ""), nil)
		e.Apply(t, udp(e, fronts, "", stays), nil)
		ask(stays, "a new Service")
	}
}

// Answers always show the address that the question was sent to: where an endpoint's own address would not tell, nft
// translates.
func TestAnswersAreToldApart(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	var fronts []netip.AddrPort
	for i := range 6 {
		fronts = append(fronts, flows.AP(fmt.Sprintf("10.96.0.%d:80", 20+i)))
	}
	e.Apply(t, udp(e, fronts, "", "a"), nil)
	direct := netip.AddrPortFrom(e.Host("a").Addr4(), 9376)
	s := open(t, e.Node, "udp4")
	for round := range 3 {
		for _, at := range append(fronts, direct) {
			if name, from := exchange(t, s, at); name != "a" || from != at {
				t.Errorf("round %d, to %s: answered by %s as %s", round, at, name, from)
			}
		}
	}
	// Of many Services with an endpoint each all have the right one.
	var ports []*table.ServicePort
	want := map[netip.AddrPort]string{}
	for i, name := range []string{"a", "b", "d", "a", "b", "d"} {
		for p := range udp(e, fronts[i:i+1], "", name).All() {
			q := *p
			q.ID.Name.Name = fmt.Sprintf("web%d", i)
			ports = append(ports, &q)
		}
		want[fronts[i]] = name
	}
	e.Apply(t, table.New(ports...), nil)
	s = open(t, e.Node, "udp4")
	for range 3 {
		for _, at := range fronts {
			if name, from := exchange(t, s, at); name != want[at] || from != at {
				t.Errorf("to %s: answered by %s as %s, want %s", at, name, from, want[at])
			}
		}
	}
}
