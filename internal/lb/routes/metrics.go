package routes

import "github.com/prometheus/client_golang/prometheus"

// The metrics of BGP sessions, taken when they are asked for.
var (
	bgpUp = prometheus.NewDesc("fairlead_lb_bgp_session_up", "1 while the session with a BGP peer is established.",
		[]string{"peer", "address"}, nil)
	bgpPrefixes = prometheus.NewDesc("fairlead_lb_bgp_announced_prefixes", "Routes that a BGP peer has been sent.",
		[]string{"peer", "address"}, nil)
	bgpEnded = prometheus.NewDesc("fairlead_lb_bgp_sessions_ended_total", "Sessions with a BGP peer that ended.",
		[]string{"peer", "address"}, nil)
)

// Describe implements prometheus.Collector.
func (r *Routes) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{bgpUp, bgpPrefixes, bgpEnded} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (r *Routes) Collect(to chan<- prometheus.Metric) {
	for _, p := range r.announcer.Peers() {
		up := 0.0
		if p.Established() {
			up = 1
		}
		labels := []string{p.Name, p.Address.String()}
		to <- prometheus.MustNewConstMetric(bgpUp, prometheus.GaugeValue, up, labels...)
		to <- prometheus.MustNewConstMetric(bgpPrefixes, prometheus.GaugeValue, float64(p.Prefixes), labels...)
		to <- prometheus.MustNewConstMetric(bgpEnded, prometheus.CounterValue, float64(p.Ended), labels...)
	}
}
