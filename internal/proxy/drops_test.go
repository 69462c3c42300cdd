package proxy

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

type counted []dataplane.DropCount

func (c counted) Drops(context.Context) ([]dataplane.DropCount, error) { return c, nil }

// Counts of destinations become counts of Services: a node port's addresses
// summed, a ClusterIP's other ports without a port, foreign ones not at all.
func TestDropMetrics(t *testing.T) {
	ap := netip.MustParseAddrPort
	web := &table.ServicePort{
		ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: "web"}, Port: "http"}, Family: svc.IPv4, Protocol: svc.TCP,
		Frontends: []table.Frontend{
			{Kind: table.ClusterIP, Addr: ap("10.96.0.1:80"), Drop: true}, {Kind: table.NodePort, Addr: ap("0.0.0.0:30080"), Drop: true},
		},
	}
	tab := table.New(web)
	tab.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	m := newMetrics("nft", []svc.Family{svc.IPv4, svc.IPv6})
	m.registry.MustRegister(newDropMetrics(counted{
		{Protocol: svc.TCP, To: ap("192.0.2.1:30080"), Dropped: 3},
		{Protocol: svc.TCP, To: ap("192.0.2.2:30080"), Dropped: 4},
		{Protocol: svc.UDP, To: ap("10.96.0.1:80"), Rejected: 5},
		{Protocol: svc.TCP, To: ap("10.96.0.99:80"), Rejected: 6},
	}, dataplane.NewOwnerIndex(func() *table.Table { return tab }), slog.New(slog.DiscardHandler)))
	m.built(nil, tab, []table.Key{web.Key()})
	page := httptest.NewRecorder()
	m.handler().ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	var got []string
	for l := range strings.Lines(page.Body.String()) {
		if strings.HasPrefix(l, "fairlead_service_refused") || strings.HasPrefix(l, "fairlead_service_dropped") ||
			strings.HasPrefix(l, "kubeproxy_sync_proxy_rules_no_local") {
			got = append(got, strings.TrimSpace(l))
		}
	}
	want := []string{
		`fairlead_service_dropped_packets_total{namespace="default",port="http",protocol="TCP",service="web"} 7`,
		`fairlead_service_refused_packets_total{namespace="default",port="",protocol="UDP",service="web"} 5`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 1`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 1`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("metrics\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	m.built(tab, table.New(), []table.Key{web.Key()})
	page = httptest.NewRecorder()
	m.handler().ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(page.Body.String(), `no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 0`) {
		t.Error("the deleted Service still counts as one without local endpoints")
	}
}
