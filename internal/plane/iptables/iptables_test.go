package iptables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/google/go-cmp/cmp"
)

// The kernel has what an administrator can read, the same in both variants.
func TestGoldenDump(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		inside(t, Config{Variant: v, ServiceCIDRs: serviceCIDRs, DropInvalid: true}, func(p *Plane) {
			apply(t, p, everyField(), nil)
			golden(t, "dump.txt", dump(t, p))
		})
	})
}

// What is written is read back letter by letter: else every audit would find
// something to repair.
func TestAuditFindsNothing(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		for _, balance := range []Balance{Random, RoundRobin} {
			for i, tab := range append(states(), bigTable(200, 10), bigTable(3, 100)) {
				withTools(t, v, Config{Balance: balance, DropInvalid: true}, func(p *Plane, c *counting) {
					apply(t, p, tab, nil)
					c.restores = 0
					for _, how := range [][]table.Key{nil, {}, changes(table.New(), tab)} {
						apply(t, p, tab, how)
					}
					if r := p.Repaired(); len(r) > 0 || c.restores > 0 {
						t.Errorf("state %d: %d changes for a Table that was there, repaired %q", i, c.restores, r)
					}
				})
			}
		}
	})
}

// bigTable is n Services of one port with a number of endpoints each.
func bigTable(n, endpoints int) *table.Table { return table.New(large(n, endpoints)...) }

// states are Tables to walk between.
func states() []*table.Table {
	all := eps("*10.244.1.2:80", "*10.244.1.3:80", "10.244.2.2:80", "10.244.2.3:80", "10.244.2.4:80")
	var out []*table.Table
	for i := range 12 {
		r := rand.New(rand.NewPCG(uint64(i), 7))
		some := func() []table.Endpoint {
			var l []table.Endpoint
			for _, e := range all {
				if r.IntN(2) == 0 {
					l = append(l, e)
				}
			}
			return l
		}
		var ports []*table.ServicePort
		for s := range 6 + i*10 {
			if r.IntN(4) > 0 {
				ports = append(ports, randomPort(r, s, some))
			}
		}
		t := table.New(ports...)
		if i%4 == 1 {
			t.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
		}
		if i%4 == 2 {
			t.MasqueradeAll = true
		}
		for n := range r.IntN(3) {
			t.NodePortAddrs = append(t.NodePortAddrs, netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}))
		}
		out = append(out, t)
	}
	return append(out, table.New(), everyField())
}

func randomPort(r *rand.Rand, s int, some func() []table.Endpoint) *table.ServicePort {
	proto := []svc.Protocol{svc.TCP, svc.UDP}[r.IntN(2)]
	p := servicePort(fmt.Sprintf("s%d", s), "p", svc.IPv4, proto,
		table.Frontend{Kind: table.ClusterIP, Addr: ap(fmt.Sprintf("10.96.%d.%d:80", s%3, s+1)), Endpoints: some(), Drop: r.IntN(3) == 0})
	if r.IntN(2) == 0 {
		p.Frontends = append(p.Frontends, table.Frontend{
			// Services 0 and 1 want the same one.
			Kind: table.ExternalIP, Addr: ap(fmt.Sprintf("203.0.113.%d:%d", max(s, 1)%7, 80+s/7)), Endpoints: some(), Masquerade: r.IntN(2) == 0,
		})
	}
	if r.IntN(2) == 0 {
		f := table.Frontend{Kind: table.NodePort, Addr: ap(fmt.Sprintf("0.0.0.0:%d", 30000+s)), Endpoints: some(), Masquerade: true}
		if r.IntN(2) == 0 {
			f.LocalClients, f.Masquerade = some(), false
		}
		if r.IntN(3) == 0 {
			f.SourceRanges = []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", r.IntN(3)))}
		}
		p.Frontends = append(p.Frontends, f)
	}
	if r.IntN(3) == 0 {
		p.Affinity = time.Duration(1+r.IntN(2)) * time.Hour
	}
	return p
}

