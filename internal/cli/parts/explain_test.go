package parts

import (
	"errors"
	"net"
	"net/netip"
	"net/url"
	"testing"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// A wrong query is the fault of the request, whatever the proxy does.
func TestWrongQueries(t *testing.T) {
	none := func() *proxy.Proxy { t.Error("the proxy is asked"); return nil }
	for view, queries := range map[string][]string{
		"explain": {"", "service=web", "service=/", "address=10.96.0.1", "address=x:80", "service=a/b&protocol=ICMP", "service=a/b&client=me"},
		"history": {"", "service=web&since=1h", "service=a/b", "service=a/b&since=-1h", "service=a/b&since=long", "service=a/b&at=noon"},
	} {
		f := map[string]api.View{"explain": Explain(none), "history": History(none)}[view]
		for _, q := range queries {
			v, _ := url.ParseQuery(q)
			var bad api.BadQuery
			if _, err := f(t.Context(), v); !errors.As(err, &bad) {
				t.Errorf("%s?%s: %v", view, q, err)
			}
		}
	}
}

// Endpoints of TCP get one connection each: one that listens, and one that does not.
func TestProbe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	open := l.Addr().(*net.TCPAddr).AddrPort()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := gone.Addr().(*net.TCPAddr).AddrPort()
	_ = gone.Close()
	list := []table.Endpoint{{Addr: open}, {Addr: closed}, {Addr: open}}
	port := func(p svc.Protocol) explain.Port {
		return explain.Port{ServicePort: &table.ServicePort{Protocol: p, Frontends: []table.Frontend{{Endpoints: list, LocalClients: list[:1]}}}}
	}
	if got := probe(t.Context(), []explain.Port{port(svc.UDP)}); len(got) != 0 {
		t.Errorf("endpoints of UDP: %+v", got)
	}
	found := map[netip.AddrPort]explain.Result{}
	got := probe(t.Context(), []explain.Port{port(svc.TCP)})
	for _, p := range got {
		found[p.Endpoint] = p.Result
	}
	ways := routes([]explain.Port{port(svc.UDP)})
	if len(ways) != 1 || ways[0].To != open.Addr() || ways[0].Device != "lo" || ways[0].Error != "" {
		t.Errorf("routes: %+v", ways)
	}
	if len(got) != 2 || found[open] != explain.Connected || found[closed] != explain.NotOpen {
		t.Errorf("%+v", got)
	}
}
