package proxy

import (
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/clientmetrics"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Register adds a collector to the metrics of p, one that is made later than p.
func (p *Proxy) Register(c prometheus.Collector) { p.metrics.registry.MustRegister(c) }

// metrics has kube-proxy's names and labels where kube-proxy has the same thing, so that
// dashboards and alerts go on working, and fairlead_ for the rest. A round programs both
// families at once: what kube-proxy measures for each of its two proxies is the same for
// both labels ip_family here.
type metrics struct {
	registry *prometheus.Registry

	sync, syncFull, syncPartial, latency            observers
	lastSync, lastQueued                            gauges
	serviceChanges, endpointChanges                 prometheus.Counter
	failures, repairs                               prometheus.Counter
	modeFailures, partialFailures                   counters // of the mode's own name; none where kube-proxy has none
	conntrack                                       cleanerMetrics
	servicePorts, rejected                          prometheus.Gauge
	noLocal                                         *prometheus.GaugeVec
	healthz, livez                                  *prometheus.CounterVec
	servicesPendingApplied, endpointsPendingApplied int // received, not applied yet
	servicesPending, endpointsPending               prometheus.Gauge
}

// observers, gauges and counters have an element for each family.
type (
	observers []prometheus.Observer
	gauges    []prometheus.Gauge
	counters  []prometheus.Counter
)

func (o observers) observe(d time.Duration) {
	for _, h := range o {
		h.Observe(d.Seconds())
	}
}

func (g gauges) setToNow() {
	for _, v := range g {
		v.SetToCurrentTime()
	}
}

func (c counters) inc() {
	for _, v := range c {
		v.Inc()
	}
}

// familyLabel is kube-proxy's label with the name of a family.
const familyLabel = "ip_family"

// familyName is a family as the label has it.
func familyName(f svc.Family) string { return "IPv" + strconv.Itoa(int(f)) }

// maker makes metrics in a registry.
type maker struct {
	registry *prometheus.Registry
	families []svc.Family
}

func (m *maker) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	m.registry.MustRegister(c)
	return c
}

func (m *maker) gauge(name, help string) prometheus.Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	m.registry.MustRegister(g)
	return g
}

func (m *maker) counterVec(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(c)
	return c
}

func (m *maker) histograms(name, help string, buckets []float64) (out observers) {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, []string{familyLabel})
	m.registry.MustRegister(h)
	for _, f := range m.families {
		out = append(out, h.WithLabelValues(familyName(f)))
	}
	return out
}

func (m *maker) gauges(name, help string) (out gauges) {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{familyLabel})
	m.registry.MustRegister(g)
	for _, f := range m.families {
		out = append(out, g.WithLabelValues(familyName(f)))
	}
	return out
}

func (m *maker) each(c *prometheus.CounterVec) (out counters) {
	for _, f := range m.families {
		out = append(out, c.WithLabelValues(familyName(f)))
	}
	return out
}