// changes are the keys that differ between two Tables.
func changes(a, b *table.Table) []table.Key {
	keys := []table.Key{}
	for p := range a.All() {
		if b.Get(p.Key()) != p {
			keys = append(keys, p.Key())
		}
	}
	for p := range b.All() {
		if a.Get(p.Key()) == nil {
			keys = append(keys, p.Key())
		}
	}
	return keys
}

// fresh is the dump of each Table written into an empty kernel.
func fresh(t *testing.T, cfg Config, tabs []*table.Table) []string {
	var out []string
	for _, tab := range tabs {
		inside(t, cfg, func(p *Plane) {
			apply(t, p, tab, nil)
			out = append(out, dump(t, p))
		})
	}
	return out
}

// From any state to any other, by changes or by a full comparison, by this
// process or its successor: the kernel has what a fresh start would give.
func TestRandomWalk(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		for _, cfg := range []Config{{Variant: v}, {Variant: v, Balance: RoundRobin, DropInvalid: true}} {
			tabs := states()
			want := fresh(t, cfg, tabs)
			inside(t, cfg, func(p *Plane) {
				r := rand.New(rand.NewPCG(1, 2))
				at := table.New()
				apply(t, p, at, nil)
				for step := range 60 {
					i := r.IntN(len(tabs))
					how := changes(at, tabs[i])
					switch r.IntN(6) {
					case 0:
						how = nil
					case 1:
						next, err := New(cfg)
						if err != nil {
							t.Fatal(err)
						}
						p = next
					}
					apply(t, p, tabs[i], how)
					at = tabs[i]
					if d := cmp.Diff(want[i], dump(t, p)); d != "" {
						t.Fatalf("step %d, to state %d with %d changes (-fresh +here):\n%s", step, i, len(how), d)
					}
					if r := p.Repaired(); len(r) > 0 {
						t.Fatalf("step %d repaired its own work: %q", step, r)
					}
				}
			})
		}
	})
}

// counting counts what is asked of iptables, and fails some of it.
type counting struct {
	tool
	restores, saves, bytes int
	fail                   func() error
	refuse                 string
}

func (c *counting) Restore(ctx context.Context, input []byte) error {
	c.restores++
	c.bytes += len(input)
	if c.fail != nil {
		if err := c.fail(); err != nil {
			return err
		}
	}
	if c.refuse != "" && strings.Contains(string(input), c.refuse) {
		input = append(slices.Clip(input), "*nat\n-A FAIRLEAD-NONE -j NOWHERE\nCOMMIT\n"...)
		input = []byte(strings.Replace(string(input), "COMMIT\n", "-A FAIRLEAD-NONE -j NOWHERE\nCOMMIT\n", 1))
	}
	return c.tool.Restore(ctx, input)
}

func (c *counting) Save(ctx context.Context, table string, chain func(string), rule func(string, string)) error {
	c.saves++
	return c.tool.Save(ctx, table, chain, rule)
}

// withTools is inside, for both families with what counts those of IPv4.
func withTools(t testing.TB, v Variant, cfg Config, f func(*Plane, *counting)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		c := &counting{}
		p, err := newPlane(cfg, func(fam svc.Family) (tool, error) {
			k, err := toolFor(v, fam)
			if fam == svc.IPv6 {
				return k, err
			}
			c.tool = k
			return c, err
		})
		if err != nil {
			t.Fatal(err)
		}
		f(p, c)
	})
}

