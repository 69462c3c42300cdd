package chain

import (
	"runtime"
	"slices"
	"strconv"
	"time"

	mdns "github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/dns/plugin"
	"github.com/fairlead/fairlead/internal/dns/plugin/forward"
)

// metrics are CoreDNS's metrics by name, label and bucket (v1.15). They live as long as the process.
type metrics struct {
	requests, do, responses *prometheus.CounterVec
	duration, reqSize, size *prometheus.HistogramVec
	upstream                *prometheus.HistogramVec
	earlier                 earlier
	panics, reloadFailed    prometheus.Counter
	version                 string
}

var (
	timeBuckets = prometheus.ExponentialBuckets(0.00025, 2, 16)
	sizeBuckets = []float64{0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16e3, 32e3, 48e3, 64e3}
)

func newMetrics(version string) *metrics {
	zone := []string{"server", "zone", "view"}
	return &metrics{
		version: version,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coredns_dns_requests_total", Help: "Questions received.",
		}, []string{"server", "zone", "view", "proto", "family", "type"}),
		do: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coredns_dns_do_requests_total", Help: "Questions with the DNSSEC OK bit.",
		}, zone),
		responses: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coredns_dns_responses_total", Help: "Answers sent.",
		}, []string{"server", "zone", "view", "rcode", "plugin"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coredns_dns_request_duration_seconds", Help: "Time to answer.", Buckets: timeBuckets,
		}, zone),
		reqSize: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coredns_dns_request_size_bytes", Help: "Size of questions.", Buckets: sizeBuckets,
		}, []string{"server", "zone", "view", "proto"}),
		size: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coredns_dns_response_size_bytes", Help: "Size of answers.", Buckets: sizeBuckets,
		}, []string{"server", "zone", "view", "proto"}),
		upstream: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coredns_proxy_request_duration_seconds", Help: "Time upstreams took to answer.", Buckets: timeBuckets,
		}, []string{"proxy_name", "to", "rcode"}),
		earlier: newEarlier(),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coredns_panics_total", Help: "Questions whose plugin panicked; they are SERVFAIL.",
		}),
		reloadFailed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coredns_reload_failed_total", Help: "Changed Corefiles that could not be used.",
		}),
	}
}

// earlier are metrics of upstreams that CoreDNS had before coredns_proxy_…, and dashboards still have.
type earlier struct {
	requests, responses *prometheus.CounterVec
	duration            *prometheus.HistogramVec
}

func newEarlier() earlier {
	return earlier{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coredns_forward_requests_total", Help: "Questions that upstreams answered.",
		}, []string{"to"}),
		responses: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coredns_forward_responses_total", Help: "Answers of upstreams.",
		}, []string{"to", "rcode"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coredns_forward_request_duration_seconds", Help: "Time upstreams took to answer.", Buckets: timeBuckets,
		}, []string{"to", "rcode"}),
	}
}

func (e earlier) observe(to, rcode string, took time.Duration) {
	e.requests.WithLabelValues(to).Inc()
	e.responses.WithLabelValues(to, rcode).Inc()
	e.duration.WithLabelValues(to, rcode).Observe(took.Seconds())
}

// fixed returns the collectors that live as long as the process.
func (m *metrics) fixed() []prometheus.Collector {
	return []prometheus.Collector{
		m.requests, m.do, m.responses, m.duration, m.reqSize, m.size, m.upstream, m.panics, m.reloadFailed,
		m.earlier.requests, m.earlier.responses, m.earlier.duration,
	}
}

