package flows

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// MaxSeries is how many series each metric of connections has at most: what is over it is added up.
const MaxSeries = 10_000

// Rest is the label of the series that adds up what has no series of its own.
const Rest = "other"

// readTimeout bounds how long a scrape waits for the kernel.
const readTimeout = 5 * time.Second

// collector are the metrics of connections to Services. They are read from the kernel on each scrape.
type collector struct {
	reader *Reader
	log    *slog.Logger
	max    int

	ports, endpoints *prometheus.Desc
	// known are the series that were there at the last scrape: one that has begun stays while it has a count.
	known chan map[[5]string]bool
}

// NewCollector returns the metrics of connections, with MaxSeries at most of each.
func NewCollector(r *Reader, log *slog.Logger) prometheus.Collector {
	return newCollector(r, log, MaxSeries)
}

func newCollector(r *Reader, log *slog.Logger, limit int) *collector {
	labels := []string{"namespace", "service", "port", "protocol"}
	c := &collector{
		reader: r, log: log, max: limit, known: make(chan map[[5]string]bool, 1),
		ports: prometheus.NewDesc("fairlead_service_connections_total",
			"Connections to a Service that this node sent to an endpoint.", labels, nil),
		endpoints: prometheus.NewDesc("fairlead_service_endpoint_connections_total",
			"Connections to a Service that this node sent to an endpoint, by endpoint.", append(labels, "endpoint"), nil),
	}
	c.known <- map[[5]string]bool{}
	return c
}

// Describe is part of prometheus.Collector.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	to <- c.ports
	to <- c.endpoints
}

// Collect is part of prometheus.Collector.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	ports, err := c.reader.Ports(ctx)
	if err != nil {
		c.log.Warn("cannot read the counts of connections", "err", err)
		return
	}
	values, each := map[[5]string]uint64{}, map[[5]string]uint64{}
	for _, p := range ports {
		if p.Connections == 0 {
			continue
		}
		values[[5]string{p.Namespace, p.Service, p.Port, p.Protocol}] = p.Connections
		for _, e := range p.Endpoints {
			each[[5]string{p.Namespace, p.Service, p.Port, p.Protocol, e.Address}] = e.Connections
		}
	}
	before := <-c.known
	now := map[[5]string]bool{}
	for k, v := range bounded(values, before, now, c.max, func(k [5]string) [5]string { return [5]string{Rest, Rest, Rest, k[3]} }) {
		to <- prometheus.MustNewConstMetric(c.ports, prometheus.CounterValue, float64(v), k[:4]...)
	}
	for k, v := range bounded(each, before, now, c.max, func(k [5]string) [5]string { return [5]string{Rest, Rest, Rest, k[3], Rest} }) {
		to <- prometheus.MustNewConstMetric(c.endpoints, prometheus.CounterValue, float64(v), k[:]...)
	}
	c.known <- now
}

// bounded returns limit values at most and the sums of the others by their rest. The ones that were known before stay; now gets
// the ones with a series.
func bounded(values map[[5]string]uint64, before, now map[[5]string]bool, limit int, rest func([5]string) [5]string) map[[5]string]uint64 {
	out := make(map[[5]string]uint64, min(len(values), limit))
	for k, v := range values {
		if before[k] && len(out) < limit {
			out[k], now[k] = v, true
		}
	}
	sums := map[[5]string]uint64{}
	for k, v := range values {
		switch _, has := out[k]; {
		case has:
		case len(out) < limit:
			out[k], now[k] = v, true
		default:
			sums[rest(k)] += v
		}
	}
	for k, v := range sums {
		out[k] += v
	}
	return out
}
