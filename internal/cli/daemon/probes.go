package daemon

import (
	"fmt"
	"io"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/clientmetrics"
)

// probes answers a kubelet's probes, and serves the metrics of registries and of requests to the API. /livez
// answers as long as the process does: its end would not bring back an API server. /readyz is 503 while ready returns
// an error; without ready there is none.
func probes(ready func() error, registries ...prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	gatherers := append(prometheus.Gatherers{clientmetrics.Gatherer()}, registries...)
	mux.Handle("GET /metrics", promhttp.HandlerFor(gatherers, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	if ready == nil {
		return mux
	}
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprint(w, "ok")
	})
	return mux
}
