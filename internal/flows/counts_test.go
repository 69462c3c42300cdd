package flows

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// counts is a data plane that has counted.
type counts struct {
	dataplane.Applier
	reads  int // of what was lost
	served []dataplane.ServedCount
	lost   []dataplane.DropCount
}

func (c *counts) Served(context.Context) ([]dataplane.ServedCount, error) { return c.served, nil }
func (c *counts) Drops(context.Context) ([]dataplane.DropCount, error) {
	c.reads++
	return c.lost, nil
}

func read(a dataplane.Applier, tab func() *table.Table) *Reader {
	return NewReader(a, dataplane.NewOwnerIndex(tab))
}

func endpoints(all ...string) (out []table.Endpoint) {
	for _, a := range all {
		out = append(out, table.Endpoint{Addr: ap(a)})
	}
	return out
}

var ap = netip.MustParseAddrPort

func port(name, portName string, f svc.Family, p svc.Protocol, fronts ...table.Frontend) *table.ServicePort {
	id := svc.PortName{Name: svc.Name{Namespace: "shop", Name: name}, Port: portName}
	return &table.ServicePort{ID: id, Family: f, Protocol: p, Frontends: fronts}
}

func sample() (*counts, *table.Table) {
	tab := table.New(
		port("web", "http", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.1:80"),
			Endpoints: endpoints("10.0.0.1:8080", "10.0.0.2:8080")},
			table.Frontend{Kind: table.NodePort, Addr: ap("0.0.0.0:30080"), LocalClients: endpoints("10.0.0.2:8080")}),
		port("web", "http", svc.IPv6, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: ap("[fd00::1]:80"),
			Endpoints: endpoints("[fd00::2]:8080")}),
		port("dns", "", svc.IPv4, svc.UDP, table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.2:53")}))
	tab.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	return &counts{
		served: []dataplane.ServedCount{
			{Protocol: svc.TCP, To: ap("10.96.0.1:80"), Endpoint: ap("10.0.0.1:8080"), Connections: 3},
			{Protocol: svc.TCP, To: ap("10.96.0.1:80"), Endpoint: ap("10.0.0.2:8080"), Connections: 4},
			{Protocol: svc.TCP, NodePort: true, To: ap("0.0.0.0:30080"), Endpoint: ap("10.0.0.2:8080"), Connections: 10},
			{Protocol: svc.TCP, To: ap("[fd00::1]:80"), Endpoint: ap("[fd00::2]:8080"), Connections: 100},
			{Protocol: svc.TCP, To: ap("10.96.0.99:80"), Endpoint: ap("10.0.0.3:8080"), Connections: 7}, // of a deleted Service
		},
		lost: []dataplane.DropCount{
			{Protocol: svc.TCP, To: ap("192.0.2.1:30080"), Rejected: 1, Dropped: 2},
			{Protocol: svc.UDP, To: ap("10.96.0.2:53"), Rejected: 5},
			{Protocol: svc.TCP, To: ap("10.96.0.2:53"), Rejected: 6},
		},
	}, tab
}