// typeLabel is the label of a type; rare ones share one, so that clients cannot make labels.
func typeLabel(t uint16) string {
	switch t {
	case mdns.TypeA, mdns.TypeAAAA, mdns.TypeMX, mdns.TypeSOA, mdns.TypeCNAME, mdns.TypePTR, mdns.TypeTXT, mdns.TypeNS, mdns.TypeSRV,
		mdns.TypeDS, mdns.TypeDNSKEY, mdns.TypeRRSIG, mdns.TypeNSEC, mdns.TypeNSEC3, mdns.TypeHTTPS, mdns.TypeIXFR, mdns.TypeAXFR,
		mdns.TypeANY, mdns.TypeSVCB:
		return mdns.TypeToString[t]
	}
	return "other"
}

// count counts an answered question; s is nil for one that no chain got.
func (m *metrics) count(server string, s *site, q *plugin.Query, rcode int, plugin string, size int, took time.Duration) {
	zone := "dropped"
	if s != nil {
		zone = s.zone
	}
	if q.DO() {
		m.do.WithLabelValues(server, zone, "").Inc()
	}
	m.requests.WithLabelValues(server, zone, "", q.Network, strconv.Itoa(q.Family()), typeLabel(q.Type())).Inc()
	m.responses.WithLabelValues(server, zone, "", rcodeLabel(rcode), plugin).Inc()
	m.duration.WithLabelValues(server, zone, "").Observe(took.Seconds())
	m.reqSize.WithLabelValues(server, zone, "", q.Network).Observe(float64(q.Size))
	m.size.WithLabelValues(server, zone, "", q.Network).Observe(float64(size))
}

func rcodeLabel(rcode int) string {
	if s, ok := mdns.RcodeToString[rcode]; ok {
		return s
	}
	return strconv.Itoa(rcode)
}

// observe has the resolvers of a forward counted.
func (m *metrics) observe(f *forward.Forward) {
	for _, u := range f.Upstreams() {
		u.Observe = func(rcode int, took time.Duration) {
			m.upstream.WithLabelValues("forward", u.Name, rcodeLabel(rcode)).Observe(took.Seconds())
			m.earlier.observe(u.Name, rcodeLabel(rcode), took)
		}
	}
}

// collector gives the metrics of the current instance.
type collector struct{ s *Server }

// Describe sends nothing: which metrics there are depends on the instance.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect gives the metrics.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	w := sender{ch}
	version := c.s.metrics.version
	w.gauge("coredns_build_info", "The version of this server; its value is 1.", 1,
		"version", version, "revision", "", "goversion", runtime.Version())
	w.gauge("fairlead_dns_ready", "Whether the server listens and the cluster's names are complete.", truth(c.s.Ready()))
	in := c.s.current.Load()
	if in == nil {
		return
	}
	if len(in.clusters) > 0 {
		up := !slices.ContainsFunc(in.clusters, func(cl *cluster) bool { return !cl.follow.Up() })
		w.gauge("fairlead_dns_api_up", "Whether the API server can be reached; if not, answers are from memory.", truth(up))
	}
	for _, r := range in.listen {
		for _, s := range r.sites {
			for _, name := range s.names {
				if s.counted {
					w.gauge("coredns_plugin_enabled", "Whether a plugin is in the chain of a zone; its value is 1.", 1,
						"server", r.server, "zone", s.zone, "view", "", "name", name)
				}
			}
		}
	}
	for _, cl := range in.clusters {
		cl.follow.Collect(ch)
		break // one histogram for the process; a second cluster has the same labels
	}
	w.caches(in.caches)
	w.forwards(in.forwards)
	for _, h := range in.hosts {
		file, n, modified := h.Entries()
		w.gauge("coredns_hosts_entries", "Addresses of names and names of addresses in the hosts file.", float64(n), "hostsfile", file)
		if len(in.hosts) == 1 {
			w.gauge("coredns_hosts_reload_timestamp_seconds", "When the hosts file that is used was written.", float64(modified.UnixNano())/1e9)
		}
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// sender writes metrics.
type sender struct{ ch chan<- prometheus.Metric }

func (w sender) gauge(name, help string, v float64, labels ...string) {
	w.send(prometheus.GaugeValue, name, help, v, labels)
}

func (w sender) counter(name, help string, v uint64, labels ...string) {
	w.send(prometheus.CounterValue, name, help, float64(v), labels)
}

// send writes one value; labels are names and values in turn.
func (w sender) send(typ prometheus.ValueType, name, help string, v float64, labels []string) {
	var names, values []string
	for i := 0; i+1 < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	w.ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), typ, v, values...)
}

