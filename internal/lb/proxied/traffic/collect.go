package traffic

import (
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/svc"
)

// State is what a Service has at a moment.
type State struct {
	Service svc.Name
	// Connections are open ones of clients, and sessions of UDP.
	Connections int
	// Healthy, Unhealthy and Ejected are how many endpoints get new clients, fail their checks, or are left out after failures.
	Healthy, Unhealthy, Ejected int
	// Absent are the addresses of endpoints that get no new clients, at one port of the Service or more.
	Absent []netip.AddrPort
	// Certificates are when those end that clients are shown, by the names of their Secrets.
	Certificates map[string]time.Time
}

// The metrics, taken when they are asked for.
//
//nolint:gochecknoglobals // descriptions
var (
	ofService  = []string{"namespace", "service"}
	ofEndpoint = []string{"namespace", "service", "endpoint"}
	requests   = prometheus.NewDesc("fairlead_lb_requests_total", "Requests of HTTP by the class of their answers, 'none' without one.",
		slices.Concat(ofService, []string{"class"}), nil)
	duration = prometheus.NewDesc("fairlead_lb_request_duration_seconds", "Time from a request to the end of its answer.", ofService, nil)
	bytes    = prometheus.NewDesc("fairlead_lb_bytes_total", "Bytes of bodies and connections, counted when these end.",
		slices.Concat(ofService, []string{"to"}), nil)
	opened      = prometheus.NewDesc("fairlead_lb_connections_total", "Connections of clients, and sessions of UDP.", ofService, nil)
	connections = prometheus.NewDesc("fairlead_lb_open_connections", "Open connections of clients, and sessions of UDP.", ofService, nil)
	denied      = prometheus.NewDesc("fairlead_lb_retries_denied_total", "Retries beyond the budget of a backend.", ofService, nil)
	retries     = prometheus.NewDesc("fairlead_lb_retries_total", "Further attempts for a request or a connection.", ofService, nil)
	rejected    = prometheus.NewDesc("fairlead_lb_rejected_total", "Connections and requests that got no Pod, by the reason.",
		slices.Concat(ofService, []string{"reason"}), nil)
	mirrored = prometheus.NewDesc("fairlead_lb_mirrored_requests_total", "Copies of requests for mirrors, by what became of them.",
		slices.Concat(ofService, []string{"result"}), nil)
	authorized = prometheus.NewDesc("fairlead_lb_authorizations_total", "Requests about which a server was asked, by its decision.",
		slices.Concat(ofService, []string{"result"}), nil)
	endpoints = prometheus.NewDesc("fairlead_lb_endpoints", "Endpoints that get new clients (healthy), fail checks, or are ejected.",
		slices.Concat(ofService, []string{"state"}), nil)
	certificate = prometheus.NewDesc("fairlead_lb_certificate_days", "Days until a certificate ends; negative after that.",
		slices.Concat(ofService, []string{"secret"}), nil)
	answers = prometheus.NewDesc("fairlead_lb_endpoint_requests_total", "Requests that an endpoint had, by the class of its answers.",
		slices.Concat(ofEndpoint, []string{"class"}), nil)
	waited  = prometheus.NewDesc("fairlead_lb_endpoint_answer_seconds_total", "Time until the answers of an endpoint began.", ofEndpoint, nil)
	inUse   = prometheus.NewDesc("fairlead_lb_endpoint_connections", "Connections and requests that an endpoint has.", ofEndpoint, nil)
	failed  = prometheus.NewDesc("fairlead_lb_endpoint_failures_total", "Attempts at which an endpoint was not reached.", ofEndpoint, nil)
	carried = prometheus.NewDesc("fairlead_lb_endpoint_bytes_total", "Bytes of bodies and connections of an endpoint, counted when these end.",
		slices.Concat(ofEndpoint, []string{"to"}), nil)
	began  = prometheus.NewDesc("fairlead_lb_endpoint_answer_duration_seconds", "Time until an answer of an endpoint began.", ofEndpoint, nil)
	again  = prometheus.NewDesc("fairlead_lb_endpoint_retries_total", "Further attempts for what an endpoint had before.", ofEndpoint, nil)
	serves = prometheus.NewDesc("fairlead_lb_endpoint_healthy", "1 if an endpoint gets new clients, 0 if not.", ofEndpoint, nil)
	ejects = prometheus.NewDesc("fairlead_lb_endpoint_ejections_total", "Times that an endpoint was left out after failures.", ofEndpoint, nil)
)

// Collector shows a Book, and what States returns, as metrics.
type Collector struct {
	Book   *Book
	States func() []State
}

