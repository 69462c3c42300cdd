package dns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// frame puts the length before a message, as TCP wants it.
func frame(b []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

// What cannot be a request ends the connection, what is a wrong one is refused
// and the next is answered. Zone transfers are refused, those of other zones
// too, and no upstream hears of them.
func TestBadRequestsOverTCP(t *testing.T) {
	u := startUpstream(t, answerWith("@ 60 IN A 192.0.2.1"))
	o := clusterOptions()
	o.Upstream = upstreams(u)
	s := start(t, o)
	pack := func(name string, typ uint16, change func(m *mdns.Msg)) []byte {
		m := question(name, typ)
		if change != nil {
			change(m)
		}
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	ixfr := func(m *mdns.Msg) { m.SetIxfr(m.Question[0].Name, 1, "a.", "b.") }
	good := pack("cluster.local.", mdns.TypeSOA, nil)
	const closed = -1
	for what, c := range map[string]struct {
		send []byte
		want int
	}{
		"length nought":        {frame(nil), closed},
		"beyond the bound":     {frame(make([]byte, maxRequest+1)), closed},
		"as long as can be":    {[]byte{0xFF, 0xFF, 1, 2, 3}, closed},
		"less than a header":   {frame(good[:11]), closed},
		"a response":           {frame(pack("cluster.local.", mdns.TypeSOA, func(m *mdns.Msg) { m.Response = true })), closed},
		"cut in the name":      {frame(good[:20]), mdns.RcodeFormatError},
		"AXFR":                 {frame(pack("cluster.local.", mdns.TypeAXFR, nil)), mdns.RcodeRefused},
		"IXFR":                 {frame(pack("cluster.local.", mdns.TypeIXFR, ixfr)), mdns.RcodeRefused},
		"AXFR of a range":      {frame(pack("96.10.in-addr.arpa.", mdns.TypeAXFR, nil)), mdns.RcodeRefused},
		"AXFR of another zone": {frame(pack("example.com.", mdns.TypeAXFR, nil)), mdns.RcodeRefused},
		"IXFR of another zone": {frame(pack("example.com.", mdns.TypeIXFR, ixfr)), mdns.RcodeRefused},
		"class CHAOS": {frame(pack("version.bind.", mdns.TypeTXT, func(m *mdns.Msg) { m.Question[0].Qclass = mdns.ClassCHAOS })),
			mdns.RcodeRefused},
	} {
		t.Run(what, func(t *testing.T) {
			c2, err := net.Dial("tcp", s.Addrs()[0].String())
			if err != nil {
				t.Fatal(err)
			}
			defer c2.Close()
			conn := &mdns.Conn{Conn: c2}
			_ = c2.SetDeadline(time.Now().Add(30 * time.Second))
			if _, err := c2.Write(append(c.send, frame(good)...)); err != nil {
				t.Fatal(err)
			}
			r, err := conn.ReadMsg()
			if c.want == closed {
				// A reset is as good as an end: bytes were left unread.
				var timeout net.Error
				if err == nil || errors.As(err, &timeout) && timeout.Timeout() {
					t.Errorf("answered %v, %v", r, err)
				}
				return
			}
			if err != nil || r.Rcode != c.want || len(r.Answer) != 0 {
				t.Fatalf("want %s, answered %v, %v", mdns.RcodeToString[c.want], r, err)
			}
			if r, err = conn.ReadMsg(); err != nil || len(r.Answer) != 1 {
				t.Errorf("the request behind it: %v, %v", r, err)
			}
		})
	}
	if n := u.udp.Load() + u.tcp.Load(); n != 0 {
		t.Errorf("the upstream was asked %d times", n)
	}
}

// A datagram that is longer than any request is answered as the malformed one
// it becomes, and does not harm the next.
func TestOversizedDatagram(t *testing.T) {
	s := start(t, clusterOptions())
	fill(s.Zone(), objects(t))
	for _, size := range []int{maxRequest - 100, maxRequest + 1, 9000, 60000} {
		m := question("my-service.prod.svc.cluster.local.", mdns.TypeA)
		m.SetEdns0(1232, false)
		m.IsEdns0().Option = append(m.IsEdns0().Option, &mdns.EDNS0_PADDING{Padding: make([]byte, size-80)})
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		want := mdns.RcodeFormatError
		if len(b) <= maxRequest {
			want = mdns.RcodeSuccess
		}
		var r mdns.Msg
		if out := raw(t, s, b); r.Unpack(out) != nil || r.Rcode != want || r.Id != m.Id {
			t.Errorf("%d bytes: answered %v", len(b), &r)
		}
	}
}

// An answer that is right in all but where it comes from is not taken.
func TestAnswersFromElsewhereAreNotTaken(t *testing.T) {
	for what, from := range map[string]string{"another port": "127.0.0.1:0", "another address": "127.0.0.9:0"} {
		t.Run(what, func(t *testing.T) {
			forger, err := net.ListenPacket("udp4", from)
			if err != nil {
				t.Fatal(err)
			}
			defer forger.Close()
			var sent atomic.Int32
			u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
				f := new(mdns.Msg).SetReply(m)
				rr, _ := mdns.NewRR(m.Question[0].Name + " 100 IN A 203.0.113.66")
				f.Answer = append(f.Answer, rr)
				b, err := f.Pack()
				if err == nil {
					_, err = forger.WriteTo(b, w.RemoteAddr())
				}
				// The kernel may report to the forger that its port is closed.
				if err == nil || strings.Contains(err.Error(), "refused") {
					sent.Add(1)
				}
				answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
			})
			s := start(t, Options{Upstream: upstreams(u)})
			for i := range 5 {
				if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("n%d.example.com.", i), mdns.TypeA))); got != "192.0.2.1" {
					t.Fatalf("answered %s", got)
				}
			}
			if sent.Load() < 5 {
				t.Errorf("only %d forgeries were sent", sent.Load())
			}
		})
	}
}