// newMetrics returns the metrics of a proxy in a mode, on a machine with some families.
func newMetrics(mode string, families []svc.Family) *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	mk := &maker{m.registry, families}
	ms := prometheus.ExponentialBuckets(0.001, 2, 15)
	m.sync = mk.histograms("kubeproxy_sync_proxy_rules_duration_seconds", "Time one round of programming services took, in seconds.", ms)
	m.syncFull = mk.histograms("kubeproxy_sync_full_proxy_rules_duration_seconds",
		"Time one full comparison with the kernel took, in seconds.", ms)
	m.syncPartial = mk.histograms("kubeproxy_sync_partial_proxy_rules_duration_seconds",
		"Duration of a round that wrote only changes, in seconds.", ms)
	m.latency = mk.histograms("kubeproxy_network_programming_duration_seconds",
		"Time from the change of a pod or service to its being programmed here, in seconds.",
		slices.Concat([]float64{0.01, 0.025, 0.05, 0.1, 0.25, 0.5},
			prometheus.LinearBuckets(1, 1, 59), prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7)))
	m.lastSync = mk.gauges("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "When services were last programmed without an error.")
	m.lastQueued = mk.gauges("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "When a change was last received.")
	m.serviceChanges = mk.counter("kubeproxy_sync_proxy_rules_service_changes_total", "Changes of Services seen.")
	m.endpointChanges = mk.counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices seen.")
	m.servicesPending = mk.gauge("kubeproxy_sync_proxy_rules_service_changes_pending",
		"Changes of Services received and not programmed yet.")
	m.endpointsPending = mk.gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending",
		"Changes of EndpointSlices received and not programmed yet.")
	m.healthz = mk.counterVec("kubeproxy_proxy_healthz_total", "Answers given on /healthz, by code.", "code")
	m.livez = mk.counterVec("kubeproxy_proxy_livez_total", "Answers given on /livez, by code.", "code")
	m.failures = mk.counter("fairlead_sync_failures_total", "Rounds of programming services that returned an error.")
	m.repairs = mk.counter("fairlead_repairs_total", "Rules removed or altered from outside that an audit has repaired.")
	m.rejected = mk.gauge("fairlead_service_ports_rejected", "Service ports that the mode has rejected and that are retried.")
	m.noLocal = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
		Help: "Service ports with traffic policy Local that have endpoints, but none on this node.",
	}, []string{"traffic_policy", familyLabel})
	m.registry.MustRegister(m.noLocal)
	m.servicePorts = mk.gauge("fairlead_service_ports", "Service ports wanted, per address family.")
	m.addConntrack(mk)
	m.addMode(mk, mode)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) addConntrack(mk *maker) {
	m.conntrack.removed = mk.counter("fairlead_conntrack_removed_total",
		"Stale connection tracking entries removed, but for those that the kernel found itself.")
	passes := mk.counterVec("fairlead_conntrack_passes_total",
		"Passes over connection tracking for stale entries, by how they are found.", "how")
	m.conntrack.filtered, m.conntrack.read = passes.WithLabelValues("filter"), passes.WithLabelValues("read")
	m.conntrack.took = mk.histograms("kubeproxy_conntrack_reconciler_sync_duration_seconds",
		"Time one look for stale connection tracking entries took, in seconds.", prometheus.ExponentialBuckets(0.001, 2, 15))
	m.conntrack.deleted = mk.counterVec("kubeproxy_conntrack_reconciler_deleted_entries_total",
		"Stale connection tracking entries removed, by family.", familyLabel)
	mk.each(m.conntrack.deleted)
}

// addMode adds what kube-proxy counts in the mode of that kind only.
func (m *metrics) addMode(mk *maker, mode string) {
	switch mode {
	case "nft":
		m.modeFailures = mk.each(mk.counterVec("kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
			"Rounds of mode nft that returned an error.", familyLabel))
	case "iptables", "ipvs":
		m.modeFailures = mk.each(mk.counterVec("kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
			"Rounds of modes iptables and ipvs that returned an error.", familyLabel))
	}
	if mode == "iptables" {
		m.partialFailures = mk.each(mk.counterVec("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
			"Rounds of mode iptables that wrote only changes and returned an error.", familyLabel))
	}
}

// handler serves the metrics, and what the client of the API server has counted (rest_client_...).
func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(prometheus.Gatherers{m.registry, clientmetrics.Gatherer()}, promhttp.HandlerOpts{})
}

// received counts what came from the feed.
func (m *metrics) received(b *batch) {
	m.serviceChanges.Add(float64(b.services.events))
	m.endpointChanges.Add(float64(b.slices.events))
	m.servicesPendingApplied += b.services.events
	m.endpointsPendingApplied += b.slices.events
	m.pending()
	m.lastQueued.setToNow()
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
			m.noLocal.WithLabelValues(policy, familyName(p.Family)).Add(n)
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
	m.sync.observe(took)
	if full {
		m.syncFull.observe(took)
	} else {
		m.syncPartial.observe(took)
	}
	if failed {
		m.failures.Inc()
		m.modeFailures.inc()
		if !full {
			m.partialFailures.inc()
		}
		return
	}
	m.lastSync.setToNow()
	m.servicesPendingApplied, m.endpointsPendingApplied = 0, 0
	m.pending()
}
