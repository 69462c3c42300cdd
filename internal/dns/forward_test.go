package dns

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An upstream that does not compress repeats the random case of the question
// in full; clients see lower case.
func TestUncompressedOwnerLosesRandomCase(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, _ int64) {
		r := new(mdns.Msg).SetReply(m)
		rr, _ := mdns.NewRR(m.Question[0].Name + " 100 IN A 192.0.2.1")
		r.Answer = append(r.Answer, rr)
		_ = w.WriteMsg(r)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	r := exchange(t, s, "udp", question("some.long.name.example.com.", mdns.TypeA))
	if n := r.Answer[0].Header().Name; n != "some.long.name.example.com." {
		t.Errorf("the owner is %s", n)
	}
}

func TestForwardAnswersAndKeeps(t *testing.T) {
	u := startUpstream(t, answerWith("@ 100 IN A 192.0.2.1"))
	s := start(t, Options{Upstream: upstreams(u)})
	for i := range 5 {
		name := []string{"www.example.com.", "WWW.Example.COM."}[i%2]
		r := exchange(t, s, []string{"udp", "tcp"}[i%2], question(name, mdns.TypeA))
		if firstA(r) != "192.0.2.1" || r.Answer[0].Header().Name != name || !r.RecursionAvailable || r.Authoritative {
			t.Fatalf("wrong answer:\n%v", r)
		}
		if ttl := r.Answer[0].Header().Ttl; ttl > 100 || ttl < 90 {
			t.Errorf("TTL %d", ttl)
		}
	}
	if n := u.udp.Load() + u.tcp.Load(); n != 1 {
		t.Errorf("the upstream was asked %d times", n)
	}
}

func TestForwardKeepsDenials(t *testing.T) {
	u := startUpstream(t, answerWith("example.com. 60 IN SOA ns.example.com. me.example.com. 1 2 3 4 30"))
	s := start(t, Options{Upstream: upstreams(u)})
	for range 3 {
		r := exchange(t, s, "udp", question("nope.example.com.", mdns.TypeA))
		if r.Rcode != mdns.RcodeNameError || len(r.Ns) != 1 {
			t.Fatalf("wrong answer:\n%v", r)
		}
	}
	if n := u.udp.Load(); n != 1 {
		t.Errorf("the upstream was asked %d times", n)
	}
}

// TTLs count down while an answer is kept, and end it.
func TestEntryTTL(t *testing.T) {
	c := newCache(100, 0)
	m := question("a.example.", mdns.TypeA)
	m.Response = true
	for _, ttl := range []string{"10", "20"} {
		rr, _ := mdns.NewRR("a.example. " + ttl + " IN A 192.0.2.1")
		m.Answer = append(m.Answer, rr)
	}
	raw, _ := m.Pack()
	e, err := newEntry(raw, []byte("\x01a\x07example\x00"))
	if err != nil {
		t.Fatal(err)
	}
	c.put("k", e, 1000)
	for age, want := range map[int64]string{0: "10 20", 1: "9 19", 9: "1 11", 10: "gone", 4000: "gone", -5: "10 20"} {
		got := "gone"
		if e, a, _ := c.get([]byte("k"), 1000+age); e != nil {
			m := e.message([]byte("\x01a\x07example\x00"), 1, a)
			got = fmt.Sprint(m.Answer[0].Header().Ttl, " ", m.Answer[1].Header().Ttl)
		}
		if got != want {
			t.Errorf("after %d seconds: %s, want %s", age, got, want)
		}
	}
}

// Answers with another id, another question, other case, or a response bit
// that is missing are not taken, also when they come first.
func TestForgedAnswersAreNotTaken(t *testing.T) {
	for what, forge := range map[string]func(r *mdns.Msg){
		"id":       func(r *mdns.Msg) { r.Id++ },
		"name":     func(r *mdns.Msg) { r.Question[0].Name = "evil." + r.Question[0].Name },
		"type":     func(r *mdns.Msg) { r.Question[0].Qtype = mdns.TypeTXT },
		"class":    func(r *mdns.Msg) { r.Question[0].Qclass = mdns.ClassCHAOS },
		"query":    func(r *mdns.Msg) { r.Response = false },
		"opcode":   func(r *mdns.Msg) { r.Opcode = mdns.OpcodeNotify },
		"question": func(r *mdns.Msg) { r.Question = nil },
		"case": func(r *mdns.Msg) {
			n := r.Question[0].Name
			if r.Question[0].Name = strings.ToLower(n); n == r.Question[0].Name {
				r.Question[0].Name = strings.ToUpper(n)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
				if w.RemoteAddr().Network() == "udp" {
					f := new(mdns.Msg).SetReply(m)
					rr, _ := mdns.NewRR(m.Question[0].Name + " 100 IN A 203.0.113.66")
					f.Answer = append(f.Answer, rr)
					forge(f)
					_ = w.WriteMsg(f)
				}
				answerWith("@ 100 IN A 192.0.2.1")(w, m, n)
			})
			s := start(t, Options{Upstream: upstreams(u)})
			for range 3 {
				if got := firstA(exchange(t, s, "udp", question("some.long.name.example.com.", mdns.TypeA))); got != "192.0.2.1" {
					t.Fatalf("answered %s", got)
				}
			}
		})
	}
}