func (w sender) caches(all []cacheAt) {
	seen := map[string]bool{}
	for _, c := range all {
		l := []string{"server", c.server, "zones", c.Zones(), "view", ""}
		if key := c.server + c.Zones(); seen[key] {
			continue
		} else {
			seen[key] = true
		}
		kind := func(k string) []string { return append([]string{"type", k}, l...) }
		success, denials := c.Entries()
		gone, goneDenials := c.Evictions()
		w.counter("coredns_cache_requests_total", "Questions looked up in the cache.", c.Stats.Requests.Load(), l...)
		w.counter("coredns_cache_misses_total", "Questions without a valid answer in the cache.", c.Stats.Misses.Load(), l...)
		w.counter("coredns_cache_drops_total", "Answers that do not answer the question.", c.Stats.Drops.Load(), l...)
		w.counter("coredns_cache_prefetch_total", "Answers fetched again before they expired.", c.Stats.Prefetch.Load(), l...)
		w.counter("coredns_cache_served_stale_total", "Questions answered with an expired answer.", c.Stats.Stale.Load(), l...)
		w.counter("coredns_cache_hits_total", "Questions answered from the cache.", c.Stats.HitsSuccess.Load(), kind("success")...)
		w.counter("coredns_cache_hits_total", "Questions answered from the cache.", c.Stats.HitsDenial.Load(), kind("denial")...)
		w.counter("coredns_cache_evictions_total", "Answers evicted for others.", gone, kind("success")...)
		w.counter("coredns_cache_evictions_total", "Answers evicted for others.", goneDenials, kind("denial")...)
		w.gauge("coredns_cache_entries", "Answers in the cache.", float64(success), kind("success")...)
		w.gauge("coredns_cache_entries", "Answers in the cache.", float64(denials), kind("denial")...)
	}
}

func (w sender) forwards(all []*forward.Forward) {
	var rejects, broken uint64
	seen := map[string]bool{}
	for _, f := range all {
		rejects, broken = rejects+f.Stats.Rejects.Load(), broken+f.Stats.Broken.Load()
		for _, u := range f.Upstreams() {
			if seen[u.Name] {
				continue
			}
			seen[u.Name] = true
			w.counter("coredns_proxy_healthcheck_failures_total", "Health checks without an answer.", u.HealthFailures.Load(),
				"proxy_name", "forward", "to", u.Name)
			w.counter("coredns_forward_healthcheck_failures_total", "Health checks without an answer.", u.HealthFailures.Load(), "to", u.Name)
			w.counter("coredns_proxy_conn_cache_hits_total", "Questions over a connection that was open already.", u.Reused.Load(),
				"proxy_name", "forward", "to", u.Name, "proto", "tcp")
			const misses, help = "coredns_proxy_conn_cache_misses_total", "Sockets and connections opened."
			w.counter(misses, help, u.OpenedUDP.Load(), "proxy_name", "forward", "to", u.Name, "proto", "udp")
			w.counter(misses, help, u.OpenedTCP.Load(), "proxy_name", "forward", "to", u.Name, "proto", "tcp")
			w.gauge("fairlead_dns_upstream_healthy", "Whether the upstream is asked first.", truth(u.Healthy()), "to", u.Name)
		}
	}
	w.counter("coredns_forward_max_concurrent_rejects_total", "Questions rejected because too many were in flight to upstreams.", rejects)
	w.counter("coredns_forward_healthcheck_broken_total", "Questions sent while every upstream was unhealthy.", broken)
}