// What an upstream says of other names than the one asked for is believed for
// nothing else.
func TestUnaskedRecordsPoisonNothing(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		if !strings.HasPrefix(strings.ToLower(m.Question[0].Name), "evil.") {
			answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
			return
		}
		r := new(mdns.Msg).SetReply(m)
		for _, owner := range []string{"victim.example.com.", "my-service.prod.svc.cluster.local.", m.Question[0].Name} {
			rr, _ := mdns.NewRR(owner + " 3600 IN A 203.0.113.66")
			r.Answer, r.Extra = append(r.Answer, rr), append(r.Extra, rr)
		}
		ns, _ := mdns.NewRR("example.com. 3600 IN NS ns.evil.example.com.")
		r.Ns = append(r.Ns, ns)
		_ = w.WriteMsg(r)
	})
	o := clusterOptions()
	o.Upstream = upstreams(u)
	s := start(t, o)
	fill(s.Zone(), objects(t))
	exchange(t, s, "udp", question("evil.example.com.", mdns.TypeA))
	for name, want := range map[string]string{"victim.example.com.": "192.0.2.1", "my-service.prod.svc.cluster.local.": "10.96.0.20"} {
		if got := firstA(exchange(t, s, "udp", question(name, mdns.TypeA))); got != want {
			t.Errorf("%s is %s, not %s", name, got, want)
		}
	}
}

// An upstream's answer that says it has more than it has is not sent on, and not
// kept.
func TestMalformedAnswersOfAnUpstream(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		if n > 2 {
			answerWith("@ 60 IN A 192.0.2.1")(w, m, n)
			return
		}
		b, err := new(mdns.Msg).SetReply(m).Pack()
		if err != nil {
			panic(err)
		}
		b[7] = 1 // an answer that is not there
		_, _ = w.Write(b)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
		t.Errorf("answered %v", r)
	}
	if n := s.forward.metrics.malformed.Load(); n != 2 { // the one upstream there is was asked twice
		t.Errorf("%d malformed answers are counted", n)
	}
	eventually(t, "a good answer is sent on", func() bool {
		return firstA(exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))) == "192.0.2.1"
	})
}

// Floods of random names and of one name, for which the upstream has no answer:
// what is under way and what it takes is bounded, and the cluster's names are
// answered meanwhile.
func TestFloods(t *testing.T) {
	u := startUpstream(t, func(mdns.ResponseWriter, *mdns.Msg, int64) {})
	o := clusterOptions()
	o.Upstream, o.MaxInFlight, o.Timeout = upstreams(u), 100, 10*time.Second
	s := start(t, o)
	fill(s.Zone(), objects(t))
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)

	const packets = 5000
	var flood sync.WaitGroup
	for _, kind := range []string{"random", "random", "one", "one"} {
		flood.Go(func() {
			c, err := net.Dial("udp", s.Addrs()[0].String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			for i := range packets {
				name := "one.example.com."
				if kind == "random" {
					name = fmt.Sprintf("%p-%d.example.com.", c, i)
				}
				b, _ := question(name, mdns.TypeA).Pack()
				_, _ = c.Write(b)
			}
		})
	}
	worst, waiting := 0, 0
	look := func() {
		s.forward.mu.Lock()
		defer s.forward.mu.Unlock()
		worst = max(worst, len(s.forward.inflight))
		for _, f := range s.forward.inflight {
			waiting = max(waiting, len(f.waiters))
		}
	}
	ended := make(chan struct{})
	go func() { flood.Wait(); close(ended) }()
	for done := false; !done; {
		select {
		case <-ended:
			done = true // and once more
		default:
		}
		if got := insist(t, s, "my-service.prod.svc.cluster.local."); got != "10.96.0.20" {
			t.Fatalf("a name of the cluster is %s", got)
		}
		look()
	}
	if worst == 0 || worst > o.MaxInFlight || waiting > maxWaiters {
		t.Errorf("%d questions under way, of at most %d; %d clients wait for one, of at most %d", worst, o.MaxInFlight, waiting, maxWaiters)
	}
	if s.forward.metrics.rejects.Load() == 0 {
		t.Error("nothing was refused")
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 32<<20 {
		t.Errorf("%d more bytes in use", grown)
	}
}

// insist asks as resolvers do: a lost packet is sent again.
func insist(t *testing.T, s *Server, name string) string {
	t.Helper()
	c := mdns.Client{Timeout: time.Second}
	var err error
	for range 30 {
		var r *mdns.Msg
		if r, _, err = c.Exchange(question(name, mdns.TypeA), s.Addrs()[0].String()); err == nil {
			return firstA(r)
		}
	}
	t.Fatalf("%s: %v", name, err)
	return ""
}

// A client that says nothing, or stops in the middle, holds up no other.
func TestSilentConnections(t *testing.T) {
	s := start(t, clusterOptions())
	var silent []net.Conn
	for _, begin := range [][]byte{nil, {0}, {0, 40, 1, 2, 3}} {
		c, err := net.Dial("tcp", s.Addrs()[0].String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(begin); err != nil {
			t.Fatal(err)
		}
		silent = append(silent, c)
	}
	for _, network := range []string{"tcp", "udp"} {
		if r := exchange(t, s, network, question("cluster.local.", mdns.TypeSOA)); len(r.Answer) != 1 {
			t.Errorf("over %s: %v", network, r)
		}
	}
	// An end in the middle is an end.
	for _, c := range silent {
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("read %d bytes, %v", n, err)
		}
	}
}