// Only the answer of an upstream from its own address and port counts; others
// do not even wake the socket. A flood of wrong answers ends the try.
func TestFloodOfForgeriesEnds(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, _ int64) {
		f := new(mdns.Msg).SetReply(m)
		for range 4 * maxMismatches {
			f.Id++
			_ = w.WriteMsg(f)
		}
	})
	s := start(t, Options{Upstream: upstreams(u)})
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
		t.Errorf("answered %v", r)
	}
}

// An upstream that changes the case of names is found out over TCP and used
// without mixed case from then on.
func TestUpstreamThatLowersNames(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		m.Question[0].Name = strings.ToLower(m.Question[0].Name)
		answerWith("@ 0 IN A 192.0.2.1")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	for i := range 4 {
		if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("mixed%d.example.com.", i), mdns.TypeA))); got != "192.0.2.1" {
			t.Fatalf("answered %s", got)
		}
	}
	if n := u.tcp.Load(); n > 2 {
		t.Errorf("%d questions over TCP: the upstream was not remembered", n)
	}
}

func TestTruncatedAnswerIsAskedOverTCP(t *testing.T) {
	many := make([]string, 200)
	for i := range many {
		many[i] = fmt.Sprintf("@ 100 IN A 192.0.2.%d", i)
	}
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		if w.RemoteAddr().Network() == "udp" {
			r := new(mdns.Msg).SetReply(m)
			r.Truncated = true
			_ = w.WriteMsg(r)
			return
		}
		answerWith(many...)(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	r := exchange(t, s, "udp", question("big.example.com.", mdns.TypeA))
	r.Compress = true
	if !r.Truncated || r.Len() > minUDP || len(r.Answer) < 20 {
		t.Errorf("over UDP: truncated %v, %d bytes, %d answers", r.Truncated, r.Len(), len(r.Answer))
	}
	if r = exchange(t, s, "tcp", question("big.example.com.", mdns.TypeA)); r.Truncated || len(r.Answer) != 200 {
		t.Errorf("over TCP: truncated %v, %d answers", r.Truncated, len(r.Answer))
	}
}

// A dead upstream costs one try; after two it is left out until it answers.
func TestDeadUpstreamIsLeftOut(t *testing.T) {
	var silent atomic.Bool
	silent.Store(true)
	first := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		if !silent.Load() {
			answerWith("@ 0 IN A 192.0.2.1")(w, m, n)
		}
	})
	second := startUpstream(t, answerWith("@ 0 IN A 192.0.2.2"))
	s := start(t, Options{Upstream: upstreams(first, second), Sequential: true, Timeout: 200 * time.Millisecond})
	for i := range 5 {
		if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("n%d.example.com.", i), mdns.TypeA))); got != "192.0.2.2" {
			t.Fatalf("answered %s", got)
		}
	}
	u := s.forward.all()[0]
	if u.healthy() {
		t.Error("the silent upstream counts as healthy")
	}
	silent.Store(false)
	eventually(t, "the first upstream is asked again", func() bool {
		return firstA(exchange(t, s, "udp", question("back.example.com.", mdns.TypeA))) == "192.0.2.1"
	})
}

func TestNobodyThereIsServfail(t *testing.T) {
	s := start(t, Options{Upstream: []netip.AddrPort{dead(t), dead(t)}})
	begin := time.Now()
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
		t.Errorf("answered %v", r)
	}
	// The kernel says at once that nobody listens.
	if d := time.Since(begin); d > 1500*time.Millisecond {
		t.Errorf("took %v", d)
	}
}

