package iptables

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/google/go-cmp/cmp"
)

// restoreProgram is the program of a variant that changes tables, saveProgram
// the one that reads them.
func restoreProgram(v Variant) string { return "iptables-" + string(v) + "-restore" }
func saveProgram(v Variant) string    { return "iptables-" + string(v) + "-save" }

// What somebody else removes or adds is put right by the next full Apply,
// which names it.
func TestRepair(t *testing.T) {
	for _, c := range []struct{ name, table, do, say string }{
		{"jump", "nat", `-D PREROUTING -m comment --comment "fairlead services" -j FAIRLEAD-SERVICES`, "the rule in chain PREROUTING of table nat that leads to our chains was missing"},
		{"all jumps", "filter", "-F FORWARD\n-F INPUT\n-F OUTPUT", "the rule in chain FORWARD of table filter"},
		{"rules", "nat", "-F FAIRLEAD-VIPS", "the rules of chain FAIRLEAD-VIPS of table nat were changed, with TCP 10.96.0.10:80 of default/web:http"},
		{"one rule", "nat", "-D FAIRLEAD-NODEPORTS 1", "the rules of chain FAIRLEAD-NODEPORTS of table nat were changed, with TCP node port 30080 of default/web:http"},
		{"a rule more", "nat", "-A FAIRLEAD-POSTROUTING -j RETURN", "the rules of chain FAIRLEAD-POSTROUTING of table nat were changed"},
		{"chain", "nat", "-F FAIRLEAD-VIPS\n-F FAIRLEAD-F-0a60000bT0050\n-X FAIRLEAD-F-0a60000bT0050", "chain FAIRLEAD-F-0a60000bT0050 of table nat was missing"},
		{"everything", "nat", "-F\n-X", "chain FAIRLEAD-VIPS of table nat was missing"},
		{"everything of filter", "filter", "-F\n-X", "chain FAIRLEAD-REFUSE of table filter was missing"},
		{"foreign chain", "nat", ":FAIRLEAD-SPY - [0:0]\n-A FAIRLEAD-SPY -j RETURN\n-I FAIRLEAD-VIPS -j FAIRLEAD-SPY", "a foreign chain FAIRLEAD-SPY was in table nat"},
		{"jump twice", "nat", `-A OUTPUT -m comment --comment "fairlead services" -j FAIRLEAD-OUTPUT`, "a foreign rule in chain OUTPUT of table nat"},
		{"jump by others", "nat", ":SPY - [0:0]\n-A SPY -p tcp -j FAIRLEAD-REFUSE", "a foreign rule in chain SPY of table nat"},
	} {
		t.Run(c.name, func(t *testing.T) {
			variants(t, func(t *testing.T, v Variant) {
				inside(t, Config{Variant: v}, func(p *Plane) {
					tab := everyField()
					apply(t, p, tab, nil)
					if r := p.Repaired(); len(r) != 0 {
						t.Errorf("the first Apply repaired %q", r)
					}
					before := dump(t, p)
					run(t, "*"+c.table+"\n"+c.do+"\nCOMMIT\n", restoreProgram(v), "--noflush")
					if before == dump(t, p) {
						t.Fatal("the damage does not show")
					}
					apply(t, p, tab, nil)
					if d := cmp.Diff(before, dump(t, p)); d != "" {
						t.Errorf("(-before +repaired):\n%s", d)
					}
					if r := strings.Join(p.Repaired(), "\n"); !strings.Contains(r, c.say) {
						t.Errorf("Repaired says\n%s\nwant something about %q", r, c.say)
					}
					apply(t, p, tab, nil)
					if r := p.Repaired(); len(r) != 0 {
						t.Errorf("repaired again: %q", r)
					}
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
	withTools(t, NFT, Config{}, func(p *Plane, c *counting) {
		c.tool = respelling{c.tool}
		tab := everyField()
		for i := range 4 {
			c.restores = 0
			apply(t, p, tab, nil)
			if r := p.Repaired(); len(r) > 0 || i > 1 && c.restores > 0 {
				t.Errorf("audit %d: %d changes, repaired %q", i, c.restores, r)
			}
		}
		run(t, "*nat\n-F FAIRLEAD-MARK-MASQ\nCOMMIT\n", restoreProgram(NFT), "--noflush")
		apply(t, p, tab, nil)
		if r := p.Repaired(); len(r) != 1 || !strings.Contains(r[0], "FAIRLEAD-MARK-MASQ") {
			t.Errorf("repaired %q, want the chain that was emptied", r)
		}
		apply(t, p, tab, nil)
		if r := p.Repaired(); len(r) > 0 || !strings.Contains(dump(t, p), "--or-mark") {
			t.Errorf("repaired %q", r)
		}
	})
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
	for line := range strings.Lines(run(t, "", saveProgram(v))) {
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
		inside(t, Config{Variant: v}, func(p *Plane) {
			run(t, neighbour, restoreProgram(v), "--noflush")
			before := saved(t, v)
			for _, tab := range []*table.Table{everyField(), table.New(), everyField()} {
				apply(t, p, tab, nil)
				apply(t, p, tab, nil)
				for line := range strings.Lines(before) {
					if !strings.HasPrefix(line, ":") && !strings.Contains(saved(t, v), line) {
						t.Errorf("lost %q", line)
					}
				}
			}
			if out := saved(t, v); strings.Index(out, "fairlead services") > strings.Index(out, "DOCKER-USER\n") {
				t.Errorf("our rules come after others':\n%s", out)
			}
			for range 2 {
				if err := Cleanup(t.Context()); err != nil {
					t.Fatal(err)
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
		if out := run(t, "", "nft", "list", "ruleset") + run(t, "", "iptables-legacy-save"); out != "" {
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
			apply(t, p, everyField(), nil)
		}
		if err := Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, program := range []string{"iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-save", "ip6tables-legacy-save"} {
			if out := run(t, "", program); strings.Contains(out, prefix) {
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
		if err := Probe(); err != nil {
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
		{"kubelet", map[Variant]string{Legacy: neighbour, NFT: "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"}, NFT, "the kubelet's rules are there"},
		{"ours", map[Variant]string{NFT: neighbour, Legacy: "*nat\n:FAIRLEAD-VIPS - [0:0]\nCOMMIT\n"}, Legacy, "our own rules of an earlier run are there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testbed.NewNetwork(t).Outside("host").Do(func() {
				for v, text := range c.rules {
					run(t, text, restoreProgram(v), "--noflush")
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
	inside(t, Config{}, func(p *Plane) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.Apply(ctx, everyField(), nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Apply = %v, want that it was cancelled", err)
		}
		apply(t, p, everyField(), []table.Key{})
		if d := dump(t, p); !strings.Contains(d, "-d 10.96.0.10/32") {
			t.Errorf("an Apply after one that failed did not do all of it:\n%s", d)
		}
	})
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []Config{{MasqueradeBit: 32}, {RefuseBit: -1}, {RefuseBit: 14}, {Variant: "ebtables"}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v: no error", cfg)
		}
	}
	for s, want := range map[string]Balance{"": Random, "random": Random, "roundrobin": RoundRobin} {
		if b, err := ParseBalance(s); err != nil || b != want {
			t.Errorf("ParseBalance(%q) = %v, %v", s, b, err)
		}
	}
	if _, err := ParseBalance("rr"); err == nil {
		t.Error("rr is not a balance")
	}
	for s, want := range map[string]Variant{"": Auto, "auto": Auto, "nft": NFT, "legacy": Legacy} {
		if v, err := ParseVariant(s); err != nil || v != want {
			t.Errorf("ParseVariant(%q) = %v, %v", s, v, err)
		}
	}
}

func TestValidateNamesTheFault(t *testing.T) {
	ok := servicePort("web", "", 4, 6, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: eps("10.0.0.1:1")})
	if err := validate(ok); err != nil {
		t.Error(err)
	}
	if err := validate(servicePort("web", "", 4, 1)); err == nil {
		t.Error("a protocol without ports: no error")
	}
	for name, f := range map[string]table.Frontend{
		"family":          {Addr: ap("[fd00::1]:80")},
		"mapped":          {Addr: netip.AddrPortFrom(netip.MustParseAddr("::ffff:10.0.0.1"), 80)},
		"port":            {Addr: ap("10.96.0.1:0")},
		"endpoint family": {Addr: ap("10.96.0.1:80"), Endpoints: eps("[fd00::1]:80")},
		"endpoint port":   {Addr: ap("10.96.0.1:80"), LocalClients: eps("10.0.0.1:0")},
		"too many":        {Addr: ap("10.96.0.1:80"), Endpoints: slices.Repeat(eps("10.0.0.1:1"), maxEndpoints+1)},
	} {
		if err := validate(servicePort("web", "", 4, 6, f)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
