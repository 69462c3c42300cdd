package proxy

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

type carrier dataplane.Carried

func (c carrier) Carried() dataplane.Carried { return dataplane.Carried(c) }

// Every number of an Applier that carries connections itself has its metric.
func TestCarriedMetrics(t *testing.T) {
	m := newMetrics("nft", []svc.Family{svc.IPv4, svc.IPv6})
	m.registry.MustRegister(newCarried(carrier{
		Connections: 1, UDPFlows: 2, FailingEndpoints: 3, Accepted: 4, Retried: 5, Failed: 6,
		EndpointFailures: 7, Paused: 8, ToEndpoints: 9, ToClients: 10,
	}))
	page := httptest.NewRecorder()
	m.handler().ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	var got []string
	for l := range strings.Lines(page.Body.String()) {
		if strings.HasPrefix(l, "fairlead_userspace_") {
			got = append(got, strings.TrimSpace(l))
		}
	}
	want := []string{
		"fairlead_userspace_accept_pauses_total 8",
		`fairlead_userspace_bytes_total{to="clients"} 10`,
		`fairlead_userspace_bytes_total{to="endpoints"} 9`,
		"fairlead_userspace_connections 1",
		"fairlead_userspace_connections_accepted_total 4",
		"fairlead_userspace_connections_failed_total 6",
		"fairlead_userspace_connections_retried_total 5",
		"fairlead_userspace_endpoint_failures_total 7",
		"fairlead_userspace_failing_endpoints 3",
		"fairlead_userspace_udp_flows 2",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("metrics\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