// An upstream that cannot help is not the last word.
func TestServfailOfOneIsAskedOfTheNext(t *testing.T) {
	for _, rcode := range []int{mdns.RcodeServerFailure, mdns.RcodeRefused, mdns.RcodeNotImplemented} {
		bad := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, _ int64) {
			_ = w.WriteMsg(new(mdns.Msg).SetRcode(m, rcode))
		})
		good := startUpstream(t, answerWith("@ 0 IN A 192.0.2.2"))
		s := start(t, Options{Upstream: upstreams(bad, good), Sequential: true})
		if got := firstA(exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))); got != "192.0.2.2" {
			t.Errorf("%s: answered %s", mdns.RcodeToString[rcode], got)
		}
		if r := exchange(t, start(t, Options{Upstream: upstreams(bad)}), "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != rcode {
			t.Errorf("%s alone: answered %s", mdns.RcodeToString[rcode], mdns.RcodeToString[r.Rcode])
		}
	}
}

// A server of before EDNS answers FORMERR to it.
func TestUpstreamWithoutEDNS(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		if m.IsEdns0() != nil {
			_ = w.WriteMsg(new(mdns.Msg).SetRcode(m, mdns.RcodeFormatError))
			return
		}
		answerWith("@ 0 IN A 192.0.2.1")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	for i := range 3 {
		if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("n%d.example.com.", i), mdns.TypeA))); got != "192.0.2.1" {
			t.Fatalf("answered %s", got)
		}
	}
}

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

// A circle of servers is found at the start.
func TestLoopIsFound(t *testing.T) {
	s := start(t, Options{Listen: []string{"127.0.0.1:0"}, Upstream: []netip.AddrPort{dead(t)}})
	// s becomes its own upstream.
	s.forward.setMain(s.Addrs())
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.findLoops(ctx)
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure &&
		r.Rcode != mdns.RcodeRefused {
		t.Errorf("answered %v", r)
	}
	if u := s.forward.all()[0]; !u.looped.Load() {
		t.Error("the loop was not found")
	}
}

func TestStubDomains(t *testing.T) {
	main := startUpstream(t, answerWith("@ 0 IN A 192.0.2.1"))
	stub := startUpstream(t, answerWith("@ 0 IN A 192.0.2.2"))
	deep := startUpstream(t, answerWith("@ 0 IN A 192.0.2.3"))
	s := start(t, Options{Upstream: upstreams(main), Stubs: []Stub{
		{"corp.example", upstreams(stub)}, {"deep.corp.example.", upstreams(deep)},
	}})
	for name, want := range map[string]string{
		"www.example.": "192.0.2.1", "corp.example.": "192.0.2.2", "a.CORP.example.": "192.0.2.2",
		"xcorp.example.": "192.0.2.1", "a.deep.corp.example.": "192.0.2.3", "example.": "192.0.2.1",
	} {
		if got := firstA(exchange(t, s, "udp", question(name, mdns.TypeA))); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// DO and CD reach the upstream, records of unknown types the client.
func TestDNSSECAndUnknownTypesPass(t *testing.T) {
	var sawDO, sawCD atomic.Bool
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		o := m.IsEdns0()
		sawDO.Store(o != nil && o.Do())
		sawCD.Store(m.CheckingDisabled)
		answerWith("@ 100 IN TYPE65400 \\# 3 010203", "@ 100 IN RRSIG A 8 2 300 20300101000000 20200101000000 1 example.com. AAAA")(w, m, n)
	})
	s := start(t, Options{Upstream: upstreams(u)})
	m := question("www.example.com.", 65400)
	m.SetEdns0(1232, true)
	m.CheckingDisabled = true
	for range 2 {
		r := exchange(t, s, "udp", m)
		if len(r.Answer) != 2 || r.IsEdns0() == nil || !r.IsEdns0().Do() {
			t.Errorf("answered %v", r)
		}
	}
	if !sawDO.Load() || !sawCD.Load() {
		t.Error("the upstream saw no DO or CD")
	}
	exchange(t, s, "udp", question("www.example.com.", 65400))
	if sawDO.Load() {
		t.Error("an answer with DO is not one without")
	}
}