func TestPortsAddUpTheirFrontends(t *testing.T) {
	c, tab := sample()
	got, err := read(c, func() *table.Table { return tab }).Ports(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := `{shop dns  TCP 0 6 0 [] <nil> []}
{shop dns  UDP 0 5 0 [] <nil> []}
{shop web http TCP 117 1 2 [{10.0.0.1:8080 3 <nil>} {10.0.0.2:8080 14 <nil>} {[fd00::2]:8080 100 <nil>}] <nil> []}`
	var lines []string
	for _, p := range got {
		lines = append(lines, fmt.Sprint(p))
	}
	if text := strings.Join(lines, "\n"); text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	none, err := read(c, func() *table.Table { return nil }).Ports(t.Context())
	if err != nil || none == nil || len(none) != 0 {
		t.Errorf("before a Table: %v, %v", none, err)
	}
}

func TestConnectionMetrics(t *testing.T) {
	c, tab := sample()
	m := NewCollector(read(c, func() *table.Table { return tab }), slog.New(slog.DiscardHandler))
	want := `# HELP fairlead_service_connections_total Connections to a Service that this node sent to an endpoint.
# TYPE fairlead_service_connections_total counter
fairlead_service_connections_total{namespace="shop",port="http",protocol="TCP",service="web"} 117
# HELP fairlead_service_endpoint_connections_total Connections to a Service that this node sent to an endpoint, by endpoint.
# TYPE fairlead_service_endpoint_connections_total counter
fairlead_service_endpoint_connections_total{endpoint="10.0.0.1:8080",namespace="shop",port="http",protocol="TCP",service="web"} 3
fairlead_service_endpoint_connections_total{endpoint="10.0.0.2:8080",namespace="shop",port="http",protocol="TCP",service="web"} 14
fairlead_service_endpoint_connections_total{endpoint="[fd00::2]:8080",namespace="shop",port="http",protocol="TCP",service="web"} 100
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if c.reads != 0 {
		t.Errorf("%d reads of what was lost, which other metrics have", c.reads)
	}
}

// What the kernel forgets after a day, or begins again, takes nothing from a port's connections.
func TestTotalsOnlyGrow(t *testing.T) {
	c, tab := sample()
	r := read(c, func() *table.Table { return tab })
	first, second := c.served[0], c.served[1]
	first.Connections, second.Connections = 10, 5
	for i, step := range []struct {
		served []dataplane.ServedCount
		want   string
	}{
		{[]dataplane.ServedCount{first, second}, "15 [{10.0.0.1:8080 10 <nil>} {10.0.0.2:8080 5 <nil>}]"},
		{[]dataplane.ServedCount{first}, "15 [{10.0.0.1:8080 10 <nil>}]"},
		{[]dataplane.ServedCount{first, {Protocol: svc.TCP, To: second.To, Endpoint: second.Endpoint, Connections: 2}},
			"17 [{10.0.0.1:8080 10 <nil>} {10.0.0.2:8080 2 <nil>}]"},
		{[]dataplane.ServedCount{{Protocol: svc.TCP, To: first.To, Endpoint: first.Endpoint, Connections: 3}}, "20 [{10.0.0.1:8080 13 <nil>}]"},
		{nil, "20 []"},
	} {
		c.served = step.served
		got, err := r.Connections(t.Context())
		if err != nil || len(got) != 1 || fmt.Sprint(got[0].Connections, " ", got[0].Endpoints) != step.want {
			t.Errorf("read %d: %v, %v; want %s", i, got, err, step.want)
		}
	}
	tab = table.New()
	if got, err := r.Connections(t.Context()); err != nil || len(got) != 0 || len(r.totals.ports)+len(r.totals.pairs) != 0 {
		t.Errorf("without the port: %v, %v", got, err)
	}
}

// A Service that gets an address which another one had sees neither its endpoints nor its connections.
func TestCountsAreTheOwners(t *testing.T) {
	c, tab := sample()
	old := c.served[:2]
	for _, known := range []bool{true, false} {
		now := tab
		r := read(c, func() *table.Table { return now })
		c.served = old
		if known {
			if _, err := r.Connections(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		other := port("other", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: endpoints("10.0.0.9:8080")})
		other.ID.Namespace = "thief"
		now = table.New(other)
		c.served = append(old[:2:2], dataplane.ServedCount{
			Protocol: svc.TCP, To: ap("10.96.0.1:80"), Endpoint: ap("10.0.0.9:8080"), Connections: 1})
		got, err := r.Connections(t.Context())
		if want := "[{thief other  TCP 1 0 0 [{10.0.0.9:8080 1 <nil>}] <nil> []}]"; err != nil || fmt.Sprint(got) != want {
			t.Errorf("known %t: %v, %v; want %s", known, got, err, want)
		}
		// One of its Pods gets the address of one of theirs: what that had is not the new owner's.
		other.Frontends[0].Endpoints = endpoints("10.0.0.1:8080", "10.0.0.9:8080")
		now = table.New(other)
		got, err = r.Connections(t.Context())
		const both = "[{thief other  TCP 1 0 0 [{10.0.0.1:8080 0 <nil>} {10.0.0.9:8080 1 <nil>}] <nil> []}]"
		if err != nil || fmt.Sprint(got) != both {
			t.Errorf("known %t: %v, %v; want %s", known, got, err, both)
		}
	}
}

// The rest of a metric does not fall when a port of it goes, or gets a series of its own.
func TestRestOnlyGrows(t *testing.T) {
	var s series
	a, b, d := labels{"a", "", "", "TCP"}, labels{"b", "", "", "TCP"}, labels{"d", "", "", "TCP"}
	s.update(map[labels]uint64{a: 1}, 1)
	for i, step := range []struct {
		values map[labels]uint64
		want   uint64
	}{
		{map[labels]uint64{a: 1, b: 5, d: 7}, 12},
		{map[labels]uint64{a: 1, d: 8}, 13},
		{map[labels]uint64{d: 9}, 13},
		{map[labels]uint64{d: 9, b: 2}, 15},
	} {
		if got := s.update(step.values, 1)[a.rest()]; got != step.want {
			t.Errorf("step %d: the rest is %d, want %d", i, got, step.want)
		}
	}
}

// However many endpoints a tenant has, the number of series is bounded, nothing is lost of the sum, and a series that has begun
// stays.
func TestSeriesAreBounded(t *testing.T) {
	c, tab := sample()
	c.served = nil
	web := table.Key{ID: svc.PortName{Name: svc.Name{Namespace: "shop", Name: "web"}, Port: "http"}, Family: svc.IPv4}
	list := &tab.Get(web).Frontends[0].Endpoints
	*list = nil
	add := func(from, to int) {
		for i := from; i < to; i++ {
			at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80)
			*list = append(*list, table.Endpoint{Addr: at})
			c.served = append(c.served, dataplane.ServedCount{Protocol: svc.TCP, To: ap("10.96.0.1:80"), Endpoint: at, Connections: 1})
		}
	}
	m := newCollector(read(c, func() *table.Table { return tab }), slog.New(slog.DiscardHandler), 20)
	series := func() (names map[string]bool, sum float64) {
		t.Helper()
		r := prometheus.NewRegistry()
		r.MustRegister(m)
		all, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		names = map[string]bool{}
		for _, f := range all {
			if f.GetName() != "fairlead_service_endpoint_connections_total" {
				continue
			}
			for _, v := range f.GetMetric() {
				names[v.GetLabel()[0].GetValue()] = true
				sum += v.GetCounter().GetValue()
			}
		}
		return names, sum
	}
	add(0, 10)
	first, sum := series()
	if len(first) != 10 || sum != 10 {
		t.Errorf("%d series of %v connections, want 10 of 10", len(first), sum)
	}
	add(10, 500)
	second, sum := series()
	if len(second) != 21 || sum != 500 || !second[Rest] {
		t.Errorf("%d series of %v connections, want 20 and %q of 500", len(second), sum, Rest)
	}
	third, _ := series()
	for name := range first {
		if !second[name] {
			t.Errorf("%s has lost its series", name)
		}
	}
	if fmt.Sprint(second) != fmt.Sprint(third) {
		t.Error("series change from one scrape to the next")
	}
}
