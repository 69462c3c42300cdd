package flows

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Looks writes each Table into the kernel, and fails unless the mode reads back every frontend as the Table has
// it. A frontend that two ports want is left out: it is as one of them has it.
func Looks(t testing.TB, tabs []*table.Table, inside Inside) {
	t.Helper()
	inside(t, func(p dataplane.Applier) {
		routeLoopback(t)
		looker := p.(dataplane.Looker)
		looked := 0
		for i, tab := range tabs {
			Apply(t, p, tab, nil)
			asked, want := Asked(tab)
			found, err := looker.Look(t.Context(), asked, netip.Addr{})
			if err != nil {
				t.Fatalf("state %d: %v", i, err)
			}
			for k := range found {
				looked++
				if d := found[k].Differs(&want[k]); d != "" || len(found[k].Proof) == 0 {
					t.Errorf("state %d, %s: %q, proof %v", i, asked[k], d, found[k].Proof)
				}
			}
			absent := dataplane.Asked{Family: svc.IPv4, At: netip.MustParseAddr("10.96.99.99"),
				FrontKey: dataplane.FrontKey{Addr: netip.MustParseAddr("10.96.99.99"), Port: 80, Proto: svc.TCP}}
			if found, err = looker.Look(t.Context(), []dataplane.Asked{absent}, netip.Addr{}); err != nil || found[0].Present {
				t.Errorf("state %d: a frontend that does not exist is %+v, %v", i, found, err)
			}
			if t.Failed() {
				t.Fatalf("the kernel has:\n%s", Dump(t, p))
			}
		}
		if looked < 50 {
			t.Errorf("only %d frontends were looked at", looked)
		}
	})
}

// Asked are the frontends of a Table, and what a mode must have of each.
func Asked(tab *table.Table) (asked []dataplane.Asked, want []dataplane.Installed) {
	type front struct {
		dataplane.FrontKey
		svc.Family
	}
	wanted := map[front]int{}
	for p := range tab.All() {
		for i := range p.Frontends {
			wanted[front{dataplane.KeyOf(p.Protocol, &p.Frontends[i]), p.Family}]++
		}
	}
	for p := range tab.All() {
		for i := range p.Frontends {
			f := &p.Frontends[i]
			a := dataplane.AskedOf(tab, p, f)
			if wanted[front{a.FrontKey, a.Family}] > 1 || !a.At.IsValid() {
				continue
			}
			asked, want = append(asked, a), append(want, dataplane.Expected(p, f))
		}
	}
	return asked, want
}
