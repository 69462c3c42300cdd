package connecttime

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	return exchangeWith(t, c, to, nil)
}

// exchangeWith is exchange for a datagram with a control message: cmsg(3).
func exchangeWith(t testing.TB, c *net.UDPConn, to netip.AddrPort, control []byte) (name string, from netip.AddrPort) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.WriteMsgUDPAddrPort([]byte("?\n"), control, to); err != nil {
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

// A connected socket is translated, shows the Service, and may name it with each datagram; one that is bound to an address is nft's.
func TestConnected(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	e.Apply(t, web(e, "a", "b", "d"), nil)
	for _, to := range []netip.AddrPort{web4, web6} {
		e.Forget(t)
		conn, err := e.Node.Dial(t.Context(), svc.UDP, to)
		if err != nil {
			t.Fatal(err)
		}
		c := conn.(*net.UDPConn)
		first, err := testbed.AskOn(c)
		if err != nil {
			t.Fatal(err)
		}
		for range 8 {
			// Go's WriteTo refuses to name an address; the kernel does not.
			raw, err := c.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var sent error
			if err := raw.Write(func(fd uintptr) bool {
				sent = unix.Sendto(int(fd), []byte("?\n"), 0, sockaddr(to))
				return true
			}); err != nil || sent != nil {
				t.Fatal(err, sent)
			}
			buf := make([]byte, 64)
			n, from, err := c.ReadFromUDPAddrPort(buf)
			name, _, _ := strings.Cut(string(buf[:n]), " ")
			if err != nil || name != first.Name || netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) != to {
				t.Errorf("answered by %s as %s, %v; want %s as %s", name, from, err, first.Name, to)
			}
		}
		if c.RemoteAddr().String() != to.String() {
			t.Errorf("getpeername says %s, want %s", c.RemoteAddr(), to)
		}
		if e.Node.Tracks(svc.UDP, to) == nil {
			t.Errorf("to %s: translated by nft", to)
		}
		_ = c.Close()
	}
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

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// A connected socket ends when its endpoint serves no more, on the node and in a Pod, and no other socket does.
func TestStaleSocketsEnd(t *testing.T) { behind(t, staleSocketsEnd) }

func staleSocketsEnd(t *testing.T, r rig) {
	e, begin := flows.NewEnv(t, r.createKnown), time.Now()
	fronts := []netip.AddrPort{web4, web6}
	e.Apply(t, udp(e, fronts, "", "a"), nil)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	type client struct {
		what  string
		lines *bufio.Scanner
	}
	var clients []client
	for _, from := range []string{"node", "b"} {
		for _, to := range fronts {
			cmd := e.Host(from).Command(ctx, self(t))
			cmd.Env = append(os.Environ(), askEnv+"="+to.String())
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { stop(); _ = cmd.Wait() }()
			clients = append(clients, client{from + " to " + to.String(), bufio.NewScanner(out)})
		}
	}
	// until reads the lines of a client until one with the prefix, of a question that was asked since a time.
	until := func(c client, since time.Time, prefix string) {
		t.Helper()
		for c.lines.Scan() {
			line := c.lines.Text()
			asked, err := strconv.ParseInt(line[strings.LastIndex(line, " ")+1:], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			if asked >= since.UnixNano() && strings.HasPrefix(line, prefix) {
				return
			}
			if strings.HasPrefix(line, "ended") {
				t.Fatalf("%s: %q, want %s", c.what, line, prefix)
			}
		}
		t.Fatalf("%s: the client is gone: %v", c.what, c.lines.Err())
	}
	direct, err := e.Node.Dial(t.Context(), svc.UDP, netip.AddrPortFrom(e.Host("a").Addr4(), 9376))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = direct.Close() }()
	for _, c := range clients {
		until(c, begin, "a ")
	}
	e.Apply(t, udp(e, fronts, "a d", "d"), nil)
	changed := time.Now()
	for _, c := range clients { // it serves: a later answer is of the same socket
		until(c, changed, "a ")
	}
	e.Apply(t, udp(e, fronts, "", "d"), nil)
	for _, c := range clients {
		until(c, begin, "ended")
		until(c, begin, "d ")
	}
	if got, err := testbed.AskOn(direct); err != nil || got.Name != "a" {
		t.Errorf("the socket that is connected with the endpoint itself: %+v, %v", got, err)
	}
}

// A socket that has sent to a Service, and then connects with it, keeps its endpoint: to connection tracking it is one flow.
func TestConnectAfterSending(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	e.Apply(t, web(e, "a", "b", "d"), nil)
	for range 8 {
		s := open(t, e.Node, "udp4")
		want, _ := exchange(t, s, web4)
		raw, err := s.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var connected error
		if err := raw.Control(func(fd uintptr) { connected = unix.Connect(int(fd), sockaddr(web4)) }); err != nil || connected != nil {
			t.Fatal(err, connected)
		}
		got, err := testbed.AskOn(s)
		if err != nil || got.Name != want {
			t.Errorf("answered by %s, %v; want %s as before", got.Name, err, want)
		}
	}
}

// A datagram that names its own source address is nft's. So are the later ones of the socket: to connection tracking they are one flow.
func TestSourceAddressOfADatagram(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	e.Apply(t, web(e, "a", "b", "d"), nil)
	for _, c := range []struct {
		network string
		to      netip.AddrPort
		source  []byte
	}{
		{"udp4", web4, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: e.Node.Addr4().As4()})},
		{"udp6", web6, unix.PktInfo6(&unix.Inet6Pktinfo{Addr: e.Node.Addr(svc.IPv6).As16()})},
	} {
		for range 8 {
			s := open(t, e.Node, c.network)
			want, _ := exchangeWith(t, s, c.to, c.source)
			if got, from := exchange(t, s, c.to); got != want || from != c.to {
				t.Errorf("answered by %s as %s, want %s as %s", got, from, want, c.to)
			}
		}
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
