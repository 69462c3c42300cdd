package dns

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// A slow upstream does not slow local names, and many equal questions are one.
func TestSlowUpstreamDoesNotSlowLocalNames(t *testing.T) {
	release := make(chan struct{})
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		<-release
		answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
	})
	o := clusterOptions()
	o.Upstream, o.Timeout = upstreams(u), 10*time.Second
	s := start(t, o)
	fill(s.Zone(), objects(t))
	var wg sync.WaitGroup
	const clients = 50
	got := make([]string, clients)
	for i := range clients {
		wg.Go(func() { got[i] = firstA(exchange(t, s, "udp", question("slow.example.com.", mdns.TypeA))) })
	}
	eventually(t, "the slow question is under way", func() bool { return u.udp.Load() >= 1 })
	var worst time.Duration
	for range 200 {
		begin := time.Now()
		if a := firstA(exchange(t, s, "udp", question("my-service.prod.svc.cluster.local.", mdns.TypeA))); a != "10.96.0.20" {
			t.Fatalf("answered %s", a)
		}
		worst = max(worst, time.Since(begin))
	}
	if worst > 3*time.Second { // the slow question would take 10 s
		t.Errorf("a local name took %v", worst)
	}
	close(release)
	wg.Wait()
	for _, a := range got {
		if a != "192.0.2.1" {
			t.Errorf("a waiting client got %s", a)
		}
	}
	if n := u.udp.Load(); n != 1 {
		t.Errorf("%d clients with the same question made %d questions", clients, n)
	}
}

// A client may have as many questions in flight as are left free for others, so one
// whose names hang does not shut the others out.
func TestQuestionsInFlightAreShared(t *testing.T) {
	release := make(chan struct{})
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		<-release
		answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u), MaxInFlight: 6, Timeout: 10 * time.Second})
	var waiting []*mdns.Conn
	send := func(host byte, name string) {
		t.Helper()
		c := dialFrom(t, s, "udp", host)
		if err := c.WriteMsg(question(name, mdns.TypeA)); err != nil {
			t.Fatal(err)
		}
		waiting = append(waiting, c)
		eventually(t, "the question is in flight", func() bool {
			s.forward.mu.Lock()
			defer s.forward.mu.Unlock()
			return s.forward.shares.used == len(waiting)
		})
	}
	rejected := func(host byte, name string) {
		t.Helper()
		c := dialFrom(t, s, "udp", host)
		if err := c.WriteMsg(question(name, mdns.TypeA)); err != nil {
			t.Fatal(err)
		}
		if r, err := c.ReadMsg(); err != nil || r.Rcode != mdns.RcodeRefused {
			t.Errorf("%s from client %d: %v, %v", name, host, r, err)
		}
	}
	for i := range 3 { // as many as are left free
		send(1, fmt.Sprintf("n%d.example.com.", i))
	}
	rejected(1, "n3.example.com.")
	// Other clients' questions are not concerned.
	send(2, "n4.example.com.")
	send(3, "n5.example.com.")
	if n := s.forward.metrics.clientRejects.Load(); n != 1 {
		t.Errorf("%d rejected because of their client's share, want 1", n)
	}
	send(4, "n6.example.com.")
	rejected(5, "n7.example.com.")
	if n := s.forward.metrics.rejects.Load(); n != 2 {
		t.Errorf("%d rejected, want 2", n)
	}
	close(release)
	for _, c := range waiting {
		if r, err := c.ReadMsg(); err != nil || firstA(r) != "192.0.2.1" {
			t.Errorf("%v, %v", r, err)
		}
	}
	eventually(t, "no question is in flight", func() bool {
		s.forward.mu.Lock()
		defer s.forward.mu.Unlock()
		return s.forward.shares.used == 0 && len(s.forward.shares.by) == 0
	})
}

