package dns

import (
	"context"
	"fmt"
	"log/slog"
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
	var log lines
	s := start(t, Options{
		Upstream: upstreams(first, second), Sequential: true, Timeout: 200 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	for i := range 5 {
		if got := firstA(exchange(t, s, "udp", question(fmt.Sprintf("n%d.example.com.", i), mdns.TypeA))); got != "192.0.2.2" {
			t.Fatalf("answered %s", got)
		}
	}
	u := s.forward.all()[0]
	if u.healthy() {
		t.Error("the silent upstream counts as healthy")
	}
	if c := s.UpstreamsCondition(); c.Status != corev1.ConditionFalse || c.Reason != "SomeDead" ||
		!strings.HasPrefix(c.Message, "1 of 2 upstreams of DNS do not answer, or lead back here: "+u.name+": look at") {
		t.Errorf("condition %+v", c)
	}
	if text := log.all(); strings.Count(text, "upstream does not answer") != 1 || !strings.Contains(text, u.name) {
		t.Errorf("want one line that names the upstream, logged:\n%s", text)
	}
	silent.Store(false)
	eventually(t, "the first upstream is asked again", func() bool {
		return firstA(exchange(t, s, "udp", question("back.example.com.", mdns.TypeA))) == "192.0.2.1"
	})
	if c := s.UpstreamsCondition(); c.Status != corev1.ConditionTrue {
		t.Errorf("condition %+v of an upstream that is back", c)
	}
}

func TestNoUpstreamIsServfail(t *testing.T) {
	s := start(t, Options{Upstream: []netip.AddrPort{dead(t), dead(t)}})
	begin := time.Now()
	if r := exchange(t, s, "udp", question("www.example.com.", mdns.TypeA)); r.Rcode != mdns.RcodeServerFailure {
		t.Errorf("answered %v", r)
	}
	// The kernel reports at once that there is no listener.
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

// A circle of servers is found at the start.
func TestLoopIsFound(t *testing.T) {
	s := start(t, Options{Listen: []string{"127.0.0.1:0"}, Upstream: []netip.AddrPort{dead(t)}})
	// s becomes its own upstream.
	s.forward.setMain(s.Addrs())
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.loops.find(ctx)
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
	// behaviour 152: digits are a name that no upstream is asked for.
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
