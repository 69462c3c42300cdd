package prestop

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics count answers.
type metrics struct {
	answers  *prometheus.CounterVec
	wait     prometheus.Histogram
	waiting  prometheus.Gauge
	rejected prometheus.Counter
}

func newMetrics() *metrics {
	m := &metrics{
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fairlead_prestop_answers_total", Help: "Answered preStop requests, by result.",
		}, []string{"result"}),
		wait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fairlead_prestop_wait_seconds", Help: "How long requests of Pods behind a Service waited for nodes.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 12), // 10 ms to 20 s
		}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fairlead_prestop_waiting", Help: "preStop requests that wait for an answer.",
		}),
		rejected: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fairlead_prestop_rejected_total", Help: "Connections that were closed unread: not to a Pod of this node, or too many.",
		}),
	}
	for _, o := range outcomes {
		m.answers.WithLabelValues(string(o))
	}
	return m
}

func (m *metrics) answered(o outcome, after time.Duration) {
	m.answers.WithLabelValues(string(o)).Inc()
	if o == drained || o == late {
		m.wait.Observe(after.Seconds())
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.answers, m.wait, m.waiting, m.rejected}
}

// Describe is of prometheus.Collector.
func (s *Server) Describe(to chan<- *prometheus.Desc) {
	for _, c := range s.metrics.collectors() {
		c.Describe(to)
	}
}

// Collect is of prometheus.Collector.
func (s *Server) Collect(to chan<- prometheus.Metric) {
	for _, c := range s.metrics.collectors() {
		c.Collect(to)
	}
}
