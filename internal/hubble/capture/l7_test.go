package capture

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	mdns "github.com/miekg/dns"
	"google.golang.org/grpc"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/svc"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// applications returns the Applications of a node with the Pods web-1 at 10.244.0.2 and client-1 at 10.244.0.5.
func applications() (*Applications, *hubble.Ring) {
	peers := NewPeers("node")
	peers.Pods().Set(pod("web-1", "a", 1, "10.244.0.2"))
	peers.Pods().Set(pod("client-1", "b", 1, "10.244.0.5"))
	ring := hubble.NewRing(1024)
	return NewApplications(ring, peers), ring
}

// stream gets the answers of an Observer.
type stream struct {
	grpc.ServerStream

	ctx context.Context
	got []*flow.Flow
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) Send(m *observer.GetFlowsResponse) error {
	s.got = append(s.got, m.GetFlow())
	return nil
}

// answered are the flows that a ring has, as clients get them.
func answered(t *testing.T, ring *hubble.Ring) []*flow.Flow {
	t.Helper()
	s := &stream{ctx: t.Context()}
	if err := hubble.NewObserver("node", "1.2.3", ring).GetFlows(&observer.GetFlowsRequest{}, s); err != nil {
		t.Fatal(err)
	}
	return s.got
}

// summaryOf is what the hubble command prints of a flow.
func summaryOf(m *flow.Flow) string { return m.GetSummary() } //nolint:staticcheck // the command reads it

// A request is a flow to the endpoint, and its answer one from there; what no endpoint got is dropped, and the proxy answers.
func TestRequests(t *testing.T) {
	for _, c := range []struct {
		name              string
		pod               string
		status            int
		verdict           flow.Verdict
		reason            flow.DropReason
		destination, from string
	}{
		{"forwarded", "10.244.0.2:8080", 200, flow.Verdict_FORWARDED, 0, "10.244.0.2", "web-1"},
		{"the endpoint refuses", "10.244.0.2:8080", 503, flow.Verdict_FORWARDED, 0, "10.244.0.2", "web-1"},
		{"no endpoint", "", 503, flow.Verdict_DROPPED, flow.DropReason_SERVICE_BACKEND_NOT_FOUND, "10.96.0.1", ""},
		{"too large", "", 413, flow.Verdict_DROPPED, 0, "10.96.0.1", ""},
		{"not for this listener", "", 421, flow.Verdict_DROPPED, 0, "10.96.0.1", ""},
		{"redirected by the proxy", "", 301, flow.Verdict_FORWARDED, 0, "10.96.0.1", ""},
	} {
		a, ring := applications()
		m := &seen.Request{
			Service: svc.Name{Namespace: "shop", Name: "web"}, Client: ap("10.244.0.5:40000"), At: ap("10.96.0.1:80"),
			Method: "GET", Host: "web", Target: "/cart?token=secret", Protocol: "HTTP/1.1", Status: c.status,
			Began: noon, Answered: noon.Add(30 * time.Millisecond),
		}
		if c.pod != "" {
			m.Pod = ap(c.pod)
		}
		a.Requests().Request(m)
		all := answered(t, ring)
		if len(all) != 2 {
			t.Fatalf("%s: %v", c.name, all)
		}
		request, answer := all[0], all[1]
		if request.GetVerdict() != c.verdict || request.GetDropReasonDesc() != c.reason || request.GetIP().GetDestination() != c.destination ||
			request.GetDestination().GetPodName() != c.from || request.GetSource().GetPodName() != "client-1" ||
			request.GetDestinationService().GetName() != "web" || request.GetIsReply().GetValue() ||
			request.GetL7().GetType() != flow.L7FlowType_REQUEST || request.GetL7().GetHttp().GetCode() != 0 ||
			summaryOf(request) != "HTTP/1.1 GET http://web/cart" || !request.GetTime().AsTime().Equal(noon) {
			t.Errorf("%s: the request: %v", c.name, request)
		}
		if answer.GetVerdict() != flow.Verdict_FORWARDED || answer.GetIP().GetSource() != c.destination ||
			answer.GetSource().GetPodName() != c.from || answer.GetDestination().GetPodName() != "client-1" ||
			answer.GetSourceService().GetName() != "web" || answer.GetDestinationService() != nil || !answer.GetIsReply().GetValue() ||
			answer.GetL7().GetType() != flow.L7FlowType_RESPONSE || answer.GetL7().GetHttp().GetCode() != uint32(c.status) ||
			answer.GetL7().GetLatencyNs() != 30e6 || answer.GetL4().GetTCP().GetDestinationPort() != 40000 {
			t.Errorf("%s: the answer: %v", c.name, answer)
		}
	}
}

