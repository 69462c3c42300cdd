package store

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
)

// etcdMetrics are the metrics of the embedded etcd, which registers them in the default registry of Prometheus. Those of
// the API server are in legacyregistry.
type etcdMetrics struct{ from prometheus.Gatherer }

// servedOfEtcd are the beginnings of their names. The API server has metrics of its client whose names begin with "etcd_", too.
//
//nolint:gochecknoglobals // constant
var servedOfEtcd = []string{"etcd_server_", "etcd_disk_", "etcd_network_peer_", "etcd_mvcc_db_"}

// Describe implements prometheus.Collector: what there is depends on etcd.
func (etcdMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (e etcdMetrics) Collect(out chan<- prometheus.Metric) {
	families, _ := e.from.Gather() // an error leaves out what has it
	for _, f := range families {
		for _, begin := range servedOfEtcd {
			if strings.HasPrefix(f.GetName(), begin) {
				collect(f, out)
			}
		}
	}
}

func collect(f *dto.MetricFamily, out chan<- prometheus.Metric) {
	for _, m := range f.GetMetric() {
		var labels []string
		for _, l := range m.GetLabel() {
			labels = append(labels, l.GetName())
		}
		out <- gathered{prometheus.NewDesc(f.GetName(), f.GetHelp(), labels, nil), m}
	}
}

// gathered is a metric as another registry gave it.
type gathered struct {
	desc   *prometheus.Desc
	metric *dto.Metric
}

// Desc implements prometheus.Metric.
func (g gathered) Desc() *prometheus.Desc { return g.desc }

// Write implements prometheus.Metric.
func (g gathered) Write(out *dto.Metric) error {
	proto.Merge(out, g.metric)
	return nil
}
