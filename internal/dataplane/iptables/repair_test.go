package iptables

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// restoreProgram is the program of a variant that changes tables, saveProgram
// the one that reads them.
func restoreProgram(v Variant) string { return "iptables-" + string(v) + "-restore" }
func saveProgram(v Variant) string    { return "iptables-" + string(v) + "-save" }

// What another program removes or adds is repaired by the next full Apply,
// which names it.
func TestRepair(t *testing.T) {
	for _, c := range []struct{ name, table, do, say string }{
		{"jump", "nat", `-D PREROUTING -m comment --comment "fairlead services" -j FAIRLEAD-SERVICES`,
			"the rule in chain PREROUTING of table nat that leads to our chains was missing"},
		{"all jumps", "filter", "-F FORWARD\n-F INPUT\n-F OUTPUT", "the rule in chain FORWARD of table filter"},
		{"rules", "nat", "-F FAIRLEAD-VIPS",
			"the rules of chain FAIRLEAD-VIPS of table nat were changed, with TCP 10.96.0.10:80 of default/web:http"},
		{"one rule", "nat", "-D FAIRLEAD-NODEPORTS 1",
			"the rules of chain FAIRLEAD-NODEPORTS of table nat were changed, with TCP node port 30080 of default/web:http"},
		{"a rule more", "nat", "-A FAIRLEAD-POSTROUTING -j RETURN", "the rules of chain FAIRLEAD-POSTROUTING of table nat were changed"},
		{"chain", "nat", "-F FAIRLEAD-VIPS\n-F FAIRLEAD-F-0a60000bT0050\n-X FAIRLEAD-F-0a60000bT0050",
			"chain FAIRLEAD-F-0a60000bT0050 of table nat was missing"},
		{"everything", "nat", "-F\n-X", "chain FAIRLEAD-VIPS of table nat was missing"},
		{"everything of filter", "filter", "-F\n-X", "chain FAIRLEAD-REFUSE of table filter was missing"},
		{"foreign chain", "nat", ":FAIRLEAD-SPY - [0:0]\n-A FAIRLEAD-SPY -j RETURN\n-I FAIRLEAD-VIPS -j FAIRLEAD-SPY",
			"a foreign chain FAIRLEAD-SPY was in table nat"},
		{"jump twice", "nat", `-A OUTPUT -m comment --comment "fairlead services" -j FAIRLEAD-OUTPUT`,
			"a foreign rule in chain OUTPUT of table nat"},
		{"jump by others", "nat", ":SPY - [0:0]\n-A SPY -p tcp -j FAIRLEAD-REFUSE", "a foreign rule in chain SPY of table nat"},
	} {
		t.Run(c.name, func(t *testing.T) {
			variants(t, func(t *testing.T, v Variant) {
				inside(t, Config{Variant: v}, func(p *Mode) {
					flows.Repair(t, p, flows.EveryField(), func() {
						flows.Command(t, "*"+c.table+"\n"+c.do+"\nCOMMIT\n", restoreProgram(v), "--noflush")
					}, c.say)
				})
			})
		})
	}
}

// respelling prints some rules otherwise than they were written, as another
// version of iptables may.
type respelling struct{ tool }

func (r respelling) Save(ctx context.Context, table string, chain func(string), rule func(string, string)) error {
	return r.tool.Save(ctx, table, chain, func(name, line string) {
		rule(name, strings.ReplaceAll(line, "--set-xmark 0x4000/0x4000", "--or-mark 16384"))
	})
}