// A URL has no query and no password, and whatever a client sends it is short and printable: a flow must be valid UTF-8.
func TestURLs(t *testing.T) {
	for _, c := range []struct{ host, target, want string }{
		{"web:8080", "/a/b?token=secret#x", "https://web:8080/a/b"},
		{"web", "/#secret", "https://web/"},
		{"user:secret@web", "/", "https://web/"},
		{"other", "http://user:secret@web/a?b", "http://web/a"},
		{"other", "http://web", "http://web"},
		{"web", "/redirect://x?y", "https://web/redirect://x"},
		{"web", "*", "https://web*"},
		{"web", "user:secret@host", "https://host"},
		{"web", "user:secret://x@host", "https://host"},
		{"web", "http://host?secret/x@y", "http://host"},
		{"web\xff", "/\x1b[31m\xc3\x28 é", "https://web%FF/%1B[31m%C3(%20%C3%A9"},
		{"web", "/" + strings.Repeat("x", 9999), "https://web/" + strings.Repeat("x", maxURL-len("https://web/"))},
		{"", "", "https://"},
	} {
		if got := urlOf(&seen.Request{Host: c.host, Target: c.target, Secure: true}); got != c.want {
			t.Errorf("%q %q: %q, want %q", c.host, c.target, got, c.want)
		}
	}
	for _, c := range []struct{ target, want string }{
		{"user:secret@host:443", "http://host:443"},
		{"user:sec?ret@host:443", "http://host:443"},
		{"user:se/cret@host:443?token=secret", "http://host:443"},
		{"http://user:se/cret@host/secret", "http://host"},
		{"host:443", "http://host:443"},
		{"", "http://web"}, // of HTTP/2
	} {
		if got := urlOf(&seen.Request{Method: "CONNECT", Host: "web", Target: c.target}); got != c.want {
			t.Errorf("CONNECT %q: %q, want %q", c.target, got, c.want)
		}
	}
	a, ring := applications()
	a.Requests().Request(&seen.Request{
		Client: ap("192.0.2.1:1"), At: ap("192.0.2.2:80"), Method: "\xff" + strings.Repeat("M", 99), Host: "\xff",
	})
	if all := answered(t, ring); len(all) != 2 || len(all[0].GetL7().GetHttp().GetMethod()) != maxMethod {
		t.Errorf("a hostile request: %v", all)
	}
}

// Of many requests as many are recorded in a second as is promised, and the others are told. Questions have their own share.
func TestQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, ring := applications()
		if a.Requests().Wants() {
			t.Error("a request is recorded before Run")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		for second := range 3 {
			synctest.Wait()
			wanted := 0
			for range 5 * RequestRate {
				if a.Requests().Wants() {
					wanted++
				}
			}
			if wanted != RequestRate || !a.Questions().Wants() {
				t.Errorf("second %d: %d requests are recorded, want %d and a question", second, wanted, RequestRate)
			}
			time.Sleep(time.Second)
		}
		synctest.Wait()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		all := make([]hubble.Flow, 8)
		n, _, _ := ring.Read(0, all)
		missed := uint64(0)
		for _, f := range all[:n] {
			missed += f.Missed
		}
		if want := uint64(2 * (3*4*RequestRate + 1)); missed != want {
			t.Errorf("%d flows are missing, want %d", missed, want)
		}
	})
}

