package controller

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/svc"
)

// metrics are the numbers of the controller, taken when they are asked for.
type metrics struct {
	c                      *Controller
	free, used             *prometheus.Desc
	waiting, held, leading *prometheus.Desc
}

func newMetrics(c *Controller) metrics {
	perPool := []string{"pool", "family"}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("fairlead_lb_"+name, help, labels, nil)
	}
	return metrics{
		c:       c,
		free:    desc("pool_free_addresses", "Addresses of a pool that are free; +Inf if they are too many to count.", perPool...),
		used:    desc("pool_used_addresses", "Addresses of a pool that Services have.", perPool...),
		waiting: desc("waiting_services", "Services that do not have the address they want."),
		held:    desc("addresses", "Addresses that Services have."),
		leading: desc("leader", "1 in the process whose controller works, 0 in others."),
	}
}

// Collector returns the metrics of the Controller.
func (c *Controller) Collector() prometheus.Collector { return c.metrics }

// Describe implements prometheus.Collector.
func (m metrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.free, m.used, m.waiting, m.held, m.leading} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (m metrics) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	w := m.c.working.Load()
	if w == nil {
		gauge(m.leading, 0)
		return
	}
	gauge(m.leading, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	gauge(m.waiting, float64(len(w.waiting.list)))
	gauge(m.held, float64(w.alloc.Len()))
	for _, p := range w.usable {
		for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
			u := w.alloc.Usage(p.Name, f)
			if u.Total == 0 {
				continue
			}
			free := float64(u.Free)
			if u.Free == math.MaxUint64 {
				free = math.Inf(1)
			}
			gauge(m.free, free, p.Name, f.String())
			gauge(m.used, float64(u.Used), p.Name, f.String())
		}
	}
}