// behaviours 151, 155: an ExternalName outside the cluster is answered whole.
func TestExternalNameIsFollowedUpstream(t *testing.T) {
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		switch m.Question[0].Qtype {
		case mdns.TypeA:
			answerWith("@ 60 IN CNAME real.example.net.", "real.example.net. 60 IN A 192.0.2.9")(w, m, n)
		default:
			answerWith("example.net. 60 IN SOA ns.example.net. me.example.net. 1 2 3 4 30")(w, m, n)
		}
	})
	o := clusterOptions()
	o.Upstream = upstreams(u)
	s := start(t, o)
	fill(s.Zone(), objects(t))
	for range 2 {
		r := exchange(t, s, "udp", question("Ext.prod.svc.cluster.local.", mdns.TypeA))
		want := `NOERROR
Ext.prod.svc.cluster.local. 5 IN CNAME my.database.example.com.
my.database.example.com. 60 IN CNAME real.example.net.
real.example.net. 60 IN A 192.0.2.9`
		if got := tableText(r, s); got != want || !r.Authoritative {
			t.Errorf("answered\n%s\nwant\n%s", got, want)
		}
	}
	r := exchange(t, s, "tcp", question("ext.prod.svc.cluster.local.", mdns.TypeAAAA))
	if r.Rcode != mdns.RcodeNameError || len(r.Answer) != 1 || len(r.Ns) != 1 {
		t.Errorf("answered\n%v", r)
	}
	// behaviour 152: digits are a name nobody has to be asked for.
	asked := u.udp.Load()
	if r := exchange(t, s, "udp", question("ext-digits.prod.svc.cluster.local.", mdns.TypeA)); r.Rcode != mdns.RcodeNameError ||
		len(r.Answer) != 1 {
		t.Errorf("answered\n%v", r)
	}
	if u.udp.Load() != asked {
		t.Error("digits were asked of the upstream")
	}
}

// Reverse names of the ranges stay here; others go out.
func TestReverseNamesDoNotLeak(t *testing.T) {
	var leaked sync.Map
	u := startUpstream(t, func(w mdns.ResponseWriter, m *mdns.Msg, n int64) {
		leaked.Store(strings.ToLower(m.Question[0].Name), true)
		answerWith("@ 100 IN PTR out.example.")(w, m, n)
	})
	o := clusterOptions()
	o.Upstream = upstreams(u)
	s := start(t, o)
	for name, out := range map[string]bool{
		"9.9.96.10.in-addr.arpa.": false, "1.0.247.10.in-addr.arpa.": false, "x.9.96.10.in-addr.arpa.": false,
		"1.0.248.10.in-addr.arpa.": true, "1.2.0.192.in-addr.arpa.": true, "cluster.local.": false, "svc.cluster.local.": false,
		reverse(t, "fd00:10:96::99"): false, reverse(t, "fd00:10:244:ff::1"): false, reverse(t, "fd00:10:97::1"): true,
		reverse(t, "2001:db8::1"): true,
	} {
		exchange(t, s, "udp", question(name, mdns.TypePTR))
		if _, ok := leaked.Load(name); ok != out {
			t.Errorf("%s asked of the upstream: %v, want %v", name, ok, out)
		}
	}
}

// reverse is the reverse name of an address.
func reverse(t *testing.T, addr string) string {
	t.Helper()
	name, err := mdns.ReverseAddr(addr)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// Every domain of the cluster is answered here, whatever an upstream would say.
func TestSeveralDomainsOverSockets(t *testing.T) {
	o := clusterOptions()
	o.Domains = []string{"cluster.local", "k8s.example.com"}
	o.Upstream = upstreams(startUpstream(t, answerWith("@ 0 IN A 192.0.2.1")))
	s := start(t, o)
	fill(s.Zone(), objects(t))
	for name, want := range map[string]string{
		"my-service.prod.svc.cluster.local.": "10.96.0.20", "my-service.prod.svc.k8s.example.com.": "10.96.0.20",
		"missing.prod.svc.k8s.example.com.": "NXDOMAIN", "my-service.prod.svc.example.com.": "192.0.2.1", "k8s.example.org.": "192.0.2.1",
	} {
		if got := firstA(exchange(t, s, "udp", question(name, mdns.TypeA))); got != want {
			t.Errorf("%s is %s, not %s", name, got, want)
		}
	}
}

// The zone follows the API through the feeds; see api_test.go. Here only that
// a Service without an API client can be entered by hand.
func TestZoneByHand(t *testing.T) {
	s := start(t, Options{})
	if !s.Ready() {
		eventually(t, "ready", s.Ready)
	}
	s.Zone().SetService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1"}})
	if got := firstA(exchange(t, s, "udp", question("b.a.svc.cluster.local.", mdns.TypeA))); got != "10.0.0.1" {
		t.Errorf("answered %s", got)
	}
}
