package proxy

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/dataplane"
)

// carried are the metrics of an Applier that carries connections itself. They are
// read on each scrape.
type carried struct {
	carrier dataplane.Carrier
	values  []carriedValue
}

type carriedValue struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*dataplane.Carried) int64
	// labels are the values of desc's variable labels.
	labels []string
}

func newCarried(c dataplane.Carrier) *carried {
	out := &carried{carrier: c}
	add := func(kind prometheus.ValueType, name, help string, of func(*dataplane.Carried) int64) {
		out.values = append(out.values, carriedValue{desc: prometheus.NewDesc("fairlead_userspace_"+name, help, nil, nil), kind: kind, of: of})
	}
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	add(gauge, "connections", "TCP connections that are open.", func(c *dataplane.Carried) int64 { return c.Connections })
	add(gauge, "udp_flows", "UDP clients that are remembered.", func(c *dataplane.Carried) int64 { return c.UDPFlows })
	add(gauge, "failing_endpoints", "Endpoints that did not answer when they were tried last, for each port of a Service that has them.",
		func(c *dataplane.Carried) int64 { return c.FailingEndpoints })
	add(counter, "connections_accepted_total", "TCP connections accepted.",
		func(c *dataplane.Carried) int64 { return c.Accepted })
	add(counter, "connections_retried_total", "TCP connections that went on to another endpoint.",
		func(c *dataplane.Carried) int64 { return c.Retried })
	add(counter, "connections_failed_total", "TCP connections that no endpoint answered.",
		func(c *dataplane.Carried) int64 { return c.Failed })
	add(counter, "endpoint_failures_total", "Times that an endpoint did not answer a connection, or refused a datagram.",
		func(c *dataplane.Carried) int64 { return c.EndpointFailures })
	add(counter, "accept_pauses_total", "Times that new connections had to wait for want of open files.",
		func(c *dataplane.Carried) int64 { return c.Paused })
	bytes := prometheus.NewDesc("fairlead_userspace_bytes_total", "Bytes passed on, over TCP and UDP.", []string{"to"}, nil)
	out.values = append(out.values,
		carriedValue{bytes, counter, func(c *dataplane.Carried) int64 { return c.ToEndpoints }, []string{"endpoints"}},
		carriedValue{bytes, counter, func(c *dataplane.Carried) int64 { return c.ToClients }, []string{"clients"}})
	return out
}

// Describe is part of prometheus.Collector.
func (c *carried) Describe(to chan<- *prometheus.Desc) {
	for _, v := range c.values {
		to <- v.desc
	}
}

// Collect is part of prometheus.Collector.
func (c *carried) Collect(to chan<- prometheus.Metric) {
	now := c.carrier.Carried()
	for _, v := range c.values {
		to <- prometheus.MustNewConstMetric(v.desc, v.kind, float64(v.of(&now)), v.labels...)
	}
}
