package flows

import (
	"context"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A packet to an address in the ranges of ClusterIPs that no Service has does not
// leave the node, and the ranges may change while everything runs.
func rangesChange(t *testing.T, e *Env) {
	inside := map[svc.Family]netip.Addr{svc.IPv4: netip.MustParseAddr("10.97.0.5"), svc.IPv6: netip.MustParseAddr("fd00:10:97::5")}
	families(t, func(t *testing.T, f svc.Family) {
		a := inside[f]
		e.Other.AddAddr(a)
		e.Node.Route(netip.PrefixFrom(a, a.BitLen()), e.Other.Addr(f))
		web := e.web(f, svc.TCP, 0, "a b")
		with := func(ranges ...netip.Prefix) *table.Table {
			next := *web
			next.ServiceCIDRs = append(ranges, ServiceCIDRs...)
			return &next
		}
		more := netip.PrefixFrom(a, a.BitLen()-8).Masked()
		e.Apply(t, with(), nil)
		e.leaves(t, "before", a, true)
		e.Apply(t, with(more), []table.Key{})
		e.leaves(t, "in the ranges", a, false)
		e.must(t, "c", svc.TCP, vipAddr(f))
		e.Apply(t, with(more), nil)
		e.leaves(t, "after an audit", a, false)
		e.Apply(t, with(), []table.Key{})
		e.leaves(t, "no longer in the ranges", a, true)
		e.must(t, "c", svc.TCP, vipAddr(f))
	})
}

// leaves asks whether packets to an address of the other host leave the node.
func (e *Env) leaves(t *testing.T, when string, a netip.Addr, want bool) {
	t.Helper()
	wait := silence
	if want {
		wait = answerTime
	}
	for _, from := range []string{"c", "node"} {
		for _, p := range tcpUDP {
			e.Forget(t)
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			got, err := e.Host(from).Ask(ctx, p, netip.AddrPortFrom(a, endpointPort))
			cancel()
			if want && (err != nil || got.Name != "other") || !want && (err == nil || !testbed.Silent(err)) {
				t.Fatalf("%s, %s from %s to %s: %+v, %v; want that it leaves the node: %v\n%s", when, p, from, a, got, err, want, e.dump(t))
			}
		}
	}
}
