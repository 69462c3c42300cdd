package proxied

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/testbed"
)

// echo is a Pod that answers datagrams with its name and what they have.
func (r *rig) echo(name string) netip.AddrPort {
	r.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	r.must(err)
	r.Cleanup(func() { _ = c.Close() })
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(append([]byte(name+" "), buf[:n]...), from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// datagrams makes the Service have a port of UDP beside that of TCP, with the same number.
func (r *rig) datagrams(annotations map[string]string, pods ...netip.AddrPort) {
	r.Helper()
	port := r.at.Port()
	spec := dialect.Read(dialect.Service{Annotations: annotations,
		Ports: []dialect.Port{{Name: "web", Number: port, Protocol: "TCP"}, {Name: "udp", Number: port, Protocol: "UDP"}}})
	if spec.Way != dialect.Proxied {
		r.Fatalf("%s: %+v", spec.Way, spec.Findings)
	}
	r.service.Spec, r.service.Datagrams = spec.Spec, map[uint16][]netip.AddrPort{port: pods}
}

// asks sends a datagram until there is an answer, which it returns.
func (r *rig) asks(c net.Conn, text string) string {
	r.Helper()
	buf := make([]byte, 64<<10)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if _, err := c.Write([]byte(text)); err != nil {
			continue // a refusal of the datagram before
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		if n, err := c.Read(buf); err == nil {
			return string(buf[:n])
		}
	}
	r.Fatal("no answer")
	return ""
}

func (r *rig) udp() net.Conn {
	r.Helper()
	c, err := net.Dial("udp", r.at.String())
	r.must(err)
	r.Cleanup(func() { _ = c.Close() })
	return c
}

// sessions returns how many there are.
func (r *rig) sessions() int {
	r.server.mu.Lock()
	l := r.server.udp[r.at]
	r.server.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.sessions)
}

// sessionOf returns that of a client, nil if it has none.
func (r *rig) sessionOf(c net.Conn) *udpSession {
	r.server.mu.Lock()
	l := r.server.udp[r.at]
	r.server.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sessions[c.LocalAddr().(*net.UDPAddr).AddrPort()]
}

func (r *rig) confirmed(u *udpSession) bool {
	r.server.openMu.Lock()
	defer r.server.openMu.Unlock()
	return u.confirmed
}

// settled asks until a client's session is confirmed.
func (r *rig) settled(c net.Conn) *udpSession {
	r.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		r.asks(c, "x")
		if u := r.sessionOf(c); u != nil && r.confirmed(u) {
			return u
		}
	}
	r.Fatal("the session of a client that has answers is not confirmed")
	return nil
}

