package proxied

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// datagrams makes the Service have a port of UDP beside that of TCP, with the same number.
func (r *rig) datagrams(annotations map[string]string, pods ...netip.AddrPort) {
	r.Helper()
	port := r.At.Port()
	spec := dialect.Read(dialect.Service{Annotations: annotations,
		Ports: []dialect.Port{{Name: "web", Number: port, Protocol: "TCP"}, {Name: "udp", Number: port, Protocol: "UDP"}}})
	if spec.Way != dialect.Proxied {
		r.Fatalf("%s: %+v", spec.Way, spec.Findings)
	}
	r.service.Spec, r.service.Datagrams = spec.Spec, map[uint16][]netip.AddrPort{port: pods}
}

func (r *rig) udp() net.Conn {
	r.Helper()
	c, err := net.Dial("udp", r.At.String())
	r.Must(err)
	r.Cleanup(func() { _ = c.Close() })
	return c
}

// sessions returns how many there are.
func (r *rig) sessions() int {
	r.server.mu.Lock()
	l := r.server.udp[r.At]
	r.server.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.sessions)
}

// sessionOf returns that of a client, nil if it has none.
func (r *rig) sessionOf(c net.Conn) *udpSession {
	r.server.mu.Lock()
	l := r.server.udp[r.At]
	r.server.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sessions[c.LocalAddr().(*net.UDPAddr).AddrPort()]
}

func (r *rig) confirmed(u *udpSession) bool {
	r.server.admission.mu.Lock()
	defer r.server.admission.mu.Unlock()
	return u.confirmed
}

// settled asks until a client's session is confirmed.
func (r *rig) settled(c net.Conn) *udpSession {
	r.Helper()
	for deadline := time.Now().Add(lbtest.Patience); time.Now().Before(deadline); {
		r.Asks(c, "x")
		if u := r.sessionOf(c); u != nil && r.confirmed(u) {
			return u
		}
	}
	r.Fatal("the session of a client that has answers is not confirmed")
	return nil
}

// UDP is carried beside TCP at one address and port; a client stays at its Pod until that refuses or leaves, source ranges
// count, and there is an end to what clients can take (behaviours 171, 178).
func TestUDP(t *testing.T) {
	r := newRig(t, nil)
	asks := map[string]string{"fairlead.dev/lb-connection-limit": "3", "fairlead.dev/lb-draining": "false"}
	a, b := r.Echo("a"), r.Echo("b")
	r.datagrams(asks, a, b)
	r.set(r.Pod(lbtest.Named("tcp")))
	tcp := r.Dial()
	if got, err := lbtest.Say(tcp, "x"); got != "tcp x\n" || err != nil {
		t.Errorf("TCP: %q, %v", got, err)
	}
	r.Must(tcp.Close())
	clients, first := []net.Conn{r.udp(), r.udp()}, []string{}
	for _, c := range clients {
		first = append(first, r.Asks(c, "x"))
	}
	if first[0] == first[1] {
		t.Errorf("two clients have %q", first)
	}
	for range 3 {
		for i, c := range clients {
			if got := r.Asks(c, "x"); got != first[i] {
				t.Errorf("%q, then %q", first[i], got)
			}
		}
	}
	if n := r.sessions(); n != 2 {
		t.Errorf("%d sessions of two clients", n)
	}
	// Its Pod has left.
	r.service.Datagrams[r.At.Port()] = []netip.AddrPort{b}
	r.set()
	for _, c := range clients {
		if got := r.Asks(c, "x"); got != "b x" {
			t.Errorf("%q after a has left", got)
		}
	}
	// A Pod that refuses, and comes back elsewhere.
	closed := r.Free()
	r.service.Datagrams[r.At.Port()] = []netip.AddrPort{closed}
	r.set()
	_, _ = clients[0].Write([]byte("x"))
	r.service.Datagrams[r.At.Port()] = []netip.AddrPort{a}
	r.set()
	if got := r.Asks(clients[0], "x"); got != "a x" {
		t.Errorf("%q after a refusal", got)
	}
	// No more sessions than connections are allowed.
	r.settled(clients[0])
	for range 8 {
		_, _ = r.udp().Write([]byte("x"))
	}
	r.Asks(clients[0], "x")
	testbed.Until(t, "those that gave way to be over", func() error {
		if n := r.sessions(); n > 3 {
			return fmt.Errorf("%d sessions", n)
		}
		return nil
	})
	// Ranges count for a session that has begun.
	r.service.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	r.set()
	for deadline := time.Now().Add(lbtest.Patience); r.sessions() > 2; {
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
	r.Asks(last, "x")
	_ = r.Asks(r.udp(), string(make([]byte, 9000)))
	for deadline := time.Now().Add(lbtest.Patience); r.sessionOf(last) != nil; {
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
		r.server.admission.most = 8 // four for a Service, or six while nobody has others
		asks := map[string]string{"fairlead.dev/lb-protocol": "tcp", "fairlead.dev/lb-idle-timeout": "600"}
		if limit != "" {
			asks["fairlead.dev/lb-connection-limit"] = limit
		}
		echo := r.Echo("a")
		r.datagrams(asks, echo)
		pod := r.Pod(lbtest.Named("pod"))
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
		r.service.Datagrams[r.At.Port()] = append(r.service.Datagrams[r.At.Port()], echo)
		r.set(pod)
		forge()
		if got, err := lbtest.Say(r.Dial(), "x"); got != "pod x\n" || err != nil {
			t.Errorf("%s: a connection: %q, %v", name, got, err)
		}
		r.service.Datagrams[r.At.Port()] = []netip.AddrPort{echo}
		r.set(pod)
		if got := r.Asks(r.udp(), "x"); got != "a x" {
			t.Errorf("%s: another client: %q", name, got)
		}
		stays := r.sessionOf(client) == session
		if !stays || r.server.Rejected() > 0 {
			t.Errorf("%s: the session of a client is still there: %t; %d rejected", name, stays, r.server.Rejected())
		}
		for range 6 { // two datagrams for each, the second one after an answer
			r.settled(r.udp())
		}
		if got, err := lbtest.Say(r.Dial(), "x"); got != "pod x\n" || err != nil {
			t.Errorf("%s: a connection beside confirmed sessions: %q, %v", name, got, err)
		}
		if got := r.Asks(r.udp(), "x"); got != "a x" || r.server.Rejected() > 0 {
			t.Errorf("%s: a client beside confirmed sessions: %q; %d rejected", name, got, r.server.Rejected())
		}
		forge()
		other := *session.config
		other.usage = &usage{traffic: traffic.NewBook().Service(svc.Name{Name: "test"})}
		for range 4 { // all of its half, although the other one is used
			a, b := net.Pipe()
			if !r.server.admission.admit(a, &other) {
				t.Errorf("%s: a connection of another Service is rejected", name)
			}
			_ = b.Close()
		}
	}
}
