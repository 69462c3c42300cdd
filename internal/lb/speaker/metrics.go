package speaker

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/lb/quorum"
)

// speakerMetrics are the metrics of a Speaker.
type speakerMetrics struct {
	owned, voters, reached prometheus.Gauge
	moves, conflicts, sent prometheus.Counter
	registry               *prometheus.Registry
}

func newSpeakerMetrics() *speakerMetrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "fairlead_lb_speaker_" + name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "fairlead_lb_speaker_" + name, Help: help})
	}
	m := &speakerMetrics{
		owned:     gauge("addresses", "Addresses that this node answers for."),
		voters:    gauge("voters", "Votes of the list in force."),
		reached:   gauge("voters_reached", "Voters whose promises count."),
		moves:     counter("taken_total", "Addresses that this node began to answer for."),
		conflicts: counter("conflicts_total", "Times that a foreign machine used an address."),
		sent:      counter("messages_sent_total", "Messages to other speakers."),
		registry:  prometheus.NewRegistry(),
	}
	m.registry.MustRegister(m.owned, m.voters, m.reached, m.moves, m.conflicts, m.sent)
	return m
}

// observe sets the gauges.
func (m *speakerMetrics) observe(announced int, node *quorum.Node, now time.Duration) {
	list := node.List()
	m.owned.Set(float64(announced))
	m.voters.Set(float64(list.Size()))
	m.reached.Set(float64(len(node.Reached(now))))
}
