package flows

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// count is what was counted of one destination. Dropped packets may be sent
// again, so dropped tells only whether there was one.
type count struct {
	refused uint64
	dropped bool
}

// Counts shows that a mode counts what it refuses and drops, each packet once
// and by its destination, and nothing that arrives; and that no change, no
// comparison and no successor of the process touches a count.
func Counts(t *testing.T, create Factory, opts ...Option) {
	e := NewEnv(t, create)
	for _, o := range opts {
		o(&e.options)
	}
	// Else the kernel holds back refusals by ICMP, and clients ask again.
	e.Node.Sysctl("net/ipv4/icmp_ratelimit", "0")
	e.Node.Sysctl("net/ipv6/icmp/ratelimit", "0")
	families(t, func(t *testing.T, f svc.Family) {
		services := []Service{
			{Name: "empty", Fronts: []Front{{Kind: clusterIP}, {Kind: nodePorts, Masquerade: true}}},
			{Name: "empty", Protocol: svc.UDP, Fronts: []Front{{Kind: clusterIP}}},
			{Name: "elsewhere", Port: 81, Fronts: []Front{{Kind: clusterIP, Drop: true}, {Kind: lbIP, Drop: true, Inside: "a"}}},
			{Name: "closed", Port: 82, Fronts: []Front{{Kind: lbIP, To: "a", Ranges: []string{"d"}}}},
			{Name: "well", Port: 83, Fronts: []Front{{Kind: clusterIP, To: "a"}, {Kind: nodePorts, To: "a", Masquerade: true}}},
		}
		at := func(services []Service) *table.Table { return e.Table(f, svc.TCP, &Row{Services: services}) }
		tab := at(services)
		e.Apply(t, tab, nil)
		want := map[svc.Frontend]count{}
		expect := func(refused, dropped int) func(string, svc.Protocol, netip.AddrPort) {
			return func(from string, p svc.Protocol, to netip.AddrPort) {
				ctx, cancel := context.WithTimeout(t.Context(), answerTime)
				if dropped > 0 {
					cancel()
					ctx, cancel = context.WithTimeout(t.Context(), silence)
				}
				defer cancel()
				_, err := e.Host(from).Ask(ctx, p, to)
				if arrives := refused+dropped == 0; arrives != (err == nil) {
					t.Errorf("%s to %s %s: %v", from, p, to, err)
				}
				if refused+dropped > 0 {
					key := svc.Frontend{Protocol: p, Addr: to}
					n := want[key]
					want[key] = count{n.refused + uint64(refused), n.dropped || dropped > 0}
				}
			}
		}
		arrives, refused, dropped := expect(0, 0), expect(1, 0), expect(0, 1)
		cluster := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(vip(f, clusterIP), port) }
		lb := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(vip(f, lbIP), port) }
		node := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(e.Node.Addr(f), port) }
		for _, from := range []string{"c", "node", "client"} {
			refused(from, svc.TCP, cluster(80))
			refused(from, svc.UDP, cluster(80))
			refused(from, svc.TCP, cluster(99)) // none of the Service's ports
			refused(from, svc.TCP, node(nodePort))
			arrives(from, svc.TCP, cluster(83))
			arrives(from, svc.TCP, node(nodePort+3))
		}
		refused("c", svc.TCP, cluster(80))
		dropped("c", svc.TCP, cluster(81))
		dropped("client", svc.TCP, lb(81))
		dropped("client", svc.TCP, lb(82))
		e.counted(t, "at first", f, want)

		fewer := at(services[2:])
		e.Apply(t, fewer, Changes(tab, fewer))
		e.counted(t, "without the Service", f, want)
		e.Apply(t, tab, nil)
		if err := e.Dataplane.Close(); err != nil {
			t.Error(err)
		}
		e.Node.Do(func() { e.Dataplane = create(t, e.Node) })
		e.Apply(t, tab, nil)
		e.counted(t, "after a restart", f, want)
		refused("node", svc.TCP, cluster(80))
		dropped("c", svc.TCP, cluster(81))
		e.counted(t, "counted further", f, want)
	})
}

// counted compares what the data plane has counted of a family with what is to be.
func (e *Env) counted(t *testing.T, when string, f svc.Family, want map[svc.Frontend]count) {
	t.Helper()
	counts, err := e.Dataplane.(dataplane.Counter).Drops(t.Context())
	if err != nil {
		t.Fatalf("%s: %v", when, err)
	}
	got := map[svc.Frontend]count{}
	for _, c := range counts {
		if svc.FamilyOf(c.To.Addr()) == f {
			got[svc.Frontend{Protocol: c.Protocol, Addr: c.To}] = count{c.Rejected, c.Dropped > 0}
		}
	}
	for key, n := range want {
		// IPVS refuses TCP by ICMP, and over IPv6 clients send their SYN a second
		// time before they take that for an answer (seen on Linux 6.1).
		if is := got[key]; e.options.balanced && key.Protocol == svc.TCP && is.refused > n.refused && is.refused <= 2*n.refused {
			got[key] = n
		}
	}
	text := func(m map[svc.Frontend]count) []string {
		var out []string
		for k, n := range m {
			out = append(out, fmt.Sprintf("%s: %d refused, dropped %t", k, n.refused, n.dropped))
		}
		slices.Sort(out)
		return out
	}
	if got, want := text(got), text(want); !slices.Equal(got, want) {
		t.Errorf("%s: counted\n%q\nwant\n%q", when, got, want)
	}
}
