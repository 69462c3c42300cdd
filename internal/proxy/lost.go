package proxy

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// lostPackets are the metrics of packets to Services that reached no endpoint.
// They are read from the kernel when somebody asks for metrics, and at no other
// time: nothing is to be kept up to date by changes.
type lostPackets struct {
	counter dataplane.Counter
	table   func() *table.Table // of what is programmed, nil if nothing is
	log     *slog.Logger

	refused, dropped *prometheus.Desc
}

// lostTimeout bounds what a scrape waits for the kernel.
const lostTimeout = 5 * time.Second

func newLostPackets(c dataplane.Counter, t func() *table.Table, log *slog.Logger) *lostPackets {
	labels := []string{"namespace", "service", "port", "protocol"}
	return &lostPackets{
		counter: c, table: t, log: log,
		refused: prometheus.NewDesc("fairlead_service_refused_packets_total",
			"Packets to a Service that were refused: nobody serves the port, or it is none of the Service's (port is empty).", labels, nil),
		dropped: prometheus.NewDesc("fairlead_service_dropped_packets_total",
			"Packets to a Service that were dropped: from outside of its source ranges, or to a node without local endpoints.", labels, nil),
	}
}

// Describe is part of prometheus.Collector.
func (l *lostPackets) Describe(to chan<- *prometheus.Desc) {
	to <- l.refused
	to <- l.dropped
}

// Collect is part of prometheus.Collector.
func (l *lostPackets) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), lostTimeout)
	defer cancel()
	counts, err := l.counter.Drops(ctx)
	if err != nil {
		l.log.Warn("reading the counts of refused and dropped packets failed", "err", err)
		return
	}
	t := l.table()
	if t == nil || len(counts) == 0 {
		return
	}
	type sum struct{ refused, dropped uint64 }
	sums := map[lostLabels]sum{}
	of := owners(t)
	for _, c := range counts {
		name, known := of(c)
		if !known {
			continue // a Service that is gone
		}
		s := sums[name]
		sums[name] = sum{s.refused + c.Rejected, s.dropped + c.Dropped}
	}
	for n, s := range sums {
		values := []string{n.service.Namespace, n.service.Name, n.port, n.protocol.String()}
		for desc, v := range map[*prometheus.Desc]uint64{l.refused: s.refused, l.dropped: s.dropped} {
			if v > 0 {
				to <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v), values...)
			}
		}
	}
}

type lostLabels struct {
	service  svc.Name
	port     string
	protocol svc.Protocol
}

// owners returns who has a destination: a frontend of a port, else the Service
// with that ClusterIP.
func owners(t *table.Table) func(dataplane.DropCount) (lostLabels, bool) {
	fronts, addrs := map[svc.Frontend]svc.PortName{}, map[netip.Addr]svc.Name{}
	for p := range t.All() {
		for i := range p.Frontends {
			f := &p.Frontends[i]
			for _, at := range addresses(t, f) {
				fronts[svc.Frontend{Protocol: p.Protocol, Addr: at}] = p.ID
			}
			if f.Kind == table.ClusterIP {
				addrs[f.Addr.Addr()] = p.ID.Name
			}
		}
	}
	return func(c dataplane.DropCount) (lostLabels, bool) {
		if id, ok := fronts[svc.Frontend{Protocol: c.Protocol, Addr: c.To}]; ok {
			return lostLabels{id.Name, id.Port, c.Protocol}, true
		}
		name, ok := addrs[c.To.Addr()]
		return lostLabels{name, "", c.Protocol}, ok
	}
}