// One change in ten fails; a caller that keeps to the contract gets to the same
// end.
func TestFaultsConverge(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		tabs := states()
		want := fresh(t, Config{Variant: v}, tabs)
		withTools(t, v, Config{}, func(p *Plane, k *counting) {
			r := rand.New(rand.NewPCG(3, 4))
			injected := 0
			k.fail = func() error {
				if r.IntN(10) == 0 {
					injected++
					return []error{errors.New("fork: no memory"), &iptables.Error{Program: "restore", Code: 4}, &iptables.Error{Program: "restore", Code: 1, Said: "no"}}[r.IntN(3)]
				}
				return nil
			}
			at, known := table.New(), false
			for step := range 80 {
				i := r.IntN(len(tabs))
				for try := 0; ; try++ {
					var how []table.Key
					if known {
						how = changes(at, tabs[i])
					}
					err := p.Apply(t.Context(), tabs[i], how)
					known = err == nil
					if known {
						break
					}
					if try == 20 {
						t.Fatalf("step %d: still %v", step, err)
					}
				}
				at = tabs[i]
				if d := cmp.Diff(want[i], dump(t, p)); d != "" {
					t.Fatalf("step %d, to state %d (-fresh +here):\n%s", step, i, d)
				}
			}
			if injected < 5 {
				t.Errorf("only %d faults were injected", injected)
			}
		})
	})
}

// A port that cannot be written costs none of the others.
func TestOneBadPort(t *testing.T) {
	good := servicePort("good", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: eps("10.0.0.1:80")})
	bad := servicePort("bad", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.2:80"), Endpoints: eps("[fd00::1]:80")})
	inside(t, Config{}, func(p *Plane) {
		for _, how := range [][]table.Key{nil, {good.Key(), bad.Key()}, nil} {
			err := p.Apply(t.Context(), table.New(good, bad), how)
			if err == nil || !strings.Contains(err.Error(), "default/bad") || strings.Contains(err.Error(), "default/good") {
				t.Errorf("changed %v: %v, want an error that names default/bad alone", how, err)
			}
			if d := dump(t, p); !strings.Contains(d, "-d 10.96.0.1/32 -p tcp") || strings.Contains(d, "10.96.0.2") {
				t.Errorf("the kernel has\n%s", d)
			}
		}
		apply(t, p, table.New(good), nil)
	})
}

// What iptables refuses of one frontend is found among many and left out, and
// what it had before stays.
func TestRefusedFrontendIsIsolated(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		var ports []*table.ServicePort
		for i := range 100 {
			ports = append(ports, servicePort(fmt.Sprintf("s%02d", i), "", svc.IPv4, svc.TCP,
				table.Frontend{Addr: ap(fmt.Sprintf("10.96.0.%d:80", i+1)), Endpoints: eps("10.0.0.1:80")}))
		}
		withTools(t, v, Config{}, func(p *Plane, k *counting) {
			apply(t, p, table.New(), nil)
			for _, how := range [][]table.Key{nil, changes(table.New(), table.New(ports...))} {
				k.refuse = "-d 10.96.0.43/32 -p tcp"
				err := p.Apply(t.Context(), table.New(ports...), how)
				if err == nil || !strings.Contains(err.Error(), "TCP 10.96.0.43:80 of default/s42") || strings.Contains(err.Error(), "s41") {
					t.Errorf("%v, want an error that names 10.96.0.43:80 alone", err)
				}
				d := dump(t, p)
				if n := strings.Count(d, "-j DNAT"); n != 99 || strings.Contains(d, "10.96.0.43/32") || strings.Contains(d, chainTry) {
					t.Errorf("%d frontends are there, want the other 99:\n%s", n, d)
				}
				k.refuse = ""
				apply(t, p, table.New(), nil)
			}
			apply(t, p, table.New(ports...), nil)
			other := *ports[42]
			other.Frontends = []table.Frontend{{Addr: ap("10.96.0.43:80"), Endpoints: eps("10.0.0.66:80")}}
			k.refuse = "10.0.0.66"
			if err := p.Apply(t.Context(), table.New(&other), []table.Key{other.Key()}); err == nil {
				t.Error("the refused change is not told of")
			}
			if n := strings.Count(dump(t, p), "-j DNAT"); n != 100 {
				t.Errorf("%d frontends are there, want all as they were", n)
			}
		})
	})
}

