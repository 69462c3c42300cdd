package hubble

import (
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// Metrics count the flows that are recorded under the names and labels of Hubble's metrics.
type Metrics struct {
	flows, drops, ports, flags, questions, answers, records, requests, responses, lost *counter
	duration                                                                           *prometheus.HistogramVec
}

const (
	// maxSeries bounds the series of a metric: ports, and status codes and methods of HTTP, are the clients' and endpoints' choice.
	maxSeries = 500
	// otherLabel is the value of all labels of what is beyond a bound, and of methods that clients have invented.
	otherLabel = "other"
)

// bound lets through the first sets of labels.
type bound struct {
	most int

	mu    sync.Mutex
	known map[string]bool
}

func newBound(most int) *bound { return &bound{most: most, known: map[string]bool{}} }

// of returns labels, or as many others if there are too many sets already.
func (b *bound) of(labels ...string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := strings.Join(labels, "\x00")
	if b.known[key] {
		return labels
	}
	if len(b.known) < b.most {
		b.known[key] = true
		return labels
	}
	out := make([]string, len(labels))
	for i := range out {
		out[i] = otherLabel
	}
	return out
}

// counter is a metric with a bound.
type counter struct {
	*prometheus.CounterVec

	bound *bound
}

func (c *counter) add(n float64, labels ...string) {
	c.WithLabelValues(c.bound.of(labels...)...).Add(n)
}

func newCounter(o prometheus.CounterOpts, labels ...string) *counter {
	return &counter{prometheus.NewCounterVec(o, labels), newBound(maxSeries)}
}

// NewMetrics returns Metrics that have counted nothing.
func NewMetrics() *Metrics {
	return &Metrics{
		flows: newCounter(prometheus.CounterOpts{Name: "hubble_flows_processed_total", Help: "Flows that were recorded."},
			"protocol", "type", "subtype", "verdict"),
		drops: newCounter(prometheus.CounterOpts{Name: "hubble_drop_total", Help: "Recorded flows that were dropped or refused."},
			"reason", "protocol"),
		ports: newCounter(prometheus.CounterOpts{Name: "hubble_port_distribution_total", Help: "Recorded flows by their destination port."},
			"protocol", "port"),
		flags: newCounter(prometheus.CounterOpts{Name: "hubble_tcp_flags_total", Help: "Recorded flows of TCP that were forwarded, by flag."},
			"flag", "family"),
		questions: newCounter(prometheus.CounterOpts{Name: "hubble_dns_queries_total", Help: "Recorded questions of DNS."},
			"rcode", "qtypes", "ips_returned"),
		answers: newCounter(prometheus.CounterOpts{Name: "hubble_dns_responses_total", Help: "Recorded answers of DNS."},
			"rcode", "qtypes", "ips_returned"),
		records: newCounter(prometheus.CounterOpts{Name: "hubble_dns_response_types_total", Help: "Records in recorded answers of DNS."},
			"type", "qtypes"),
		requests: newCounter(prometheus.CounterOpts{Name: "hubble_http_requests_total", Help: "Recorded requests of HTTP."},
			"method", "protocol", "status", "reporter"),
		responses: newCounter(prometheus.CounterOpts{Name: "hubble_http_responses_total", Help: "Recorded answers of HTTP."},
			"status", "method", "reporter"),
		lost: newCounter(prometheus.CounterOpts{Name: "hubble_lost_events_total", Help: "About how many flows were not recorded."}, "source"),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "hubble_http_request_duration_seconds", Help: "Time until the answers to recorded requests of HTTP began.",
		}, []string{"method", "reporter"}),
	}
}

func (m *Metrics) all() []prometheus.Collector {
	return []prometheus.Collector{
		m.flows, m.drops, m.ports, m.flags, m.questions, m.answers, m.records, m.requests, m.responses, m.lost, m.duration,
	}
}

// Describe is part of prometheus.Collector.
func (m *Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(to)
	}
}

// Collect is part of prometheus.Collector.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(to)
	}
}

// count counts a flow.
func (m *Metrics) count(f *Flow) {
	if f.Missed > 0 {
		m.lost.add(float64(f.Missed), strings.ToLower(flow.LostEventSource_OBSERVER_EVENTS_QUEUE.String()))
		return
	}
	protocol, kind, subKind := f.Protocol.String(), "Trace", "to-network"
	dropped := f.Reason != 0
	switch {
	case f.L7 != nil:
		dropped = f.L7.Refused && !f.Answer
		kind, subKind = "L7", "HTTP"
		if f.L7.DNS != nil {
			subKind = "DNS"
		}
		protocol = subKind
		m.application(f)
	case dropped:
		kind, subKind = "Drop", ""
	case f.Direction == flow.TrafficDirection_INGRESS:
		subKind = "to-endpoint"
	}
	verdict := flow.Verdict_FORWARDED
	if dropped {
		verdict = flow.Verdict_DROPPED
		m.drops.add(1, f.Reason.String(), protocol)
	} else if !f.Answer {
		m.ports.add(1, f.Protocol.String(), strconv.Itoa(int(f.Destination.Port())))
	}
	if f.SYN && !dropped {
		m.flags.add(1, "SYN", familyOf(f.Destination.Addr()))
	}
	m.flows.add(1, protocol, kind, subKind, verdict.String())
}

// application counts a request or an answer.
func (m *Metrics) application(f *Flow) {
	switch l := f.L7; {
	case l.DNS != nil && f.Answer:
		m.answers.add(1, rcodeName(l.DNS), l.DNS.Type, strconv.Itoa(len(l.DNS.IPs)))
		for _, t := range l.DNS.Types {
			m.records.add(1, t, l.DNS.Type)
		}
	case l.DNS != nil:
		m.questions.add(1, "", l.DNS.Type, "0")
	case f.Answer:
		reporter := reporterOf(f.Direction)
		method := methodLabel(l.HTTP.Method)
		status := strconv.Itoa(l.HTTP.Code)
		m.requests.add(1, method, l.HTTP.Protocol, status, reporter)
		m.responses.add(1, status, method, reporter)
		m.duration.WithLabelValues(method, reporter).Observe(l.Latency.Seconds())
	}
}

// familyOf is the family of an address in the words of Hubble's metrics.
func familyOf(a netip.Addr) string {
	if a.Is4() {
		return flow.IPVersion_IPv4.String()
	}
	return flow.IPVersion_IPv6.String()
}

// methodLabel is a method of RFC 9110, section 9.3, or RFC 5789, and otherLabel for others.
func methodLabel(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodConnect, http.MethodOptions,
		http.MethodTrace, http.MethodPatch:
		return method
	}
	return otherLabel
}

// rcodeName is the result of an answer in the words of Hubble's metrics, which are in
// https://www.iana.org/assignments/dns-parameters/dns-parameters.xhtml#dns-parameters-6.
func rcodeName(d *DNS) string {
	names := [...]string{"No Error", "Format Error", "Server Failure", "Non-Existent Domain", "Not Implemented", "Query Refused"}
	if d.Code < len(names) {
		return names[d.Code]
	}
	return d.Rcode
}

// reporterOf is the end of a request that is on this node.
func reporterOf(d flow.TrafficDirection) string {
	switch d {
	case flow.TrafficDirection_EGRESS:
		return "client"
	case flow.TrafficDirection_INGRESS:
		return "server"
	case flow.TrafficDirection_TRAFFIC_DIRECTION_UNKNOWN:
	}
	return "unknown"
}