// One client's copies of a question leave places among those that wait for its answer.
func TestWaitersAreShared(t *testing.T) {
	release := make(chan struct{})
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		<-release
		answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u), Timeout: 10 * time.Second})
	eventually(t, "lookups are open", s.Ready)
	a := ask{name: []byte("\x03one\x07example\x03com\x00"), typ: typeA}
	var done sync.WaitGroup
	admitted := map[string]int{}
	for _, client := range []string{"192.0.2.1", "192.0.2.2"} {
		for range 2 * maxWaiters {
			done.Add(1)
			if s.forward.lookup(a, netip.MustParseAddr(client), *s.forward.main.Load(), func(result) { done.Done() }) {
				admitted[client]++
			} else {
				done.Done()
			}
		}
	}
	if first, second := admitted["192.0.2.1"], admitted["192.0.2.2"]; first > maxWaiters/2+1 || second < maxWaiters/4-1 {
		t.Errorf("the first client has %d places, the second %d", first, second)
	}
	close(release)
	done.Wait()
}

// dialFrom connects to the server from 127.0.0.HOST, until the test ends.
func dialFrom(t *testing.T, s *Server, network string, host byte) *mdns.Conn {
	t.Helper()
	d := net.Dialer{Timeout: 10 * time.Second}
	if network == "tcp" {
		d.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, host)}
	} else {
		d.LocalAddr = &net.UDPAddr{IP: net.IPv4(127, 0, 0, host)}
	}
	c, err := d.Dial(network, s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return &mdns.Conn{Conn: c}
}

// soa asks over c and returns the error of a connection that is closed.
func soa(c *mdns.Conn) error {
	if err := c.WriteMsg(question("cluster.local.", mdns.TypeSOA)); err != nil {
		return err
	}
	_, err := c.ReadMsg()
	return err
}

// One client's connections, however many, leave places for others. Its longest idle
// one is closed for each new one; the connection of another client stays.
func TestConnectionsAreShared(t *testing.T) {
	const limit = 40
	s := start(t, Options{MaxConns: limit})
	other := dialFrom(t, s, "tcp", 2)
	if err := soa(other); err != nil {
		t.Fatal(err)
	}
	var greedy []*mdns.Conn
	for i := range 5 * limit {
		c := dialFrom(t, s, "tcp", 1)
		if err := soa(c); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		// The first one is in use all the time.
		if greedy = append(greedy, c); i > 0 {
			if err := soa(greedy[0]); err != nil {
				t.Fatalf("the connection in use, after %d: %v", i, err)
			}
		}
	}
	if err := soa(other); err != nil {
		t.Errorf("the other client's connection: %v", err)
	}
	for i := range 5 { // and more of other clients
		if err := soa(dialFrom(t, s, "tcp", byte(3+i))); err != nil {
			t.Errorf("client %d: %v", 3+i, err)
		}
	}
	if soa(greedy[1]) == nil {
		t.Error("the longest idle connection is still open")
	}
	if err := soa(greedy[len(greedy)-1]); err != nil {
		t.Errorf("the newest connection: %v", err)
	}
	open, displaced := s.conns.len(), s.conns.displaced.Load()
	if open > limit/2+7 || displaced < 4*limit || !strings.Contains(scrape(t, s, "/metrics"), "fairlead_dns_tcp_displaced_total 1") {
		t.Errorf("%d connections open, %d closed for others", open, displaced)
	}
}

// When many clients hold all places together, a new one gets that of the client with
// the most.
func TestConnectionsOfManyClients(t *testing.T) {
	const limit = 8
	s := start(t, Options{MaxConns: limit})
	var first *mdns.Conn // of the only client with two
	for host := byte(1); host <= 2*limit; host++ {
		c := dialFrom(t, s, "tcp", host)
		if err := soa(c); err != nil {
			t.Fatalf("client %d: %v", host, err)
		}
		if host == 1 {
			first = c
			if err := soa(dialFrom(t, s, "tcp", host)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if soa(first) == nil {
		t.Error("the client with the most still has its longest idle connection")
	}
	if n := s.conns.len(); n > limit {
		t.Errorf("%d connections", n)
	}
}