// A change asks for nothing but itself.
func TestWorkFollowsChange(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		withTools(t, v, Config{}, func(p *Plane, k *counting) {
			ports := large(1000, 10)
			apply(t, p, table.New(ports...), nil)
			next := *ports[500]
			next.Frontends = slices.Clone(next.Frontends)
			next.Frontends[0].Endpoints = next.Frontends[0].Endpoints[1:]
			*k = counting{tool: k.tool}
			apply(t, p, table.New(&next), []table.Key{next.Key()})
			if k.restores != 1 || k.saves != 0 || k.bytes > 20000 {
				t.Errorf("%d changes, %d tables read, %d bytes for one endpoint less, want 1, 0 and few", k.restores, k.saves, k.bytes)
			}
			// Node port addresses may change alone.
			tab := table.New(ports...)
			tab.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			*k = counting{tool: k.tool}
			apply(t, p, tab, []table.Key{})
			if d := dump(t, p); k.restores != 1 || !strings.Contains(d, "-d 192.0.2.1/32 -g "+chainNodePorts) || k.bytes > 2000 {
				t.Errorf("%d changes, %d bytes, no rule for the new address", k.restores, k.bytes)
			}
		})
	})
}

// SEEDS 50: what was written goes on working without a process, and its
// successor takes it over without a packet lost.
func TestAdoptionUnderLoad(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		e := flows.NewEnv(t, create(v))
		other := servicePort("other", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.1.1:80"), Endpoints: eps("10.244.9.9:80")})
		e.Apply(t, e.Stable(other), nil)
		e.UnderLoad(t, func() {
			for i := range 15 {
				e.Node.Do(func() { e.Plane = create(v)(t, e.Node) })
				if i%2 == 0 {
					e.Apply(t, e.Stable(), nil)
				} else {
					e.Apply(t, e.Stable(other), nil)
				}
			}
		})
	})
}

// Endpoints of the Service under load come and go: nobody but their own
// connections notices.
func TestChurnUnderLoad(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		e := flows.NewEnv(t, create(v))
		e.Apply(t, e.Stable(), nil)
		e.UnderLoad(t, func() {
			start := time.Now()
			for i := 0; time.Since(start) < 1500*time.Millisecond; i++ {
				for q := range e.Stable().All() {
					p := *q
					p.Frontends = slices.Clone(p.Frontends)
					all := p.Frontends[0].Endpoints
					n := i % len(all)
					p.Frontends[0].Endpoints = slices.Delete(slices.Clone(all), n, n+i%2)
					e.Apply(t, table.New(&p), []table.Key{p.Key()})
				}
			}
		})
	})
}

// A neighbour that forwards nothing by default, such as docker, does not cut
// Services off; kube-proxy's do not either.
func TestForwardPolicyDrop(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		e := flows.NewEnv(t, create(v))
		row := &flows.Row{Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{Kind: table.NodePort, To: "a d", Masquerade: true}}}},
			From: "client", To: "node", Want: flows.Want{Reach: "a d"}}
		e.Apply(t, e.Table(svc.IPv4, svc.TCP, row), nil)
		e.Node.Do(func() { run(t, "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", restoreProgram(v), "--noflush") })
		e.Check(t, svc.IPv4, svc.TCP, row)
	})
}

// While a local endpoint goes, a packet to itself that met the rules of before
// is still masqueraded.
func TestHairpinGoesLast(t *testing.T) {
	withTools(t, NFT, Config{}, func(p *Plane, k *counting) {
		web := func(to ...string) *table.ServicePort {
			return servicePort("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: eps(to...)})
		}
		apply(t, p, table.New(web("*10.244.1.2:80", "*10.244.1.3:80")), nil)
		var inputs []string
		k.tool = watching{k.tool, &inputs}
		apply(t, p, table.New(web("*10.244.1.3:80")), []table.Key{web().Key()})
		if len(inputs) != 2 || strings.Contains(inputs[0], chainHairpin) || !strings.Contains(inputs[1], chainHairpin) {
			t.Errorf("told iptables %q, want the endpoint's rules first, then %s", inputs, chainHairpin)
		}
	})
}

type watching struct {
	tool
	inputs *[]string
}

func (w watching) Restore(ctx context.Context, input []byte) error {
	*w.inputs = append(*w.inputs, string(input))
	return w.tool.Restore(ctx, input)
}