// Describe implements prometheus.Collector.
func (c Collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{requests, duration, bytes, opened, connections, retries, denied,
		rejected, mirrored, authorized, endpoints, certificate,
		answers, waited, began, inUse, failed, again, ejects, serves, carried, routeRequests, routeSeconds, routeOpened} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (c Collector) Collect(to chan<- prometheus.Metric) {
	out := sink(to)
	services, pods, routes := c.Book.all()
	states := c.States()
	absent := map[svc.Name]map[netip.AddrPort]bool{}
	for _, s := range states {
		if len(s.Absent) > 0 && absent[s.Service] == nil {
			absent[s.Service] = make(map[netip.AddrPort]bool, len(s.Absent))
		}
		for _, at := range s.Absent {
			absent[s.Service][at] = true
		}
	}
	known := make(map[svc.Name]bool, len(services))
	for _, s := range services {
		known[s.name] = true
		out.service(s)
	}
	for _, r := range routes {
		out.route(r)
	}
	for _, e := range pods {
		out.endpoint(e)
		if e.at.IsValid() {
			healthy := 1.0
			if absent[e.service.name][e.at] {
				healthy = 0
			}
			out.gauge(serves, healthy, with(labelsOf(e.service.name), e.at.String())...)
		}
	}
	rest := State{}
	for _, s := range states {
		if known[s.Service] {
			out.state(&s, labelsOf(s.Service))
			continue
		}
		rest.Connections += s.Connections
		rest.Healthy, rest.Unhealthy, rest.Ejected = rest.Healthy+s.Healthy, rest.Unhealthy+s.Unhealthy, rest.Ejected+s.Ejected
	}
	if c.Book.other.used() {
		out.state(&rest, labelsOf(svc.Name{}))
	}
}

// used reports whether something was counted together.
func (s *Service) used() bool { return s.name != svc.Name{} || s.opened.Load() > 0 || s.http.Load() }

// all returns what has series.
func (b *Book) all() (services []*Service, pods []*Endpoint, routes []*Route) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.services {
		services = append(services, s)
		routes = append(routes, s.routesOf()...)
		for _, e := range s.endpoints {
			pods = append(pods, e)
		}
		if s.rest.users > 0 {
			pods = append(pods, s.rest)
		}
	}
	if b.other.used() {
		services, routes = append(services, b.other), append(routes, b.other.routesOf()...)
	}
	return services, pods, routes
}

// sink is where metrics go.
type sink chan<- prometheus.Metric

func (to sink) count(d *prometheus.Desc, v float64, labels ...string) {
	to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

func (to sink) gauge(d *prometheus.Desc, v float64, labels ...string) {
	to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func labelsOf(n svc.Name) []string {
	if n == (svc.Name{}) {
		return []string{"", Other}
	}
	return []string{n.Namespace, n.Name}
}

// class returns the value of a label.
func class(c int) string {
	if c == 0 {
		return "none"
	}
	return strconv.Itoa(c) + "xx"
}

// with returns labels and one more.
func with(labels []string, one string) []string { return append(labels[:len(labels):len(labels)], one) }

func (to sink) service(s *Service) {
	of := labelsOf(s.name)
	to.count(opened, float64(s.opened.Load()), of...)
	to.count(retries, float64(s.retries.Load()), of...)
	if n := s.denied.Load(); n > 0 {
		to.count(denied, float64(n), of...)
	}
	to.count(bytes, float64(s.received.Load()), with(of, "endpoints")...)
	to.count(bytes, float64(s.sent.Load()), with(of, "clients")...)
	for r := range rejections {
		if n := s.rejected[r].Load(); n > 0 {
			to.count(rejected, float64(n), with(of, r.String())...)
		}
	}
	for m := range mirrorings {
		if n := s.mirrored[m].Load(); n > 0 {
			to.count(mirrored, float64(n), with(of, m.String())...)
		}
	}
	for a := range authorizations {
		if n := s.authorized[a].Load(); n > 0 {
			to.count(authorized, float64(n), with(of, a.String())...)
		}
	}
	if !s.http.Load() {
		return
	}
	for c := range s.requests {
		if n := s.requests[c].Load(); n > 0 || c > 1 { // so that rates of the usual ones have a beginning
			to.count(requests, float64(n), with(of, class(c))...)
		}
	}
	below, all := make(map[float64]uint64, len(buckets)), uint64(0)
	for i, le := range buckets {
		all += s.durations[i].Load()
		below[le] = all
	}
	all += s.durations[len(buckets)].Load()
	to <- prometheus.MustNewConstHistogram(duration, all, time.Duration(s.nanos.Load()).Seconds(), below, of...)
}

func (to sink) endpoint(e *Endpoint) {
	at := Other
	if e.at.IsValid() {
		at = e.at.String()
	}
	of := with(labelsOf(e.service.name), at)
	to.gauge(inUse, float64(e.open.Load()), of...)
	to.count(failed, float64(e.failures.Load()), of...)
	to.count(again, float64(e.retries.Load()), of...)
	to.count(ejects, float64(e.ejections.Load()), of...)
	to.count(carried, float64(e.received.Load()), with(of, "endpoints")...)
	to.count(carried, float64(e.sent.Load()), with(of, "clients")...)
	if !e.service.http.Load() {
		return
	}
	to.count(waited, time.Duration(e.nanos.Load()).Seconds(), of...)
	for c := range e.requests {
		if n := e.requests[c].Load(); n > 0 {
			to.count(answers, float64(n), with(of, class(c))...)
		}
	}
	below, all := make(map[float64]uint64, len(answerBuckets)), uint64(0)
	for i, le := range answerBuckets {
		all += e.answers[i].Load()
		below[le.Seconds()] = all
	}
	if all += e.answers[len(answerBuckets)].Load(); all > 0 {
		to <- prometheus.MustNewConstHistogram(began, all, time.Duration(e.nanos.Load()).Seconds(), below, of...)
	}
}

func (to sink) state(s *State, of []string) {
	to.gauge(connections, float64(s.Connections), of...)
	to.gauge(endpoints, float64(s.Healthy), with(of, "healthy")...)
	to.gauge(endpoints, float64(s.Unhealthy), with(of, "unhealthy")...)
	to.gauge(endpoints, float64(s.Ejected), with(of, "ejected")...)
	for secret, end := range s.Certificates {
		to.gauge(certificate, time.Until(end).Hours()/24, with(of, secret)...)
	}
}
