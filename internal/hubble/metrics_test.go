package hubble

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/svc"
)

// The metrics count what is recorded, under Hubble's names and labels.
func TestMetrics(t *testing.T) {
	ring, m := NewRing(8), NewMetrics()
	ring.Count(m)
	for _, f := range sample() {
		f.SYN = f.Protocol == svc.TCP // one of two is refused
		ring.Add(f)
	}
	ring.Add(MissedFlow(noon, 99))
	http := Flow{
		Protocol: svc.TCP, Destination: ap("10.96.0.1:80"), From: World, To: World, Direction: flow.TrafficDirection_EGRESS,
		Reason: flow.DropReason_SERVICE_BACKEND_NOT_FOUND,
		L7:     &L7{Latency: time.Second, Refused: true, HTTP: &HTTP{Method: "GET", Protocol: "HTTP/1.1", Code: 503}},
	}
	ring.Add(http)
	http.Answer, http.Reason = true, 0
	ring.Add(http)
	dns := Flow{
		Protocol: svc.UDP, Destination: ap("10.96.0.10:53"), From: World, To: World,
		L7: &L7{DNS: &DNS{Type: "A", IPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}}},
	}
	ring.Add(dns)
	dns.Answer, dns.L7.DNS.Types = true, []string{"CNAME", "A"}
	ring.Add(dns)
	const want = `
# HELP hubble_dns_queries_total Recorded questions of DNS.
# TYPE hubble_dns_queries_total counter
hubble_dns_queries_total{ips_returned="0",qtypes="A",rcode=""} 1
# HELP hubble_dns_response_types_total Records in recorded answers of DNS.
# TYPE hubble_dns_response_types_total counter
hubble_dns_response_types_total{qtypes="A",type="A"} 1
hubble_dns_response_types_total{qtypes="A",type="CNAME"} 1
# HELP hubble_dns_responses_total Recorded answers of DNS.
# TYPE hubble_dns_responses_total counter
hubble_dns_responses_total{ips_returned="1",qtypes="A",rcode="No Error"} 1
# HELP hubble_drop_total Recorded flows that were dropped or refused.
# TYPE hubble_drop_total counter
hubble_drop_total{protocol="HTTP",reason="SERVICE_BACKEND_NOT_FOUND"} 1
hubble_drop_total{protocol="TCP",reason="SERVICE_BACKEND_NOT_FOUND"} 1
# HELP hubble_flows_processed_total Flows that were recorded.
# TYPE hubble_flows_processed_total counter
hubble_flows_processed_total{protocol="DNS",subtype="DNS",type="L7",verdict="FORWARDED"} 2
hubble_flows_processed_total{protocol="HTTP",subtype="HTTP",type="L7",verdict="DROPPED"} 1
hubble_flows_processed_total{protocol="HTTP",subtype="HTTP",type="L7",verdict="FORWARDED"} 1
hubble_flows_processed_total{protocol="TCP",subtype="",type="Drop",verdict="DROPPED"} 1
hubble_flows_processed_total{protocol="TCP",subtype="to-network",type="Trace",verdict="FORWARDED"} 1
hubble_flows_processed_total{protocol="UDP",subtype="to-endpoint",type="Trace",verdict="FORWARDED"} 1
# HELP hubble_http_requests_total Recorded requests of HTTP.
# TYPE hubble_http_requests_total counter
hubble_http_requests_total{method="GET",protocol="HTTP/1.1",reporter="client",status="503"} 1
# HELP hubble_http_responses_total Recorded answers of HTTP.
# TYPE hubble_http_responses_total counter
hubble_http_responses_total{method="GET",reporter="client",status="503"} 1
# HELP hubble_lost_events_total About how many flows were not recorded.
# TYPE hubble_lost_events_total counter
hubble_lost_events_total{source="observer_events_queue"} 99
# HELP hubble_port_distribution_total Recorded flows by their destination port.
# TYPE hubble_port_distribution_total counter
hubble_port_distribution_total{port="53",protocol="UDP"} 2
hubble_port_distribution_total{port="8080",protocol="TCP"} 1
# HELP hubble_tcp_flags_total Recorded flows of TCP that were forwarded, by flag.
# TYPE hubble_tcp_flags_total counter
hubble_tcp_flags_total{family="IPv4",flag="SYN"} 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want), "hubble_dns_queries_total", "hubble_dns_responses_total",
		"hubble_drop_total", "hubble_flows_processed_total", "hubble_http_requests_total", "hubble_lost_events_total",
		"hubble_port_distribution_total", "hubble_tcp_flags_total", "hubble_dns_response_types_total",
		"hubble_http_responses_total"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(m, "hubble_http_request_duration_seconds"); n != 1 {
		t.Errorf("%d series of durations, want 1", n)
	}
}

// Methods that clients invent take no series from others.
func TestInventedMethods(t *testing.T) {
	m := NewMetrics()
	for i := range 100 {
		m.count(&Flow{Answer: true, L7: &L7{HTTP: &HTTP{Method: fmt.Sprint("M", i), Code: 405}}})
	}
	m.count(&Flow{Answer: true, L7: &L7{HTTP: &HTTP{Method: "GET", Code: 200}}})
	const want = `
# HELP hubble_http_requests_total Recorded requests of HTTP.
# TYPE hubble_http_requests_total counter
hubble_http_requests_total{method="GET",protocol="",reporter="unknown",status="200"} 1
hubble_http_requests_total{method="other",protocol="",reporter="unknown",status="405"} 100
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want), "hubble_http_requests_total"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(m, "hubble_http_request_duration_seconds"); n != 2 {
		t.Errorf("%d series of durations, want one for GET and one for other", n)
	}
}

// A client that uses all ports and methods makes no more series than the bound.
func TestSeriesAreBounded(t *testing.T) {
	m := NewMetrics()
	for i := range 2 * maxSeries {
		f := sample()[0]
		f.Destination = netip.AddrPortFrom(f.Destination.Addr(), uint16(i+1))
		m.count(&f)
		f.Answer, f.L7 = true, &L7{HTTP: &HTTP{Method: fmt.Sprint("M", i), Code: i}}
		m.count(&f)
	}
	for name, most := range map[string]int{
		"hubble_port_distribution_total": maxSeries, "hubble_http_requests_total": maxSeries, "hubble_http_request_duration_seconds": 0,
	} {
		if n := testutil.CollectAndCount(m, name); n != most+1 {
			t.Errorf("%s has %d series, want %d and the others", name, n, most)
		}
	}
}
