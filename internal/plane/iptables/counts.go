package iptables

import (
	"context"
	"errors"
	"fmt"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/plane"
	"github.com/fairlead/fairlead/internal/plane/lost"
	"github.com/fairlead/fairlead/internal/svc"
)

// counts is what the Plane needs of lost.IPSets.
type counts interface {
	Open(families ...svc.Family) error
	Lost(ctx context.Context) ([]plane.Lost, error)
	Close() error
}

// Lost is plane.Counter's. Where the kernel has no ipset nothing is counted.
func (p *Plane) Lost(ctx context.Context) ([]plane.Lost, error) { return p.lost.Lost(ctx) }

// count makes the sets that the rules count in. The first time it finds out
// whether this kernel's rules can do so; if not, the mode works without counts.
// full says that everything is going to be compared. An error is about this
// moment: the caller comes again.
func (p *Plane) count(ctx context.Context, full bool) error {
	first := !p.families[0].layout.counts
	if p.uncounted || !full && !first {
		return nil
	}
	var fams []svc.Family
	for _, f := range p.families {
		fams = append(fams, f.layout.family)
	}
	err := p.lost.Open(fams...)
	for _, f := range p.families {
		if err == nil && first {
			err = f.tryCounts(ctx)
			var failed *iptables.Error
			if err != nil && (!errors.As(err, &failed) || failed.Busy()) {
				return fmt.Errorf("iptables %s: try to count lost packets: %w", f.layout.family, err)
			}
		}
	}
	if p.uncounted = err != nil; p.uncounted {
		p.cfg.Log.Warn("packets that are refused or dropped are not counted by Service: the kernel lacks ipset (ip_set_hash_ipport) or its match and target for iptables (xt_set)", "err", err)
	}
	for _, f := range p.families {
		f.layout.counts = !p.uncounted
	}
	return nil
}

// tryCounts writes the rules that count into a chain to which nothing leads, and
// removes it again.
func (f *family) tryCounts(ctx context.Context) error {
	head := "*" + tableFilter + "\n:" + chainTry + " - [0:0]\n"
	var rules string
	for _, how := range []lost.Fate{lost.Refused, lost.Dropped} {
		rules += "-A " + chainTry + " " + counted.Rule(f.layout.family, how) + "\n"
	}
	return f.tool.Restore(ctx, []byte(head+rules+"COMMIT\n"+head+"-X "+chainTry+"\nCOMMIT\n"))
}
