package traffic

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
)

// shown returns the metrics as text, a line each.
func shown(t *testing.T, b *Book, states ...State) string {
	t.Helper()
	return lbtest.Metrics(t, Collector{Book: b, States: func() []State { return states }})
}

func name(n string) svc.Name { return svc.Name{Namespace: "default", Name: n} }

func TestMetrics(t *testing.T) {
	b := NewBook()
	s := b.Service(name("web"))
	at := netip.MustParseAddrPort("10.0.0.1:80")
	e, again := s.Endpoint(at), s.Endpoint(at) // of two ports
	s.Opened()
	s.Request(200, 7*time.Millisecond)
	s.Request(503, time.Hour)
	s.Request(101, -1)
	s.Carried(3, 4)
	s.Retried()
	s.Rejected(ClientLimit)
	e.Use(2)
	again.Use(-1)
	e.Answered(200, 250*time.Millisecond)
	again.Answered(0, time.Hour)
	e.Failed()
	e.Ejected()
	e.Carried(5, 6)
	e.Retried()
	state := State{Service: name("web"), Connections: 5, Healthy: 2, Unhealthy: 1, Absent: []netip.AddrPort{at},
		Certificates: map[string]time.Time{"tls": time.Now().Add(-48 * time.Hour)}}
	text := shown(t, b, state)
	const of, pod = `namespace="default",service="web"`, `endpoint="10.0.0.1:80",namespace="default",service="web"`
	for _, line := range []string{
		`fairlead_lb_requests_total{class="2xx",` + of + `} 1`, `fairlead_lb_requests_total{class="5xx",` + of + `} 1`,
		`fairlead_lb_requests_total{class="1xx",` + of + `} 1`, `fairlead_lb_requests_total{class="4xx",` + of + `} 0`,
		`fairlead_lb_request_duration_seconds_bucket{` + of + `,le="0.005"} 0`,
		`fairlead_lb_request_duration_seconds_bucket{` + of + `,le="0.01"} 1`,
		`fairlead_lb_request_duration_seconds_count{` + of + `} 2`,
		`fairlead_lb_bytes_total{` + of + `,to="endpoints"} 3`, `fairlead_lb_bytes_total{` + of + `,to="clients"} 4`,
		`fairlead_lb_connections_total{` + of + `} 1`, `fairlead_lb_open_connections{` + of + `} 5`, `fairlead_lb_retries_total{` + of + `} 1`,
		`fairlead_lb_rejected_total{` + `namespace="default",reason="client-limit",service="web"} 1`,
		`fairlead_lb_endpoints{` + of + `,state="unhealthy"} 1`, `fairlead_lb_endpoint_connections{` + pod + `} 1`,
		`fairlead_lb_endpoint_requests_total{class="none",` + pod + `} 1`, `fairlead_lb_endpoint_answer_seconds_total{` + pod + `} 0.25`,
		`fairlead_lb_endpoint_bytes_total{` + pod + `,to="endpoints"} 5`, `fairlead_lb_endpoint_bytes_total{` + pod + `,to="clients"} 6`,
		`fairlead_lb_endpoint_answer_duration_seconds_bucket{` + pod + `,le="0.1"} 0`,
		`fairlead_lb_endpoint_answer_duration_seconds_count{` + pod + `} 1`,
		`fairlead_lb_endpoint_answer_duration_seconds_bucket{` + pod + `,le="0.25"} 1`,
		`fairlead_lb_endpoint_answer_duration_seconds_sum{` + pod + `} 0.25`,
		`fairlead_lb_endpoint_retries_total{` + pod + `} 1`, `fairlead_lb_endpoint_healthy{` + pod + `} 0`,
		`fairlead_lb_endpoint_failures_total{` + pod + `} 1`, `fairlead_lb_endpoint_ejections_total{` + pod + `} 1`,
		`fairlead_lb_certificate_days{namespace="default",secret="tls",service="web"} -2.0`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s", line)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
	e.Leave()
	if text := shown(t, b, state); !strings.Contains(text, `endpoint="10.0.0.1:80"`) {
		t.Error("the series end although the endpoint is used")
	}
	again.Leave()
	if text := shown(t, b, state); strings.Contains(text, `endpoint="`) {
		t.Error("the series go on although the endpoint has left")
	}
	b.Drop(name("web"))
	e.Answered(200, 0) // a request that still ends
	s.Endpoint(at).Leave()
	if text := shown(t, b); text != "" {
		t.Errorf("a Service that is gone has %s", text)
	}
}

// However many Services and endpoints there are, the series are bounded, and nothing is lost; a place that gets free is used.
func TestSeriesAreBounded(t *testing.T) {
	b := newBook(limits{services: 3, endpoints: 5, ofService: 4, routes: 2})
	var all []*Endpoint
	for i := range 50 {
		s := b.Service(name(string(rune('a' + i))))
		s.Opened()
		for port := range uint16(10) {
			e := s.Endpoint(netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), 1+port))
			e.Failed()
			s.Request(200, time.Second)
			e.Answered(200, time.Minute)
			all = append(all, e)
		}
	}
	text := shown(t, b)
	sum := func(prefix string) (series, total int) {
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, prefix+"{") {
				series++
				n, err := strconv.Atoi(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]))
				if err != nil {
					t.Fatal(err)
				}
				total += n
			}
		}
		return series, total
	}
	for i := range 50 { // as rules do, two of a route
		routes, n := Routes{Service: b.Service(name("a"))}, RouteName{Kind: "HTTPRoute", Name: name(strconv.Itoa(i / 2))}
		for range 2 {
			routes.Of(i, n).Request(200, time.Second)
			routes.Of(i, n).Opened()
		}
	}
	text = shown(t, b)
	for _, family := range []string{"fairlead_lb_route_requests_total", "fairlead_lb_route_connections_total"} {
		if series, total := sum(family); series != 3 || total != 100 {
			t.Errorf("%d series of %s with %d, want 2 and one of others, with 100", series, family, total)
		}
	}
	if series, total := sum("fairlead_lb_connections_total"); series != 4 || total != 50 {
		t.Errorf("%d series of Services with %d connections, want 4 with 50", series, total)
	}
	if series, total := sum("fairlead_lb_endpoint_failures_total"); series != 8 || total != 30 {
		t.Errorf("%d series of endpoints with %d failures, want 5 and 3 of others, with 30", series, total)
	}
	if series, total := sum("fairlead_lb_endpoint_answer_duration_seconds_count"); series != 8 || total != 30 {
		t.Errorf("%d histograms of endpoints with %d answers, want 5 and 3 of others, with 30", series, total)
	}
	if series, total := sum("fairlead_lb_endpoint_answer_duration_seconds_bucket"); series != 8*(len(answerBuckets)+1) || total != 30 {
		t.Errorf("%d series of buckets with %d answers, want %d with 30", series, total, 8*(len(answerBuckets)+1))
	}
	if series, total := sum("fairlead_lb_endpoint_healthy"); series != 5 || total != 5 {
		t.Errorf("%d endpoints with their own series are shown, %d as healthy, want 5", series, total)
	}
	for _, e := range all {
		e.Leave()
	}
	for i := range 50 {
		b.Drop(name(string(rune('a' + i))))
	}
	if b.endpoints != 0 || len(b.services) != 0 || b.routes != 0 {
		t.Errorf("%d endpoints, %d Services and %d routes are left", b.endpoints, len(b.services), b.routes)
	}
	if e := b.Service(name("z")).Endpoint(netip.MustParseAddrPort("10.0.0.9:1")); !e.at.IsValid() {
		t.Error("a free place is not used")
	}
}