// Another spelling of the same is nothing to repair, for ever; real damage to
// the same chain is.
func TestOtherSpellings(t *testing.T) {
	withTools(t, NFT, Config{}, func(p *Mode, c *counting) {
		c.tool = respelling{c.tool}
		tab := flows.EveryField()
		for i := range 4 {
			c.restores = 0
			flows.Apply(t, p, tab, nil)
			if r := p.Repaired(); len(r) > 0 || i > 1 && c.restores > 0 {
				t.Errorf("audit %d: %d changes, repaired %q", i, c.restores, r)
			}
		}
		flows.Command(t, "*nat\n-F FAIRLEAD-MARK-MASQ\nCOMMIT\n", restoreProgram(NFT), "--noflush")
		flows.Apply(t, p, tab, nil)
		if r := p.Repaired(); len(r) != 1 || !strings.Contains(r[0], "FAIRLEAD-MARK-MASQ") {
			t.Errorf("repaired %q, want the chain that was emptied", r)
		}
		flows.Apply(t, p, tab, nil)
		if r := p.Repaired(); len(r) > 0 || !strings.Contains(flows.Dump(t, p), "--or-mark") {
			t.Errorf("repaired %q", r)
		}
	})
}

// meddling does something once, right after rules have been written.
type meddling struct {
	tool
	do func()
}

func (m *meddling) Restore(ctx context.Context, input []byte) error {
	err := m.tool.Restore(ctx, input)
	if do := m.do; do != nil {
		m.do = nil
		do()
	}
	return err
}

// Rules that another program removes while they are put back are no other spelling of
// them: they come back at once, for nothing reports the removal later.
func TestRulesRemovedWhileWritten(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			withTools(t, v, Config{}, func(p *Mode, c *counting) {
				tab := flows.EveryField()
				flows.Apply(t, p, tab, nil)
				want := flows.Dump(t, p)
				remove := func() {
					flows.Command(t, "*nat\n-F FAIRLEAD-MARK-MASQ\nCOMMIT\n", restoreProgram(v), "--noflush")
				}
				remove()
				removed := 0
				c.tool = &meddling{c.tool, func() { remove(); removed++ }}
				flows.Apply(t, p, tab, nil)
				if d := cmp.Diff(want, flows.Dump(t, p)); d != "" || removed != 1 {
					t.Errorf("removed %d times (-before +after):\n%s", removed, d)
				}
				if r := p.Repaired(); len(r) != 1 || !strings.Contains(r[0], "FAIRLEAD-MARK-MASQ") {
					t.Errorf("repaired %q, want the chain that was emptied", r)
				}
			})
		})
	}
}

const neighbour = `*filter
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -s 192.0.2.0/24 -m comment --comment "not FAIRLEAD-FORWARD" -j DROP
-A DOCKER-USER -j RETURN
COMMIT
*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -d 192.0.2.1/32 -p tcp -j DNAT --to-destination 192.0.2.2
-A KUBE-SERVICES -d 192.0.2.3/32 -j RETURN
COMMIT
`

// saved is what iptables-save prints, without what differs from time to time.
func saved(t *testing.T, v Variant) string {
	var out []string
	for line := range strings.Lines(flows.Command(t, "", saveProgram(v))) {
		if !strings.HasPrefix(line, "#") {
			line, _, _ = strings.Cut(line, " [") // counters
			out = append(out, strings.TrimSpace(line)+"\n")
		}
	}
	return strings.Join(out, "")
}

// Other programs' rules stay as they are, in their order, and Cleanup takes
// away no more than was written.
func TestNeighboursAreLeftAlone(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		inside(t, Config{Variant: v}, func(p *Mode) {
			flows.Command(t, neighbour, restoreProgram(v), "--noflush")
			before := saved(t, v)
			for _, tab := range []*table.Table{flows.EveryField(), table.New(), flows.EveryField()} {
				flows.Apply(t, p, tab, nil)
				flows.Apply(t, p, tab, nil)
				for line := range strings.Lines(before) {
					if !strings.HasPrefix(line, ":") && !strings.Contains(saved(t, v), line) {
						t.Errorf("lost %q", line)
					}
				}
			}
			if out := saved(t, v); strings.Index(out, "fairlead services") > strings.Index(out, "DOCKER-USER\n") {
				t.Errorf("our rules come after others':\n%s", out)
			}
			sets := func() []string {
				there, err := ipset.Present(counted.Names()...)
				if err != nil {
					t.Fatal(err)
				}
				return there
			}
			if there := sets(); len(there) != 4 {
				t.Errorf("sets %q, want 4", there)
			}
			for range 2 {
				// The sets go, too, although nf_tables lets go of them some time
				// after the rules that named them.
				if err := Cleanup(t.Context()); err != nil {
					t.Fatal(err)
				}
				if there := sets(); len(there) > 0 {
					t.Errorf("Cleanup left the sets %q", there)
				}
				if d := cmp.Diff(before, saved(t, v)); d != "" {
					t.Errorf("(-before +after Cleanup):\n%s", d)
				}
			}
		})
	})
}

