package capture

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/kernel/nflog"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

func TestReasonOf(t *testing.T) {
	ends := []table.Endpoint{{Addr: ap("10.244.0.2:80")}}
	frontend := func(f table.Frontend) *table.Table {
		return table.New(port("web", svc.TCP, "10.96.0.1:80", f))
	}
	web := svc.PortName{Name: svc.Name{Namespace: "shop", Name: "web"}}
	unnamed := frontend(table.Frontend{Endpoints: ends})
	const none, stale = flow.DropReason_SERVICE_BACKEND_NOT_FOUND, flow.DropReason_STALE_OR_UNROUTABLE_IP
	for _, c := range []struct {
		table  *table.Table
		id     svc.PortName
		to     string
		reason flow.DropReason
		text   string
	}{
		{unnamed, svc.PortName{}, "10.96.0.9:80", stale, "no Service has the address"},
		{nil, web, "10.96.0.1:80", stale, "no Service has the address"},
		{unnamed, web, "10.96.0.1:81", none, "Service shop/web has no port 81/TCP"},
		{unnamed, web, "[fd00::1]:80", none, "Service shop/web has no port 80/TCP"},
		{frontend(table.Frontend{Endpoints: ends, SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/28")}}), web, "10.96.0.1:80",
			flow.DropReason_DENIED_BY_LB_SRC_RANGE_CHECK, "Service shop/web: no source range has the client"},
		{frontend(table.Frontend{SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}), web, "10.96.0.1:80",
			none, "Service shop/web has no endpoint"},
		{frontend(table.Frontend{Drop: true}), web, "10.96.0.1:80", none,
			"Service shop/web has no endpoint on this node, and its policy is Local"},
		{unnamed, web, "10.96.0.1:80", none, "Service shop/web: its endpoints changed in this moment"},
	} {
		p := &nflog.Packet{Protocol: svc.TCP, Source: ap("192.0.2.77:40000"), Destination: ap(c.to)}
		if reason, text := reasonOf(c.table, c.id, p); reason != c.reason || text != c.text {
			t.Errorf("%s: %v, %s; want %v, %s", c.to, reason, text, c.reason, c.text)
		}
	}
}
