package relay

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// serveUDP answers each datagram with a name before it.
func serveUDP(t testing.TB, f svc.Family, name string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", net.JoinHostPort(loopback(f), "0"))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(append([]byte(name), b[:n]...), from)
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		wg.Wait()
	})
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

// askUDP sends a datagram until an answer comes: one may be lost.
func askUDP(t testing.TB, c net.Conn, b []byte) string {
	t.Helper()
	answer := make([]byte, 64<<10)
	for deadline := time.Now().Add(waitLimit); time.Now().Before(deadline); {
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		if n, err := c.Read(answer); err == nil {
			return string(answer[:n])
		}
	}
	t.Fatal("no answer")
	return ""
}

func dialUDP(t testing.TB, to string) net.Conn {
	t.Helper()
	c, err := net.Dial("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestUDP(t *testing.T) {
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			a, b := serveUDP(t, f, "a"), serveUDP(t, f, "b")
			target := &inOrder{endpoints: []netip.AddrPort{a, b}}
			e, _, at := start(t, Config{UDPTimeout: 100 * time.Millisecond}, svc.UDP, f, target)
			c := dialUDP(t, at)
			if got := askUDP(t, c, []byte("hello")); got != "ahello" {
				t.Errorf("got %q", got)
			}
			big := bytes.Repeat([]byte("x"), 60_000)
			if got := askUDP(t, c, big); len(got) != len(big)+1 {
				t.Errorf("%d bytes came back of a datagram of %d", len(got), len(big))
			}
			// An empty datagram is one.
			if got := askUDP(t, c, nil); got != "a" {
				t.Errorf("got %q", got)
			}
			target.set(b)
			if got := askUDP(t, c, []byte("hello")); got != "bhello" {
				t.Errorf("the endpoint is gone, got %q", got)
			}
			until(t, "the silent client is forgotten", func() bool { return e.Stats().UDPClients == 0 })
		})
	}
}

// Each client has its own flow: answers go to the one who asked, however
// many ask at once, and an endpoint distinguishes clients.
func TestUDPFlowsOfClients(t *testing.T) {
	const clients, questions = 8, 50
	var mu sync.Mutex
	seen := map[string]bool{} // what the endpoint takes clients for
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() {
		b := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			mu.Lock()
			seen[from.String()] = true
			mu.Unlock()
			_, _ = c.WriteTo(b[:n], from)
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		served.Wait()
	})
	target := &inOrder{endpoints: []netip.AddrPort{netip.MustParseAddrPort(c.LocalAddr().String())}}
	e, _, at := start(t, Config{}, svc.UDP, svc.IPv4, target)
	var wg sync.WaitGroup
	for i := range clients {
		conn := dialUDP(t, at)
		wg.Go(func() {
			for q := range questions {
				word := fmt.Sprintf("client %d", i)
				if _, err := fmt.Fprintf(conn, "%s question %d", word, q); err != nil {
					t.Error(err)
					return
				}
				b := make([]byte, 1500)
				_ = conn.SetReadDeadline(time.Now().Add(waitLimit))
				n, err := conn.Read(b)
				if err != nil || !strings.HasPrefix(string(b[:n]), word+" ") {
					t.Errorf("%s got %q, %v", word, b[:n], err)
					return
				}
			}
		})
	}
	wg.Wait()
	// A client has its answer before that is counted.
	until(t, "as many bytes to come back as went to the endpoint", func() bool {
		s := e.Stats()
		return s.ToEndpoints > 0 && s.ToEndpoints == s.ToClients
	})
	s := e.Stats()
	if mu.Lock(); len(seen) != clients || s.UDPClients != clients {
		t.Errorf("the endpoint saw %d clients, %d are remembered, want %d", len(seen), s.UDPClients, clients)
	}
	mu.Unlock()
}

// behaviour 40, for UDP: an endpoint that answers by ICMP is left.
func TestUDPRefusedGoesOnToTheNext(t *testing.T) {
	gone, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
	target := &inOrder{endpoints: []netip.AddrPort{netip.MustParseAddrPort(gone.LocalAddr().String()), serveUDP(t, svc.IPv4, "b")}}
	_, _, at := start(t, Config{}, svc.UDP, svc.IPv4, &moving{inOrder: target})
	if got := askUDP(t, dialUDP(t, at), []byte("hello")); got != "bhello" {
		t.Errorf("got %q", got)
	}
}

// moving is an inOrder that puts an endpoint that failed last.
type moving struct{ *inOrder }

func (m *moving) Failed(ep netip.AddrPort) {
	m.inOrder.Failed(ep)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.endpoints[0] == ep {
		m.endpoints = append(m.endpoints[1:], ep)
	}
}

// Clients have their own endpoints sockets, and the one that was silent for
// the longest time makes room.
func TestUDPClientsAreBounded(t *testing.T) {
	target := &inOrder{endpoints: []netip.AddrPort{serveUDP(t, svc.IPv4, "a")}}
	e, _, at := start(t, Config{MaxFiles: 10}, svc.UDP, svc.IPv4, target)
	var clients []net.Conn
	for range 50 {
		c := dialUDP(t, at)
		clients = append(clients, c)
		askUDP(t, c, []byte("hello"))
	}
	if n := e.Stats().UDPClients; n != 10 {
		t.Errorf("%d clients are remembered, want 10", n)
	}
	for _, c := range clients {
		askUDP(t, c, []byte("again"))
	}
}
