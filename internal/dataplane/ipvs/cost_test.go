package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// counting takes down what is asked of the kernel, and how much it answers.
type counting struct{ notes []string }

func (c *counting) note(format string, args ...any) {
	c.notes = append(c.notes, fmt.Sprintf(format, args...))
}

// of is k, counted.
func (c *counting) of(k *kernel) kernel {
	return kernel{countingServers{k.servers, c}, countingSets{k.sets, c}, countingDevice{k.device, c}}
}

type countingServers struct {
	servers
	c *counting
}

func (k countingServers) Services(f func(ipvs.Service)) error {
	n := 0
	err := k.servers.Services(func(s ipvs.Service) { n++; f(s) })
	k.c.note("read %d virtual servers", n)
	return err
}

func (k countingServers) Dests(key ipvs.Key, f func(ipvs.Dest)) error {
	n := 0
	err := k.servers.Dests(key, func(d ipvs.Dest) { n++; f(d) })
	k.c.note("read %d real servers", n)
	return err
}

func (k countingServers) Send(b *changes) ([]ipvs.Refusal[dataplane.FrontKey], error) {
	k.c.note("send %d changes of servers", len(b.list))
	return k.servers.Send(b)
}

type countingSets struct {
	sets
	c *counting
}

func (k countingSets) Create(sets ...ipset.Set) error {
	k.c.note("create %d sets", len(sets))
	return k.sets.Create(sets...)
}

func (k countingSets) List(set string, f func(ipset.Element)) error {
	n := 0
	err := k.sets.List(set, func(e ipset.Element) { n++; f(e) })
	k.c.note("read %d elements of %s", n, set)
	return err
}

func (k countingSets) Add(set string, list []ipset.Element) error {
	k.c.note("add %d to %s", len(list), set)
	return k.sets.Add(set, list)
}

func (k countingSets) Del(set string, list []ipset.Element) error {
	k.c.note("remove %d from %s", len(list), set)
	return k.sets.Del(set, list)
}

type countingDevice struct {
	device
	c *counting
}

func (k countingDevice) List() (map[netip.Addr]bool, error) {
	mine, err := k.device.List()
	k.c.note("read %d addresses", len(mine))
	return mine, err
}

func (k countingDevice) Add(list []netip.Addr) map[netip.Addr]error {
	k.c.note("add %d addresses", len(list))
	return k.device.Add(list)
}

func (k countingDevice) Del(list []netip.Addr) map[netip.Addr]error {
	k.c.note("remove %d addresses", len(list))
	return k.device.Del(list)
}

func (k countingDevice) Ensure() error {
	k.c.note("look for the device")
	return k.device.Ensure()
}

// countingTool notes the calls of iptables.
type countingTool struct {
	tool
	c *counting
}

func (t countingTool) Restore(ctx context.Context, input []byte) error {
	t.c.note("run iptables-restore")
	return t.tool.Restore(ctx, input)
}

func (t countingTool) SaveAll(ctx context.Context, chain func(table, name string), rule func(table, chain, line string)) error {
	t.c.note("run iptables-save")
	return t.tool.SaveAll(ctx, chain, rule)
}

// numbered is Service number i with a ClusterIP and the given endpoints.
func numbered(i, endpoints int) *table.ServicePort {
	at := func(a, b byte, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{a, b, byte(i >> 8), byte(i)}), port)
	}
	f := table.Frontend{Kind: table.ClusterIP, Addr: at(10, 96, 80), Masquerade: true}
	for e := range endpoints {
		f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: at(10, byte(128+e), 9376), Local: e == 0})
	}
	return flows.Port(fmt.Sprintf("numbered-%d", i), "", svc.IPv4, svc.TCP, f)
}

func manyPorts(n, endpoints int) []*table.ServicePort {
	var out []*table.ServicePort
	for i := range n {
		out = append(out, numbered(i+1, endpoints))
	}
	return out
}

// with is a Table of ports and more, on a node with one address.
func with(ports []*table.ServicePort, more ...*table.ServicePort) *table.Table {
	t := table.New(append(more, ports...)...)
	t.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.168.77.11")}
	return t
}

// What a change asks of the kernel is the same whether there are 100 Services or
// 2,000: DESIGN.md, cost follows change.
func TestCostFollowsTheChange(t *testing.T) {
	few, many := costs(t, 100), costs(t, 2000)
	if d := cmp.Diff(few, many); d != "" {
		t.Errorf("calls of the kernel, with 100 Services (-) and with 2,000 (+):\n%s", d)
	}
	t.Logf("\n%s", few)
}

