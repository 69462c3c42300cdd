package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// balanced is the i-th of many Services with a load balancer's address and three endpoints on three nodes.
func balanced(i int, direct bool, counts ...int) *table.ServicePort {
	f := table.Frontend{
		Kind:      table.LoadBalancerIP,
		Addr:      netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), 80),
		Endpoints: flows.Endpoints(fmt.Sprintf("*10.1.%d.%d:80", i>>8, i&255)), Masquerade: !direct,
	}
	all := append(flows.Endpoints(fmt.Sprintf("10.2.%d.%d:80", i>>8, i&255), fmt.Sprintf("10.3.%d.%d:80", i>>8, i&255)), f.Endpoints...)
	if !direct {
		f.Endpoints = all
		return flows.Port(fmt.Sprintf("s%d", i), "", svc.IPv4, svc.TCP, f)
	}
	f.LocalClients = all
	for n, endpoints := range counts {
		h := table.Hop{Node: fmt.Sprintf("node-%d", (i+n)%50), Endpoints: endpoints}
		if n > 0 {
			h.Via = netip.AddrFrom4([4]byte{192, 0, 2, byte((i + n) % 50)})
		}
		f.Hops = append(f.Hops, h)
	}
	return flows.Port(fmt.Sprintf("s%d", i), "", svc.IPv4, svc.TCP, f)
}

// BenchmarkDirect loads 10,000 Services without and with direct return, and changes the endpoints of one after the other. Expected:
// a load below 5 s, a change below 1 ms.
func BenchmarkDirect(b *testing.B) {
	const n = 10000
	for _, direct := range []bool{false, true} {
		b.Run(fmt.Sprintf("direct=%v", direct), func(b *testing.B) {
			var ports []*table.ServicePort
			for i := range n {
				ports = append(ports, balanced(i, direct, 1, 1, 1))
			}
			tab := table.New(ports...)
			tab.ForwardsDirectly = direct
			benchPlane(b, func(p *Mode) {
				timed := func() float64 {
					start := time.Now()
					if err := p.Apply(b.Context(), tab, nil); err != nil {
						b.Fatal(err)
					}
					return float64(time.Since(start).Milliseconds())
				}
				before := resident(b)
				load := timed()
				grown := resident(b) - before
				p.Forget()
				audit := timed()
				var took []time.Duration
				for i := 0; b.Loop(); i++ {
					next := balanced(i%n, direct, 1, 1+i/n%2, 1+i%2)
					one := table.New(next)
					one.ForwardsDirectly = direct
					start := time.Now()
					if err := p.Apply(b.Context(), one, []table.Key{next.Key()}); err != nil {
						b.Fatal(err)
					}
					took = append(took, time.Since(start))
				}
				b.ReportMetric(load, "ms-load")
				b.ReportMetric(audit, "ms-audit")
				b.ReportMetric(grown, "MB")
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-p50")
			})
		})
	}
}
