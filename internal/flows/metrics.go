package flows

import (
	"context"
	"log/slog"
	"sync"
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

	mu              sync.Mutex // held during a scrape
	byPort, byPlace series
}

// labels name an endpoint's series; without the last one they name its port's.
type labels [5]string

// NewCollector returns the metrics of connections, with MaxSeries at most of each.
func NewCollector(r *Reader, log *slog.Logger) prometheus.Collector {
	return newCollector(r, log, MaxSeries)
}

func newCollector(r *Reader, log *slog.Logger, limit int) *collector {
	names := []string{"namespace", "service", "port", "protocol"}
	c := &collector{
		reader: r, log: log, max: limit,
		ports: prometheus.NewDesc("fairlead_service_connections_total",
			"Connections to a Service that this node sent to an endpoint.", names, nil),
		endpoints: prometheus.NewDesc("fairlead_service_endpoint_connections_total",
			"Connections to a Service that this node sent to an endpoint, by endpoint.", append(names, "endpoint"), nil),
	}
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
	c.mu.Lock()
	defer c.mu.Unlock()
	ports, err := c.reader.Connections(ctx)
	if err != nil {
		c.log.Warn("cannot read the counts of connections", "err", err)
		return
	}
	values, each := map[labels]uint64{}, map[labels]uint64{}
	for _, p := range ports {
		values[labels{p.Namespace, p.Service, p.Port, p.Protocol}] = p.Connections
		for _, e := range p.Endpoints {
			each[labels{p.Namespace, p.Service, p.Port, p.Protocol, e.Address}] = e.Connections
		}
	}
	for k, v := range c.byPort.update(values, c.max) {
		to <- prometheus.MustNewConstMetric(c.ports, prometheus.CounterValue, float64(v), k[:4]...)
	}
	for k, v := range c.byPlace.update(each, c.max) {
		to <- prometheus.MustNewConstMetric(c.endpoints, prometheus.CounterValue, float64(v), k[:]...)
	}
}

// series bounds the series of a metric. One that has begun stays while it has a value; what others have more than at the scrape
// before is added to the rest, which so never falls.
type series struct {
	own  map[labels]bool
	last map[labels]uint64 // of those without a series of their own
	rest map[labels]uint64
}

// rest is the series that k is in if it has none of its own.
func (k labels) rest() labels {
	r := labels{Rest, Rest, Rest, k[3]}
	if k[4] != "" {
		r[4] = Rest
	}
	return r
}

// update returns the series for values: limit at most, and the rest.
func (s *series) update(values map[labels]uint64, limit int) map[labels]uint64 {
	out, last := make(map[labels]uint64, min(len(values), limit)), map[labels]uint64{}
	for k, v := range values {
		if s.own[k] && len(out) < limit {
			out[k] = v
		}
	}
	for k, v := range values {
		if _, has := out[k]; !has && len(out) < limit {
			out[k] = v
		}
	}
	own := make(map[labels]bool, len(out))
	for k := range out {
		own[k] = true
	}
	if s.rest == nil {
		s.rest = map[labels]uint64{}
	}
	for k, v := range values {
		if own[k] {
			continue
		}
		more := v
		if before := s.last[k]; before <= v {
			more -= before
		}
		s.rest[k.rest()] += more
		last[k] = v
	}
	for k, v := range s.rest {
		out[k] += v
	}
	s.own, s.last = own, last
	return out
}
