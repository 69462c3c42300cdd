package flows

import (
	"context"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Source ranges do not let in whoever has the load balancer's address as a source
// (behaviour 101): where this node may come in it may come from there, if one of its
// interfaces has the address, and no other client may.
func ownAddressAsSource(t *testing.T, e *Env) {
	for _, key := range []string{"net/ipv4/ip_nonlocal_bind", "net/ipv6/ip_nonlocal_bind"} {
		e.Client.Sysctl(key, "1")
	}
	families(t, func(t *testing.T, f svc.Family) {
		lb := netip.AddrPortFrom(vip(f, lbIP), 80)
		own := netip.PrefixFrom(lb.Addr(), lb.Addr().BitLen())
		show := func(proto svc.Protocol, ranges ...netip.Prefix) {
			port := Port("web", "p", f, proto, table.Frontend{
				Kind: lbIP, Addr: lb, Endpoints: e.endpoints(f, "a"), Masquerade: true, SourceRanges: ranges,
			})
			tab := table.New(port)
			tab.NodePortAddrs = []netip.Addr{e.Node.Addr(f)}
			e.Apply(t, tab, nil)
			e.Forget(t)
		}
		node := e.ranges(f, []string{"node"})[0]
		ask := func(h *testbed.Host, proto svc.Protocol, from netip.AddrPort) (testbed.Answer, error) {
			ctx, cancel := context.WithTimeout(t.Context(), silence)
			defer cancel()
			return h.AskFrom(ctx, proto, from, lb)
		}
		show(svc.UDP, node, own)
		if got, err := ask(e.Client, svc.UDP, netip.AddrPortFrom(lb.Addr(), 0)); err == nil {
			t.Errorf("from a client with the load balancer's address: %+v, want silence", got)
		}
		if e.Node.Tracks(svc.UDP, lb) == nil {
			t.Error("a packet of a client with the load balancer's address was let in")
		}
		e.Node.AddAddr(lb.Addr())
		show(svc.TCP, node, own)
		if got := e.must(t, "node", svc.TCP, lb); got != "a" {
			t.Errorf("from the node, which may come in: %s", got)
		}
		show(svc.TCP, e.ranges(f, []string{"client"})...)
		if got, err := ask(e.Node, svc.TCP, netip.AddrPort{}); !testbed.Silent(err) {
			t.Errorf("from the node, which may not come in: %+v, %v", got, err)
		}
		if got := e.must(t, "client", svc.TCP, lb); got != "a" {
			t.Errorf("from a client that may come in: %s", got)
		}
	})
}
