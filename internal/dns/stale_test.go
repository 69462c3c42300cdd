package dns

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// RFC 8767: when no upstream answers, an old answer is better than none.
func TestStaleAnswer(t *testing.T) {
	var silent atomic.Bool
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		if !silent.Load() {
			answerWith("@ 1 IN A 192.0.2.1")(w, m, n)
		}
	})
	s := start(t, Options{Upstream: upstreams(u), Timeout: 100 * time.Millisecond})
	exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
	silent.Store(true)
	eventually(t, "the answer is past its end", func() bool {
		r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
		if firstA(r) != "192.0.2.1" {
			t.Fatalf("answered %v", r)
		}
		return r.Answer[0].Header().Ttl == staleTTL
	})
	if n := s.forward.metrics.stale.Load(); n == 0 {
		t.Error("not counted")
	}
}

// old puts an answer for www.example.com into the cache whose end is past.
func old(t *testing.T, s *Server) {
	t.Helper()
	m := question("www.example.com.", mdns.TypeA)
	m.Response = true
	rr, _ := mdns.NewRR("www.example.com. 1 IN A 192.0.2.1")
	m.Answer = append(m.Answer, rr)
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	name := []byte("\x03www\x07example\x03com\x00")
	e, err := newEntry(b, name)
	if err != nil {
		t.Fatal(err)
	}
	s.forward.cache.put(ask{name: name, typ: mdns.TypeA}.key(), e, time.Now().Unix()-60)
}

// RFC 8767, section 5: clients of a slow upstream get the old answer while they
// still wait, and the new one is used once it is there.
func TestStaleAnswerOfASlowUpstream(t *testing.T) {
	release := make(chan struct{})
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		<-release
		answerWith("@ 100 IN A 192.0.2.2")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u), Timeout: 10 * time.Second})
	old(t, s)
	r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
	if firstA(r) != "192.0.2.1" || r.Answer[0].Header().Ttl != staleTTL {
		t.Errorf("answered %v", r)
	}
	close(release)
	eventually(t, "the new answer is used", func() bool {
		return firstA(exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))) == "192.0.2.2"
	})
}

func TestStaleAnswersCanBeTurnedOff(t *testing.T) {
	s := start(t, Options{Upstream: []netip.AddrPort{dead(t)}, Stale: -1})
	old(t, s)
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
		t.Errorf("answered %v", r)
	}
}
