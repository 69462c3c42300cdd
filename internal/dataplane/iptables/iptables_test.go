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

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// The kernel has what an administrator can read, the same in both variants.
func TestGoldenDump(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		inside(t, Config{Variant: v, DropInvalid: true}, func(p *Mode) {
			flows.Apply(t, p, flows.EveryField(), nil)
			flows.Golden(t, *update, "dump.txt", flows.Dump(t, p))
		})
	})
}

// What is written is read back letter by letter: else every audit would find
// something to repair.
func TestAuditFindsNothing(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		for _, balance := range []dataplane.Balance{dataplane.Random, dataplane.RoundRobin} {
			for i, tab := range append(flows.States(10), bigTable(200, 10), bigTable(3, 100)) {
				withTools(t, v, Config{Balance: balance, DropInvalid: true}, func(p *Mode, c *counting) {
					flows.Apply(t, p, tab, nil)
					c.restores = 0
					for _, how := range [][]table.Key{nil, {}, flows.Changes(table.New(), tab)} {
						flows.Apply(t, p, tab, how)
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
func bigTable(n, endpoints int) *table.Table { return table.New(flows.Large(n, endpoints)...) }

// counting counts what is asked of iptables, and fails some of it.
type counting struct {
	tool
	restores, saves, bytes int
	fail                   func() error
	refuse                 string
	busy                   func(input string) bool
}

func (c *counting) Restore(ctx context.Context, input []byte) error {
	c.restores++
	c.bytes += len(input)
	if c.fail != nil {
		if err := c.fail(); err != nil {
			return err
		}
	}
	if c.busy != nil && c.busy(string(input)) {
		return &iptables.Error{Program: "iptables-restore", Code: 4, Said: "Resource temporarily unavailable"}
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
func withTools(t testing.TB, v Variant, cfg Config, f func(*Mode, *counting)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		c := &counting{}
		p, err := newMode(cfg, func(fam svc.Family) (tool, error) {
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

// What iptables refuses of one frontend is found among many and left out, and
// what it had before stays.
func TestRefusedFrontendIsIsolated(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		var ports []*table.ServicePort
		for i := range 100 {
			ports = append(ports, flows.Port(fmt.Sprintf("s%02d", i), "", svc.IPv4, svc.TCP,
				table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", i+1)), Endpoints: flows.Endpoints("10.0.0.1:80")}))
		}
		withTools(t, v, Config{}, func(p *Mode, k *counting) {
			flows.Apply(t, p, table.New(), nil)
			for _, how := range [][]table.Key{nil, flows.Changes(table.New(), table.New(ports...))} {
				k.refuse = "-d 10.96.0.43/32 -p tcp"
				err := p.Apply(t.Context(), table.New(ports...), how)
				if err == nil || !strings.Contains(err.Error(), "TCP 10.96.0.43:80 of default/s42") || strings.Contains(err.Error(), "s41") {
					t.Errorf("%v, want an error that names 10.96.0.43:80 alone", err)
				}
				d := flows.Dump(t, p)
				if n := strings.Count(d, "-j DNAT"); n != 99 || strings.Contains(d, "10.96.0.43/32") || strings.Contains(d, chainTry) {
					t.Errorf("%d frontends are there, want the other 99:\n%s", n, d)
				}
				k.refuse = ""
				flows.Apply(t, p, table.New(), nil)
			}
			flows.Apply(t, p, table.New(ports...), nil)
			other := *ports[42]
			other.Frontends = []table.Frontend{{Addr: flows.AP("10.96.0.43:80"), Endpoints: flows.Endpoints("10.0.0.66:80")}}
			k.refuse = "10.0.0.66"
			var refused *dataplane.Rejected
			if err := p.Apply(t.Context(), table.New(&other), []table.Key{other.Key()}); !errors.As(err, &refused) ||
				refused.Ports[other.Key()] == nil || len(refused.Ports) != 1 {
				t.Errorf("%v, want that default/s42 alone was refused", err)
			}
			// Others change beside it without anything being read.
			k.saves = 0
			next := *ports[7]
			next.Frontends = []table.Frontend{{Addr: flows.AP("10.96.0.8:80"), Endpoints: flows.Endpoints("10.0.0.7:80")}}
			flows.Apply(t, p, table.New(&next), []table.Key{next.Key()})
			if k.saves > 0 {
				t.Errorf("%d tables were read for a change beside a refused port", k.saves)
			}
			if d := flows.Dump(t, p); !strings.Contains(d, "--to-destination 10.0.0.7:80") {
				t.Errorf("the other one is not as it was to be:\n%s", d)
			}
			if n := strings.Count(flows.Dump(t, p), "-j DNAT"); n != 100 {
				t.Errorf("%d frontends are there, want all as they were", n)
			}
		})
	})
}

// A change asks for nothing but itself.
func TestWorkFollowsChange(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		withTools(t, v, Config{}, func(p *Mode, k *counting) {
			ports := flows.Large(1000, 10)
			flows.Apply(t, p, table.New(ports...), nil)
			next := *ports[500]
			next.Frontends = slices.Clone(next.Frontends)
			next.Frontends[0].Endpoints = next.Frontends[0].Endpoints[1:]
			*k = counting{tool: k.tool}
			flows.Apply(t, p, table.New(&next), []table.Key{next.Key()})
			if k.restores != 1 || k.saves != 0 || k.bytes > 20000 {
				t.Errorf("%d changes, %d tables read, %d bytes for one endpoint less, want 1, 0 and few", k.restores, k.saves, k.bytes)
			}
			// Node port addresses may change alone.
			tab := table.New(ports...)
			tab.NodePortAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			*k = counting{tool: k.tool}
			flows.Apply(t, p, tab, []table.Key{})
			if d := flows.Dump(t, p); k.restores != 1 || !strings.Contains(d, "-d 192.0.2.1/32 -g "+chainNodePorts) || k.bytes > 2000 {
				t.Errorf("%d changes, %d bytes, no rule for the new address", k.restores, k.bytes)
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
		e.Node.Do(func() { flows.Command(t, "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", restoreProgram(v), "--noflush") })
		e.Check(t, svc.IPv4, svc.TCP, row)
	})
}

// While a local endpoint goes, a packet to itself that met the rules of before
// is still masqueraded.
func TestHairpinGoesLast(t *testing.T) {
	withTools(t, NFT, Config{}, func(p *Mode, k *counting) {
		web := func(to ...string) *table.ServicePort {
			return flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: flows.Endpoints(to...)})
		}
		flows.Apply(t, p, table.New(web("*10.244.1.2:80", "*10.244.1.3:80")), nil)
		var inputs []string
		k.tool = watching{k.tool, &inputs}
		flows.Apply(t, p, table.New(web("*10.244.1.3:80")), []table.Key{web().Key()})
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

func empty(cfg Config) flows.Inside {
	return func(t testing.TB, f func(dataplane.Applier)) { inside(t, cfg, func(p *Mode) { f(p) }) }
}

// From any state to any other the kernel has what a fresh start would give.
func TestRandomWalk(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		for _, cfg := range []Config{{Variant: v}, {Variant: v, Balance: dataplane.RoundRobin, DropInvalid: true}} {
			flows.RandomWalk(t, 60, flows.States(10), empty(cfg), func() dataplane.Applier {
				next, err := New(cfg)
				if err != nil {
					t.Fatal(err)
				}
				return next
			})
		}
	})
}

// One change in ten fails; a caller that keeps to the contract gets to the same
// end.
func TestFaultsConverge(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		tabs := flows.States(10)
		want := flows.Fresh(t, empty(Config{Variant: v}), tabs)
		withTools(t, v, Config{}, func(p *Mode, k *counting) {
			r := rand.New(rand.NewPCG(3, 4))
			injected := 0
			k.fail = func() error {
				if r.IntN(10) == 0 {
					injected++
					return []error{errors.New("fork: no memory"), &iptables.Error{Program: "restore", Code: 4},
						&iptables.Error{Program: "restore", Code: 1, Said: "no"}}[r.IntN(3)]
				}
				return nil
			}
			flows.Converge(t, 80, tabs, want, p)
			if injected < 5 {
				t.Errorf("only %d faults were injected", injected)
			}
		})
	})
}

// A port that cannot be written costs none of the others.
func TestOneBadPort(t *testing.T) {
	flows.OneBadPort(t, empty(Config{}), "-d 10.96.0.1/32 -p tcp", "10.96.0.2")
}

func TestAdoptionUnderLoad(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) { flows.AdoptionUnderLoad(t, create(v)) })
}

func TestChurnUnderLoad(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) { flows.ChurnUnderLoad(t, create(v)) })
}

// recording records what is given to iptables-restore.
type recording struct {
	tool
	inputs *[]string
}

func (r recording) Restore(ctx context.Context, input []byte) error {
	*r.inputs = append(*r.inputs, string(input))
	return r.tool.Restore(ctx, input)
}

// A proxy that starts where nothing has changed since the last one ended writes
// nothing but what it tries and takes back.
func TestRestartWritesNothing(t *testing.T) {
	for v, kind := range map[Variant]iptables.Variant{NFT: iptables.NFT, Legacy: iptables.Legacy} {
		t.Run(string(v), func(t *testing.T) {
			testbed.NewNetwork(t).Outside("host").Do(func() {
				var inputs []string
				start := func() *Mode {
					m, err := newMode(Config{Variant: v}, func(f svc.Family) (tool, error) {
						tool, err := iptables.New(kind, f)
						return recording{tool, &inputs}, err
					})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = m.Close() })
					return m
				}
				m := start()
				for _, tab := range flows.States(3)[8:] { // big ones, none, every field
					flows.Apply(t, m, tab, nil)
					inputs = nil
					m = start()
					flows.Apply(t, m, tab, nil)
					for _, input := range inputs {
						for line := range strings.Lines(input) {
							if strings.Contains(line, prefix) && !strings.Contains(line, chainTry) {
								t.Errorf("the start has written %s", line)
							}
						}
					}
				}
			})
		})
	}
}
