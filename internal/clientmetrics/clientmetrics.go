// Package clientmetrics has what this process's clients of the API server count, under the names of Kubernetes
// (rest_client_...), for every component that serves metrics.
package clientmetrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // counts what client-go does
)

// prefix is how the names begin.
const prefix = "rest_client_"

// Gatherer returns the metrics. The registry that they are in has other libraries' metrics, too, which are left out.
func Gatherer() prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		all, err := legacyregistry.DefaultGatherer.Gather()
		var out []*dto.MetricFamily
		for _, f := range all {
			if strings.HasPrefix(f.GetName(), prefix) {
				out = append(out, f)
			}
		}
		return out, err
	})
}