// costs are the calls of the kernel for one change of each kind, beside n
// Services that stay.
func costs(t *testing.T, n int) string {
	const endpoints = 3
	var out strings.Builder
	inside(t, func(p dataplane.Applier) {
		ports := manyPorts(n, endpoints)
		flows.Apply(t, p, with(ports), nil)
		c, real := &counting{}, *p.(*Mode).kernel
		*p.(*Mode).kernel = c.of(&real)
		for _, f := range p.(*Mode).targets {
			f.rules.tool = countingTool{f.rules.tool, c}
		}
		id := 60000
		changed, fewer, affine := numbered(id, endpoints), numbered(id, endpoints-1), numbered(id, endpoints-1)
		affine.Affinity = time.Hour
		all := numbered(id, endpoints)
		ep := all.Frontends[0].Endpoints
		all.Frontends = append(all.Frontends,
			table.Frontend{Kind: table.ExternalIP, Addr: flows.AP("203.0.113.1:80"), Endpoints: ep, Masquerade: true},
			table.Frontend{Kind: table.LoadBalancerIP, Addr: flows.AP("203.0.113.2:80"), Endpoints: ep[:1], LocalClients: ep},
			table.Frontend{Kind: table.NodePort, Addr: flows.AP("0.0.0.0:30080"), Endpoints: ep, Masquerade: true})
		for _, step := range []struct {
			name string
			port *table.ServicePort
		}{
			{"a new Service", changed}, {"an endpoint goes", fewer}, {"affinity comes", affine}, {"an endpoint comes", changed},
			{"external IP, load balancer and node port come", all}, {"they go", changed}, {"the Service goes", nil},
		} {
			c.notes = nil
			tab := with(ports)
			if step.port != nil {
				tab = with(ports, step.port)
			}
			flows.Apply(t, p, tab, []table.Key{changed.Key()})
			if len(c.notes) == 0 {
				t.Errorf("%s: nothing was asked of the kernel", step.name)
			}
			slices.Sort(c.notes)
			fmt.Fprintf(&out, "%s\n  %s\n", step.name, strings.Join(c.notes, "\n  "))
		}
		*p.(*Mode).kernel = real
		if d := flows.Dump(t, p); strings.Contains(d, "10.96.234.96") {
			t.Error("the Service that went is still there")
		}
	})
	return out.String()
}

// sizes are numbers of Services, with 10 endpoints each.
var sizes = []int{100, 1000, 10000}

// The figures of README.md:
//
//	go test ./internal/plane/ipvs -run '^$' -bench . -benchtime 100x
func BenchmarkLoadAndAudit(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("%dx10", n), func(b *testing.B) {
			tab := with(manyPorts(n, 10))
			inside(b, func(p dataplane.Applier) {
				b.ReportMetric(0, "ns/op")
				// The second one compares everything and finds nothing to do, which
				// may take longer the more there is.
				for _, unit := range []string{"s/load", "s/audit"} {
					start := time.Now()
					flows.Apply(b, p, tab, nil)
					b.ReportMetric(time.Since(start).Seconds(), unit)
				}
			})
		})
	}
}

// benchmarkChange changes one Service to and fro, beside n that stay. It tells the
// median of all times: other work on the machine makes the mean worthless.
func benchmarkChange(b *testing.B, one, other func() *table.ServicePort) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("%dx10", n), func(b *testing.B) {
			ports := manyPorts(n, 10)
			tabs := [2]*table.Table{with(ports), with(ports)}
			for i, make := range []func() *table.ServicePort{one, other} {
				if p := make(); p != nil {
					tabs[i] = with(ports, p)
				}
			}
			changed := []table.Key{one().Key()}
			inside(b, func(p dataplane.Applier) {
				flows.Apply(b, p, tabs[1], nil)
				var took []time.Duration
				for i := 0; b.Loop(); i++ {
					start := time.Now()
					flows.Apply(b, p, tabs[i%2], changed)
					took = append(took, time.Since(start))
				}
				slices.Sort(took)
				b.ReportMetric(took[len(took)/2].Seconds()*1e3, "ms/median")
			})
		})
	}
}

func BenchmarkEndpointChange(b *testing.B) {
	benchmarkChange(b, func() *table.ServicePort { return numbered(60000, 10) }, func() *table.ServicePort { return numbered(60000, 9) })
}

func BenchmarkServiceComesOrGoes(b *testing.B) {
	benchmarkChange(b, func() *table.ServicePort { return numbered(60000, 10) }, func() *table.ServicePort { return nil })
}
