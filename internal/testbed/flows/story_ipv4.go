package flows

import (
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

func disableIPv6(node *testbed.Host) {
	node.Sysctl("net/ipv6/conf/all/disable_ipv6", "1")
	node.Sysctl("net/ipv6/conf/default/disable_ipv6", "1")
}

// On a node whose IPv6 is turned off, IPv4 works as ever, and the IPv6 side of
// Services of both families costs nothing: no error, no retry, nothing to repair.
func withoutIPv6(t *testing.T, e *Env) {
	var ports []*table.ServicePort
	fronts := []Front{{Kind: clusterIP, To: "a b d"}, {Kind: nodePorts, To: "a b d", Masquerade: true}, {Kind: lbIP, To: "a", Inside: "a d"}}
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		for _, p := range tcpUDP {
			ports = append(ports, e.servicePort(f, p, &Service{Name: "web-" + p.String(), Fronts: fronts}))
		}
	}
	tab := table.New(ports...)
	tab.NodePortAddrs = append(tab.NodePortAddrs, e.Node.Addr4())
	for range 2 { // the second time is an audit
		e.Apply(t, tab, nil)
		if r, ok := e.Dataplane.(interface{ Repaired() []string }); ok {
			if got := r.Repaired(); len(got) > 0 {
				t.Errorf("repaired %q", got)
			}
		}
		for _, p := range tcpUDP {
			for _, c := range []struct{ from, to string }{{"c", "cluster"}, {"node", "cluster"}, {"client", "node"}} {
				row := Row{From: c.from, To: c.to, Want: Want{Reach: "a b d"}}
				e.Check(t, svc.IPv4, p, &row)
			}
		}
	}
	e.Apply(t, table.New(), Changes(tab, table.New()))
}