// Where nothing was written, Cleanup does not even bring the tables about.
func TestCleanupOfNothing(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		if err := Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if out := flows.Command(t, "", "nft", "list", "ruleset") + flows.Command(t, "", "iptables-legacy-save"); out != "" {
			t.Errorf("there is now\n%s", out)
		}
	})
}

// Rules of an earlier run under the other variant are found by Cleanup too.
func TestCleanupOfBothVariants(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		for _, v := range []Variant{NFT, Legacy} {
			p, err := New(Config{Variant: v})
			if err != nil {
				t.Fatal(err)
			}
			flows.Apply(t, p, flows.EveryField(), nil)
		}
		for _, want := range []bool{true, false} {
			if found, err := Present(t.Context()); err != nil || found != want {
				t.Errorf("chains are present: %t, %v; want %t", found, err, want)
			}
			if err := Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for _, program := range []string{"iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-save", "ip6tables-legacy-save"} {
			if out := flows.Command(t, "", program); strings.Contains(out, prefix) {
				t.Errorf("%s still says\n%s", program, out)
			}
		}
	})
}

// The mode works on this kernel, says so by itself, and leaves no chain.
func TestProbe(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		testbed.NewNetwork(t).Outside("host").Do(func() {
			got, why, err := ProbeVariant(t.Context(), v)
			if err != nil || got != v || why == "" {
				t.Errorf("ProbeVariant = %v, %q, %v", got, why, err)
			}
			if out := saved(t, v); strings.Contains(out, prefix) {
				t.Errorf("the probe left something:\n%s", out)
			}
		})
	})
	testbed.NewNetwork(t).Outside("host").Do(func() {
		if _, _, err := ProbeVariant(t.Context(), Auto); err != nil {
			t.Error(err)
		}
	})
}

// The variant follows the rules that are there.
func TestChoose(t *testing.T) {
	for _, c := range []struct {
		name  string
		rules map[Variant]string
		want  Variant
		why   string
	}{
		{"nothing", nil, NFT, "the program iptables is of this variant"},
		{"neighbours", map[Variant]string{Legacy: neighbour}, Legacy, "most other rules are there"},
		{"kubelet", map[Variant]string{Legacy: neighbour, NFT: "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"}, NFT,
			"the kubelet's rules are there"},
		{"ours", map[Variant]string{NFT: neighbour, Legacy: "*nat\n:FAIRLEAD-VIPS - [0:0]\nCOMMIT\n"}, Legacy,
			"our own rules of an earlier run are there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testbed.NewNetwork(t).Outside("host").Do(func() {
				for v, text := range c.rules {
					flows.Command(t, text, restoreProgram(v), "--noflush")
				}
				got, why, err := ProbeVariant(t.Context(), Auto)
				if err != nil || got != c.want || why != c.why {
					t.Errorf("ProbeVariant = %v, %q, %v, want %v, %q", got, why, err, c.want, c.why)
				}
			})
		})
	}
}

func TestApplyStopsWithItsContext(t *testing.T) {
	inside(t, Config{}, func(p *Mode) { flows.StopsWithItsContext(t, p, "-d 10.96.0.10/32") })
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []Config{{MasqueradeBit: 32}, {RejectBit: -1}, {RejectBit: 14}, {Variant: "ebtables"}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v: no error", cfg)
		}
	}
	for s, want := range map[string]Variant{"": Auto, "auto": Auto, "nft": NFT, "legacy": Legacy} {
		if v, err := ParseVariant(s); err != nil || v != want {
			t.Errorf("ParseVariant(%q) = %v, %v", s, v, err)
		}
	}
}
