package proxy

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

// dropMetrics are the metrics of packets to Services that were rejected or
// dropped. Their counters are read from the kernel on each scrape.
type dropMetrics struct {
	counter dataplane.Counter
	owners  *dataplane.OwnerIndex
	log     *slog.Logger

	rejected, dropped *prometheus.Desc
}

// dropTimeout bounds how long a scrape waits for the kernel.
const dropTimeout = 5 * time.Second

func newDropMetrics(c dataplane.Counter, owners *dataplane.OwnerIndex, log *slog.Logger) *dropMetrics {
	labels := []string{"namespace", "service", "port", "protocol"}
	return &dropMetrics{
		counter: c, owners: owners, log: log,
		rejected: prometheus.NewDesc("fairlead_service_refused_packets_total",
			"Packets to a Service that were rejected: the port has no endpoint, or the Service has no such port (port is empty).", labels, nil),
		dropped: prometheus.NewDesc("fairlead_service_dropped_packets_total",
			"Packets to a Service that were dropped: from outside of its source ranges, or to a node without local endpoints.", labels, nil),
	}
}

// Describe is part of prometheus.Collector.
func (m *dropMetrics) Describe(to chan<- *prometheus.Desc) {
	to <- m.rejected
	to <- m.dropped
}

// Collect is part of prometheus.Collector.
func (m *dropMetrics) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), dropTimeout)
	defer cancel()
	counts, err := m.counter.Drops(ctx)
	if err != nil {
		m.log.Warn("cannot read the counts of rejected and dropped packets", "err", err)
		return
	}
	if len(counts) == 0 {
		return
	}
	owners := m.owners.Owners()
	if owners == nil {
		return
	}
	type sum struct{ rejected, dropped uint64 }
	sums := map[dropLabels]sum{}
	for _, c := range counts {
		id, known := owners.Of(c.Protocol, c.To)
		if !known {
			continue // of a deleted Service
		}
		name := dropLabels{id.Name, id.Port, c.Protocol}
		s := sums[name]
		sums[name] = sum{s.rejected + c.Rejected, s.dropped + c.Dropped}
	}
	for n, s := range sums {
		values := []string{n.service.Namespace, n.service.Name, n.port, n.protocol.String()}
		for desc, v := range map[*prometheus.Desc]uint64{m.rejected: s.rejected, m.dropped: s.dropped} {
			if v > 0 {
				to <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v), values...)
			}
		}
	}
}

type dropLabels struct {
	service  svc.Name
	port     string
	protocol svc.Protocol
}