// A route that has been silent for long gives its series to another one, and gets them back when it is used again.
func TestSilentRoutesGiveWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBook(limits{services: 1, endpoints: 1, ofService: 1, routes: 2})
		routes := Routes{Service: b.Service(name("web"))}
		use := func(of string) string {
			routes.Of(of, RouteName{"Ingress", name(of)}).Request(204, time.Second)
			return shown(t, b)
		}
		has := func(text, route string) bool {
			return strings.Contains(text, `fairlead_lb_route_requests_total{class="2xx",kind="Ingress",namespace="default",route="`+route+`"`)
		}
		use("old")
		time.Sleep(routeRest - time.Second)
		if text := use("new"); !has(text, "default/old") || !has(text, "default/new") {
			t.Fatalf("not both have series: %s", text)
		}
		if text := use("third"); has(text, "default/third") || !strings.Contains(text, `kind="",namespace="default",route="other"`) {
			t.Errorf("one too many: %s", text)
		}
		time.Sleep(time.Second)
		if text := use("third"); has(text, "default/old") || !has(text, "default/third") {
			t.Errorf("a silent one has kept its series: %s", text)
		}
		time.Sleep(routeRest)
		if text := use("old"); !has(text, "default/old") {
			t.Errorf("one that is used again has none: %s", text)
		}
	})
}

func BenchmarkCount(b *testing.B) {
	book := NewBook()
	s := book.Service(name("web"))
	e := s.Endpoint(netip.MustParseAddrPort("10.0.0.1:80"))
	for b.Loop() {
		s.Request(200, 3*time.Millisecond)
		s.Carried(0, 100)
		e.Answered(200, time.Millisecond)
	}
}
