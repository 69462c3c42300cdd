package dns

import (
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/clientmetrics"
)

// Describe sends nothing: which metrics there are depends on the sockets and
// upstreams. It makes Server a prometheus.Collector.
func (s *Server) Describe(chan<- *prometheus.Desc) {}

// Collect gives the metrics, under CoreDNS's names where it has them.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	c := collector{ch: ch, zones: [zoneCount]string{zoneCluster: s.options.Domains[0] + ".", zoneRoot: "."}}
	for _, w := range s.stats.sums(true) {
		c.socket(w)
	}
	for _, w := range s.stats.sums(false) {
		c.server(w)
	}
	c.forward(s.forward)
	c.cache(s.forward.cache, &s.forward.metrics)
	if h := s.hosts.Load(); h != nil {
		c.gauge("coredns_hosts_entries", "Addresses of names and names of addresses in the hosts file.", float64(h.len()),
			"hostsfile", s.options.Hosts)
		c.gauge("coredns_hosts_reload_timestamp_seconds", "When the hosts file that is used was written.", float64(h.modified.UnixNano())/1e9)
	}
	s.follow.Collect(ch)
	c.gauge("coredns_build_info", "The version of this server; its value is 1.", 1,
		"version", s.options.Version, "revision", "", "goversion", runtime.Version())
	c.gauge("fairlead_dns_tcp_connections", "Connections of clients.", float64(s.conns.len()))
	c.counter("fairlead_dns_tcp_displaced_total", "Idle connections closed for new ones, of clients that had their share.",
		s.conns.displaced.Load())
	c.gauge("fairlead_dns_ready", "Whether the server listens and the cluster's names are complete.", truth(s.Ready()))
	if s.options.Client != nil {
		c.gauge("fairlead_dns_api_up", "Whether the API server can be reached; if not, answers are from memory.", truth(s.follow.Up()))
	}
	c.gauge("fairlead_dns_zone_serial", "Serial number of the cluster's zone; grows with each change.", float64(s.zone.Serial()))
}

// Handler serves /metrics, /health (the process runs) and /ready (Ready), the
// paths CoreDNS has on three ports.
func (s *Server) Handler() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(prometheus.Gatherers{reg, clientmetrics.Gatherer()}, promhttp.HandlerOpts{}))
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) })
	mux.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
		if !s.Ready() {
			reason := "the cluster's names have not been listed yet"
			if s.ending.Load() {
				reason = "the server is stopping"
			}
			http.Error(w, reason, http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("OK"))
	})
	return mux
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// collector writes metrics.
type collector struct {
	ch    chan<- prometheus.Metric
	zones [zoneCount]string
}

func (c collector) gauge(name, help string, v float64, labels ...string) {
	c.send(prometheus.GaugeValue, name, help, v, labels)
}

func (c collector) counter(name, help string, v uint64, labels ...string) {
	c.send(prometheus.CounterValue, name, help, float64(v), labels)
}

// send writes one value; labels are names and values in turn.
func (c collector) send(typ prometheus.ValueType, name, help string, v float64, labels []string) {
	names, values := split(labels)
	c.ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), typ, v, values...)
}

func (c collector) histogram(name, help string, count uint64, sum float64, buckets map[float64]uint64, labels ...string) {
	names, values := split(labels)
	c.ch <- prometheus.MustNewConstHistogram(prometheus.NewDesc(name, help, names, nil), count, sum, buckets, values...)
}

func split(labels []string) (names, values []string) {
	for i := 0; i+1 < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	return names, values
}

func (h *histogram) cumulative() (count uint64, sum float64, out map[float64]uint64) {
	out = make(map[float64]uint64, len(h.buckets)-1)
	bound := firstBucket.Seconds()
	for i := range h.buckets {
		count += h.buckets[i].Load()
		if i < len(h.buckets)-1 {
			out[bound] = count
			bound *= 2
		}
	}
	return count, time.Duration(h.sum.Load()).Seconds(), out
}

func (s *sizes) cumulative() (count uint64, sum float64, out map[float64]uint64) {
	out = make(map[float64]uint64, len(sizeBounds))
	for i := range s.buckets {
		count += s.buckets[i].Load()
		if i < len(sizeBounds) {
			out[float64(sizeBounds[i])] = count
		}
	}
	return count, float64(s.sum.Load()), out
}

func (c collector) forward(f *forwarder) {
	const proxy = "forward"
	c.counter("coredns_forward_max_concurrent_rejects_total", "Questions rejected because too many were in flight to upstreams.",
		f.metrics.rejects.Load())
	c.counter("fairlead_dns_client_rejects_total", "Questions rejected because their client had its share of questions in flight.",
		f.metrics.clientRejects.Load())
	c.counter("coredns_forward_healthcheck_broken_total", "Questions sent while every upstream was unhealthy.", f.metrics.broken.Load())
	for _, u := range f.all() {
		c.earlier(u)
		for rcode := range u.stats.duration {
			if n, sum, b := u.stats.duration[rcode].cumulative(); n > 0 {
				c.histogram("coredns_proxy_request_duration_seconds", "Time upstreams took to answer.", n, sum, b,
					"proxy_name", proxy, "to", u.name, "rcode", rcodeNames[rcode])
			}
		}
		c.counter("coredns_proxy_healthcheck_failures_total", "Attempts without an answer.", u.stats.failures.Load(),
			"proxy_name", proxy, "to", u.name)
		c.counter("coredns_proxy_conn_cache_hits_total", "Questions over a reused connection.", u.stats.reused.Load(),
			"proxy_name", proxy, "to", u.name, "proto", "tcp")
		const misses = "coredns_proxy_conn_cache_misses_total"
		c.counter(misses, "Sockets and connections opened.", u.stats.udp.Load(), "proxy_name", proxy, "to", u.name, "proto", "udp")
		c.counter(misses, "Sockets and connections opened.", u.stats.tcp.Load(), "proxy_name", proxy, "to", u.name, "proto", "tcp")
		c.gauge("fairlead_dns_upstream_healthy", "Whether the upstream is asked first.", truth(u.healthy()), "to", u.name)
	}
}