// UDP is carried beside HTTP at one address and port; a client stays at its Pod until that refuses or leaves, source ranges
// count, and there is an end to what clients can take (behaviours 171, 178).
func TestUDP(t *testing.T) {
	r := newRig(t, nil)
	asks := map[string]string{lbProtocol: "http", "fairlead.dev/lb-connection-limit": "3", "fairlead.dev/lb-draining": "false"}
	a, b := r.echo("a"), r.echo("b")
	r.datagrams(asks, a, b)
	r.set(r.web(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	answer, err := http.Get("http://" + r.at.String())
	r.must(err)
	_ = answer.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if answer.StatusCode != http.StatusNoContent {
		t.Errorf("HTTP: %s", answer.Status)
	}
	clients, first := []net.Conn{r.udp(), r.udp()}, []string{}
	for _, c := range clients {
		first = append(first, r.asks(c, "x"))
	}
	if first[0] == first[1] {
		t.Errorf("two clients have %q", first)
	}
	for range 3 {
		for i, c := range clients {
			if got := r.asks(c, "x"); got != first[i] {
				t.Errorf("%q, then %q", first[i], got)
			}
		}
	}
	if n := r.sessions(); n != 2 {
		t.Errorf("%d sessions of two clients", n)
	}
	// Its Pod has left.
	r.service.Datagrams[r.at.Port()] = []netip.AddrPort{b}
	r.set()
	for _, c := range clients {
		if got := r.asks(c, "x"); got != "b x" {
			t.Errorf("%q after a has left", got)
		}
	}
	// A Pod that refuses, and comes back elsewhere.
	closed := r.free()
	r.service.Datagrams[r.at.Port()] = []netip.AddrPort{closed}
	r.set()
	_, _ = clients[0].Write([]byte("x"))
	r.service.Datagrams[r.at.Port()] = []netip.AddrPort{a}
	r.set()
	if got := r.asks(clients[0], "x"); got != "a x" {
		t.Errorf("%q after a refusal", got)
	}
	// No more sessions than connections are allowed.
	r.settled(clients[0])
	for range 8 {
		_, _ = r.udp().Write([]byte("x"))
	}
	r.asks(clients[0], "x")
	testbed.Until(t, "those that gave way to be over", func() error {
		if n := r.sessions(); n > 3 {
			return fmt.Errorf("%d sessions", n)
		}
		return nil
	})
	// Ranges count for a session that has begun.
	r.service.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	r.set()
	for deadline := time.Now().Add(patience); r.sessions() > 2; {
		_, _ = clients[0].Write([]byte("x"))
		if time.Now().After(deadline) {
			t.Fatal("a session goes on outside of the source ranges")
		}
	}
	// The end of a session that is idle.
	r.service.Spec.SourceRanges, r.service.Spec.IdleTimeout = nil, dialect.Duration(50*time.Millisecond)
	r.service.Spec.ConnectionLimit = 0
	r.set()
	last := r.udp()
	r.asks(last, "x")
	_ = r.asks(r.udp(), string(make([]byte, 9000)))
	for deadline := time.Now().Add(patience); r.sessionOf(last) != nil; {
		if time.Now().After(deadline) {
			t.Fatal("an idle session does not end")
		}
		<-time.After(time.Millisecond)
	}
}

// Datagrams of forged sources, answered or not, take no place of connections, of clients of UDP that have had an answer, nor of
// new ones; and none of other Services.
func TestForgedDatagrams(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, limit := range map[string]string{"of the node": "", "of the Service": "4"} {
		r := newRig(t, nil)
		r.server.most = 8 // four for a Service
		asks := map[string]string{lbProtocol: "tcp", "fairlead.dev/lb-idle-timeout": "600"}
		if limit != "" {
			asks["fairlead.dev/lb-connection-limit"] = limit
		}
		echo := r.echo("a")
		r.datagrams(asks, echo)
		pod := r.pod(named("pod"))
		r.set(pod)
		client := r.udp()
		session := r.settled(client)
		forge := func() {
			for range 20 {
				c := r.udp()
				_, _ = c.Write([]byte("x"))
				_ = c.Close()
			}
		}
		forge()
		r.datagrams(asks, silent.LocalAddr().(*net.UDPAddr).AddrPort())
		r.service.Datagrams[r.at.Port()] = append(r.service.Datagrams[r.at.Port()], echo)
		r.set(pod)
		forge()
		if got, err := say(r.dial(), "x"); got != "pod x\n" || err != nil {
			t.Errorf("%s: a connection: %q, %v", name, got, err)
		}
		r.service.Datagrams[r.at.Port()] = []netip.AddrPort{echo}
		r.set(pod)
		if got := r.asks(r.udp(), "x"); got != "a x" {
			t.Errorf("%s: another client: %q", name, got)
		}
		stays := r.sessionOf(client) == session
		if !stays || r.server.Rejected() > 0 {
			t.Errorf("%s: the session of a client is still there: %t; %d rejected", name, stays, r.server.Rejected())
		}
		for range 6 { // two datagrams for each, the second one after an answer
			r.settled(r.udp())
		}
		if got, err := say(r.dial(), "x"); got != "pod x\n" || err != nil {
			t.Errorf("%s: a connection beside confirmed sessions: %q, %v", name, got, err)
		}
		if got := r.asks(r.udp(), "x"); got != "a x" || r.server.Rejected() > 0 {
			t.Errorf("%s: a client beside confirmed sessions: %q; %d rejected", name, got, r.server.Rejected())
		}
		forge()
		other := *session.config
		other.usage = &usage{}
		for range 4 { // all of its half, although the other one is used
			a, b := net.Pipe()
			if !r.server.admit(a, &other) {
				t.Errorf("%s: a connection of another Service is rejected", name)
			}
			_ = b.Close()
		}
	}
}