// A question is a flow with the name, and its answer one with what the client got.
func TestQuestions(t *testing.T) {
	for _, c := range []struct {
		name    string
		typ     uint16
		rcode   int
		records []string
		want    string // of the answer
		ttl     uint32
	}{
		{"web.shop.svc.cluster.local.", mdns.TypeA, 0, []string{"web.shop.svc.cluster.local. 5 IN A 10.96.0.1"},
			`DNS Answer "10.96.0.1" TTL: 5 (Proxy web.shop.svc.cluster.local. A)`, 5},
		{"web.", mdns.TypeAAAA, 0, []string{"web. 30 IN CNAME other.", "other. 9 IN AAAA fd00::1"},
			`DNS Answer "fd00::1" CNAMEs: "other." TTL: 9 (Proxy web. AAAA)`, 9},
		{"missing.", mdns.TypeA, mdns.RcodeNameError, nil, `DNS Answer RCode: NXDOMAIN TTL: 0 (Proxy missing. A)`, 0},
		{"a\\000\\255.", mdns.TypeTXT, 0, nil, `DNS Answer  TTL: 0 (Proxy a\000\255. TXT)`, 0},
	} {
		var m mdns.Msg
		m.SetQuestion(c.name, c.typ)
		m.Response, m.Rcode = true, c.rcode
		for _, text := range c.records {
			r, err := mdns.NewRR(text)
			if err != nil {
				t.Fatal(err)
			}
			m.Answer = append(m.Answer, r)
		}
		text, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		a, ring := applications()
		a.Questions().Question(&seen.Question{
			Client: ap("10.244.0.5:40000"), Server: ap("10.96.0.10:53"), Protocol: svc.UDP, Answer: text, Answered: noon, Latency: time.Millisecond,
		})
		all := answered(t, ring)
		if len(all) != 2 {
			t.Fatalf("%s: %v", c.name, all)
		}
		d := all[1].GetL7().GetDns()
		if summaryOf(all[0]) != "DNS Query "+c.name+" "+mdns.Type(c.typ).String() || all[0].GetL4().GetUDP().GetDestinationPort() != 53 ||
			summaryOf(all[1]) != c.want || d.GetRcode() != uint32(c.rcode) || d.GetTtl() != c.ttl || d.GetObservationSource() != "proxy" ||
			len(d.GetRrtypes()) != len(c.records) || all[1].GetDestination().GetPodName() != "client-1" {
			t.Errorf("%s: %v", c.name, all)
		}
	}
	a, ring := applications()
	for _, text := range [][]byte{nil, {1, 2, 3}, make([]byte, 12)} {
		a.Questions().Question(&seen.Question{Client: ap("10.244.0.5:40000"), Server: ap("10.96.0.10:53"), Answer: text})
	}
	if all := answered(t, ring); len(all) != 0 {
		t.Errorf("answers without a question: %v", all)
	}
}

// What a flow keeps of an answer is bounded: an attacker may write the answers of the server that a client asks.
func TestAnswersAreBounded(t *testing.T) {
	m := &mdns.Msg{Question: []mdns.Question{{Name: strings.Repeat(`\000`, 250) + ".", Qtype: mdns.TypeA}}}
	for range 2 * maxRecords {
		m.Answer = append(m.Answer, &mdns.CNAME{Hdr: mdns.RR_Header{Rrtype: mdns.TypeCNAME}, Target: strings.Repeat(`\000`, 250) + "."})
	}
	got := dnsOf(m)
	if len(got.Query) != maxName || len(got.CNAMEs) != maxCNAMEs || len(got.CNAMEs[0]) != maxName || len(got.Types) != maxRecords {
		t.Errorf("a name of %d bytes, %d CNAMEs, %d types; want %d, %d, %d", len(got.Query), len(got.CNAMEs), len(got.Types),
			maxName, maxCNAMEs, maxRecords)
	}
}

