package iptables

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// noSets is a kernel without ipset.
type noSets struct{ opened int }

func (n *noSets) Open(...svc.Family) error {
	n.opened++
	return errors.New("no such thing as sets")
}
func (*noSets) Drops(context.Context) ([]dataplane.DropCount, error) { return nil, nil }
func (*noSets) Close() error                                         { return nil }

// Without ipset in the kernel, or without its match and target for iptables, the
// mode works as ever, tells once that nothing is counted, and rules of an earlier
// kernel that did count go.
func TestWithoutSets(t *testing.T) {
	for name, take := range map[string]func(*Mode, *counting){
		"no ipset":  func(p *Mode, _ *counting) { p.drops = &noSets{} },
		"no xt_set": func(_ *Mode, c *counting) { c.refuse = "--match-set" },
	} {
		t.Run(name, func(t *testing.T) {
			variants(t, func(t *testing.T, v Variant) {
				var log bytes.Buffer
				cfg := Config{Variant: v, Log: slog.New(slog.NewTextHandler(&log, nil))}
				withTools(t, v, cfg, func(p *Mode, c *counting) {
					before, err := New(cfg)
					if err != nil {
						t.Fatal(err)
					}
					flows.Apply(t, before, flows.EveryField(), nil)
					if d := flows.Dump(t, before); strings.Count(d, "--add-set") != 4 || log.Len() > 0 {
						t.Fatalf("log %q, and the kernel has\n%s", log.String(), d)
					}
					take(p, c)
					for _, tab := range []*table.Table{flows.EveryField(), table.New(), flows.EveryField()} {
						flows.Apply(t, p, tab, nil)
						flows.Apply(t, p, tab, []table.Key{})
					}
					d := flows.Dump(t, p)
					if strings.Contains(d, "match-set") || !strings.Contains(d, "-j REJECT") || !strings.Contains(d, "-d 10.96.0.12/32 -p tcp ") {
						t.Errorf("the kernel has\n%s", d)
					}
					if n := strings.Count(log.String(), "are not counted"); n != 1 {
						t.Errorf("told %d times: %s", n, log.String())
					}
					if s, ok := p.drops.(*noSets); ok && s.opened != 1 {
						t.Errorf("sets were asked for %d times", s.opened)
					}
					if c, err := p.Drops(t.Context()); len(c) > 0 || err != nil {
						t.Errorf("Lost = %v, %v", c, err)
					}
				})
			})
		})
	}
}

// Where iptables is busy while the rules that count are tried, the next
// comparison tries again, but not for ever.
func TestCountingIsTriedAgain(t *testing.T) {
	for busy, want := range map[int]int{1: 4, maxUndecided: 4, maxUndecided + 1: 0} {
		withTools(t, NFT, Config{}, func(p *Mode, c *counting) {
			left := busy
			c.busy = func(input string) bool {
				if strings.Contains(input, "--add-set") && strings.Contains(input, chainTry) {
					left--
					return left >= 0
				}
				return false
			}
			for range busy {
				flows.Apply(t, p, flows.EveryField(), nil)
				if d := flows.Dump(t, p); strings.Contains(d, "--add-set") {
					t.Errorf("while it was busy the kernel got\n%s", d)
				}
			}
			flows.Apply(t, p, flows.EveryField(), nil)
			if d := flows.Dump(t, p); strings.Count(d, "--add-set") != want {
				t.Errorf("after %d times busy the kernel has\n%s", busy, d)
			}
		})
	}
}

// A program that removes our rules, and then the sets that they named, does not
// keep the next audit from putting both back.
func TestSetsAreRepaired(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		inside(t, Config{Variant: v}, func(p *Mode) {
			flows.Repair(t, p, flows.EveryField(), func() {
				for _, program := range []string{restoreProgram(v), strings.Replace(restoreProgram(v), "ip", "ip6", 1)} {
					flows.Command(t, "*filter\n:"+chainRefuse+" - [0:0]\n:"+chainDrop+" - [0:0]\nCOMMIT\n", program, "--noflush")
				}
				if err := ipset.Remove(t.Context(), counted.Names()...); err != nil {
					t.Fatal(err)
				}
			}, "the rules of chain "+chainRefuse+" of table filter were changed")
			if there, err := ipset.Present(counted.Names()...); err != nil || len(there) != 4 {
				t.Errorf("sets %q, %v, want 4", there, err)
			}
		})
	})
}

// Counts may be asked for at any time, also beside an Apply.
func TestLostBesideApply(t *testing.T) {
	inside(t, Config{}, func(p *Mode) {
		var _ dataplane.Counter = p
		done := make(chan error)
		go func() {
			var err error
			for range 50 {
				_, e := p.Drops(context.WithoutCancel(t.Context()))
				err = errors.Join(err, e)
			}
			done <- err
		}()
		for range 5 {
			flows.Apply(t, p, flows.EveryField(), nil)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if c, err := p.Drops(t.Context()); len(c) > 0 || err != nil {
			t.Errorf("after Close Lost = %v, %v", c, err)
		}
	})
}