// earlier gives what an upstream did under the names that CoreDNS had before coredns_proxy_…
func (c collector) earlier(u *upstream) {
	var answers uint64
	for rcode := range u.stats.duration {
		n, sum, b := u.stats.duration[rcode].cumulative()
		if answers += n; n > 0 {
			l := []string{"to", u.name, "rcode", rcodeNames[rcode]}
			c.counter("coredns_forward_responses_total", "Answers of upstreams.", n, l...)
			c.histogram("coredns_forward_request_duration_seconds", "Time upstreams took to answer.", n, sum, b, l...)
		}
	}
	c.counter("coredns_forward_requests_total", "Questions that upstreams answered.", answers, "to", u.name)
	c.counter("coredns_forward_healthcheck_failures_total", "Attempts without an answer.", u.stats.failures.Load(), "to", u.name)
}

func (c collector) cache(k *cache, f *forwardStats) {
	c.counter("coredns_cache_requests_total", "Questions looked up in the cache.", f.requests.Load(),
		"server", "dns://", "zones", ".", "view", "")
	hits := k.success.hits.Load() + k.denials.hits.Load()
	c.counter("coredns_cache_misses_total", "Questions without a valid answer in the cache.", f.requests.Load()-min(hits, f.requests.Load()),
		"server", "dns://", "zones", ".", "view", "")
	c.counter("coredns_cache_drops_total", "Malformed answers of upstreams, which are not cached.", f.malformed.Load(),
		"server", "dns://", "zones", ".", "view", "")
	c.counter("coredns_cache_prefetch_total", "Answers prefetched before they expired.", f.prefetch.Load(),
		"server", "dns://", "zones", ".", "view", "")
	c.counter("coredns_cache_served_stale_total", "Questions answered with an expired answer.", f.stale.Load(),
		"server", "dns://", "zones", ".", "view", "")
	for _, s := range []struct {
		typ string
		st  *store
	}{{"success", &k.success}, {"denial", &k.denials}} {
		l := []string{"server", "dns://", "type", s.typ, "zones", ".", "view", ""}
		c.gauge("coredns_cache_entries", "Answers in the cache.", float64(s.st.len()), l...)
		c.counter("coredns_cache_hits_total", "Questions answered from the cache.", s.st.hits.Load(), l...)
		c.counter("coredns_cache_evictions_total", "Answers evicted for others.", s.st.evictions.Load(), l...)
	}
}

// socket gives the counters that are kept apart for UDP and TCP.
func (c collector) socket(w *workerStats) {
	for z, zone := range c.zones {
		at := []string{"server", w.server, "zone", zone, "view", "", "proto", w.proto}
		for f := range w.requests[z] {
			for t := range w.requests[z][f] {
				if n := w.requests[z][f][t].Load(); n > 0 {
					c.counter("coredns_dns_requests_total", "Requests.", n,
						append(at[:len(at):len(at)], "family", familyNames[f], "type", typeNames[t])...)
				}
			}
		}
		n, sum, b := w.reqSize[z].cumulative()
		c.histogram("coredns_dns_request_size_bytes", "Size of requests.", n, sum, b, at...)
		n, sum, b = w.respSize[z].cumulative()
		c.histogram("coredns_dns_response_size_bytes", "Size of responses.", n, sum, b, at...)
	}
	c.counter("fairlead_dns_dropped_total", "Packets that got no answer.", w.dropped.Load(), "server", w.server, "proto", w.proto)
}

// server gives the counters of an address that CoreDNS does not keep apart by
// protocol.
func (c collector) server(w *workerStats) {
	for z, zone := range c.zones {
		at := []string{"server", w.server, "zone", zone, "view", ""}
		c.counter("coredns_dns_do_requests_total", "Requests with the DO bit.", w.do[z].Load(), at...)
		for rcode := range w.responses[z] {
			for o := range w.responses[z][rcode] {
				if n := w.responses[z][rcode][o].Load(); n > 0 {
					c.counter("coredns_dns_responses_total", "Responses.", n,
						append(at[:len(at):len(at)], "rcode", rcodeNames[rcode], "plugin", originNames[o])...)
				}
			}
		}
		n, sum, b := w.duration[z].cumulative()
		c.histogram("coredns_dns_request_duration_seconds", "Time to answer.", n, sum, b, at...)
	}
	c.counter("coredns_autopath_success_total", "Requests answered with the end of their search path.", w.autopath.Load(), "server", w.server)
}