// Filters by fields of HTTP and DNS take exactly the flows that have them.
func TestFiltersOfApplications(t *testing.T) {
	a, ring := applications()
	for _, status := range []int{200, 503} {
		a.Requests().Request(&seen.Request{
			Client: netip.AddrPortFrom(netip.MustParseAddr("10.244.0.5"), uint16(status)), At: ap("10.96.0.1:80"), Pod: ap("10.244.0.2:8080"),
			Method: "GET", Host: "web", Target: "/cart/7", Protocol: "HTTP/1.1", Status: status, Began: noon, Answered: noon,
		})
	}
	var m mdns.Msg
	m.SetQuestion("web.shop.", mdns.TypeA)
	text, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	a.Questions().Question(&seen.Question{
		Client: ap("10.244.0.5:1"), Server: ap("10.96.0.10:53"), Protocol: svc.UDP, Answer: text, Answered: noon,
	})
	type f = flow.FlowFilter
	for _, c := range []struct {
		name string
		f    *f
		want int // of 6; -1 is an error
	}{
		{"http", &f{Protocol: []string{"HTTP"}}, 4},
		{"dns", &f{Protocol: []string{"dns"}}, 2},
		{"tcp and dns", &f{Protocol: []string{"tcp", "dns"}}, 6},
		{"status", &f{HttpStatusCode: []string{"503"}}, 1},
		{"beginning of a status", &f{HttpStatusCode: []string{"5+", "20+"}}, 2},
		{"another status", &f{HttpStatusCode: []string{"50"}}, -1},
		{"no status", &f{HttpStatusCode: []string{"x"}}, -1},
		{"method", &f{HttpMethod: []string{"get"}}, 4},
		{"another method", &f{HttpMethod: []string{"POST"}}, 0},
		{"path", &f{HttpPath: []string{"^/cart/"}}, 4},
		{"another path", &f{HttpPath: []string{"web"}}, 0},
		{"URL", &f{HttpUrl: []string{"^http://web/"}}, 4},
		{"no expression", &f{HttpUrl: []string{"("}}, -1},
		{"a long expression", &f{HttpUrl: []string{strings.Repeat("a", 1001)}}, -1},
		{"query", &f{DnsQuery: []string{"^web\\."}}, 2},
		{"status and method", &f{HttpStatusCode: []string{"5+"}, HttpMethod: []string{"GET"}}, 1},
		{"answers", &f{Reply: []bool{true}}, 3},
		{"kind", &f{EventType: []*flow.EventTypeFilter{{Type: 129}}}, 6},
	} {
		s := &stream{ctx: t.Context()}
		err := hubble.NewObserver("node", "1.2.3", ring).GetFlows(&observer.GetFlowsRequest{Whitelist: []*f{c.f}}, s)
		if (err != nil) != (c.want < 0) || err == nil && len(s.got) != c.want {
			t.Errorf("%s: %d flows, %v; want %d", c.name, len(s.got), err, c.want)
		}
	}
}

// BenchmarkWants is what a request costs that is not recorded.
func BenchmarkWants(b *testing.B) {
	a, _ := applications()
	r := a.Requests()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			r.Wants()
		}
	})
}

// BenchmarkRequest is what a request costs that is recorded: at most RequestRate of them in a second.
func BenchmarkRequest(b *testing.B) {
	a, _ := applications()
	r := a.Requests()
	m := &seen.Request{
		Service: svc.Name{Namespace: "shop", Name: "web"}, Client: ap("10.244.0.5:40000"), At: ap("10.96.0.1:80"), Pod: ap("10.244.0.2:8080"),
		Method: "GET", Host: "web", Target: "/cart?token=secret", Protocol: "HTTP/1.1", Status: 200, Began: noon, Answered: noon,
	}
	b.ReportAllocs()
	for b.Loop() {
		r.Request(m)
	}
}
