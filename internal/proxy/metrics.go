package proxy

import (
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/table"
)

// Register adds a collector to the metrics of p, one that is made later than p.
func (p *Proxy) Register(c prometheus.Collector) { p.metrics.registry.MustRegister(c) }

// metrics has kube-proxy's names where kube-proxy has the same thing, so that
// dashboards and alerts go on working, and fairlead_ for the rest.
type metrics struct {
	registry *prometheus.Registry

	sync, syncFull, syncPartial, latency            prometheus.Histogram
	lastSync, lastQueued                            prometheus.Gauge
	serviceChanges, endpointChanges                 prometheus.Counter
	failures, repairs                               prometheus.Counter
	conntrack                                       cleanerMetrics
	servicePorts, rejected                          prometheus.Gauge
	noLocal                                         *prometheus.GaugeVec
	healthz, livez                                  *prometheus.CounterVec
	servicesPendingApplied, endpointsPendingApplied int // received, not applied yet
	servicesPending, endpointsPending               prometheus.Gauge
}

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
		m.registry.MustRegister(h)
		return h
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		m.registry.MustRegister(g)
		return g
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		m.registry.MustRegister(c)
		return c
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
		m.registry.MustRegister(c)
		return c
	}
	ms := prometheus.ExponentialBuckets(0.001, 2, 15)
	m.sync = histogram("kubeproxy_sync_proxy_rules_duration_seconds", "Time one round of programming services took, in seconds.", ms)
	m.syncFull = histogram("kubeproxy_sync_full_proxy_rules_duration_seconds",
		"Time one full comparison with the kernel took, in seconds.", ms)
	m.syncPartial = histogram("kubeproxy_sync_partial_proxy_rules_duration_seconds",
		"Duration of a round that wrote only changes, in seconds.", ms)
	m.latency = histogram("kubeproxy_network_programming_duration_seconds",
		"Time from the change of a pod or service to its being programmed here, in seconds.",
		slices.Concat([]float64{0.01, 0.025, 0.05, 0.1, 0.25, 0.5},
			prometheus.LinearBuckets(1, 1, 59), prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7)))
	m.lastSync = gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "When services were last programmed without an error.")
	m.lastQueued = gauge("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "When a change was last received.")
	m.serviceChanges = counter("kubeproxy_sync_proxy_rules_service_changes_total", "Changes of Services seen.")
	m.endpointChanges = counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices seen.")
	m.servicesPending = gauge("kubeproxy_sync_proxy_rules_service_changes_pending", "Changes of Services received and not programmed yet.")
	m.endpointsPending = gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending",
		"Changes of EndpointSlices received and not programmed yet.")
	m.healthz = counters("kubeproxy_proxy_healthz_total", "Answers given on /healthz, by code.", "code")
	m.livez = counters("kubeproxy_proxy_livez_total", "Answers given on /livez, by code.", "code")
	m.failures = counter("fairlead_sync_failures_total", "Rounds of programming services that returned an error.")
	m.repairs = counter("fairlead_repairs_total", "Rules removed or altered from outside that an audit has repaired.")
	m.conntrack.removed = counter("fairlead_conntrack_removed_total",
		"Stale connection tracking entries removed, but for those that the kernel found itself.")
	passes := counters("fairlead_conntrack_passes_total", "Passes over connection tracking for stale entries, by how they are found.", "how")
	m.conntrack.filtered, m.conntrack.read = passes.WithLabelValues("filter"), passes.WithLabelValues("read")
	m.rejected = gauge("fairlead_service_ports_rejected", "Service ports that the mode has rejected and that are retried.")
	m.noLocal = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
		Help: "Service ports with traffic policy Local that have endpoints, but none on this node.",
	}, []string{"traffic_policy"})
	m.registry.MustRegister(m.noLocal)
	m.servicePorts = gauge("fairlead_service_ports", "Service ports wanted, per address family.")
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// received counts what came from the feed.
func (m *metrics) received(b *batch) {
	m.serviceChanges.Add(float64(b.services.events))
	m.endpointChanges.Add(float64(b.slices.events))
	m.servicesPendingApplied += b.services.events
	m.endpointsPendingApplied += b.slices.events
	m.pending()
	m.lastQueued.SetToCurrentTime()
}

// built records a new Table, which differs from before (nil: empty) in keys.
func (m *metrics) built(before, after *table.Table, keys []table.Key) {
	add := func(p *table.ServicePort, n float64) {
		if p == nil {
			return
		}
		policies := map[string]bool{}
		for i := range p.Frontends {
			if f := &p.Frontends[i]; f.Drop && f.Kind == table.ClusterIP {
				policies["internal"] = true
			} else if f.Drop {
				policies["external"] = true
			}
		}
		for policy := range policies {
			m.noLocal.WithLabelValues(policy).Add(n)
		}
	}
	for _, k := range keys {
		if before != nil {
			add(before.Get(k), -1)
		}
		add(after.Get(k), 1)
	}
}

func (m *metrics) pending() {
	m.servicesPending.Set(float64(m.servicesPendingApplied))
	m.endpointsPending.Set(float64(m.endpointsPendingApplied))
}

// applied records the end of an Apply.
func (m *metrics) applied(took time.Duration, full, failed bool) {
	m.sync.Observe(took.Seconds())
	if full {
		m.syncFull.Observe(took.Seconds())
	} else {
		m.syncPartial.Observe(took.Seconds())
	}
	if failed {
		m.failures.Inc()
		return
	}
	m.lastSync.SetToCurrentTime()
	m.servicesPendingApplied, m.endpointsPendingApplied = 0, 0
	m.pending()
}
