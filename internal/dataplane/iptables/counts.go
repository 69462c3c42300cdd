package iptables

import (
	"context"
	"errors"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/svc"
)

// counts is what the Mode needs of drops.IPSets.
type counts interface {
	Open(families ...svc.Family) error
	Drops(ctx context.Context) ([]dataplane.DropCount, error)
	Close() error
}

// Drops is dataplane.Counter's. Where the kernel has no ipset nothing is counted.
func (p *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return p.lost.Drops(ctx) }

// maxUndecided is how often iptables may be too busy to tell whether its rules
// can count. (The nf_tables variant calls itself busy, too, where the kernel
// lacks a part.)
const maxUndecided = 3

// count makes the sets that the rules count in, before everything is compared.
// The first time it finds out whether this kernel's rules can do so; if not, the
// mode works without counts. An error is about this moment: the caller comes
// again.
func (p *Mode) count(ctx context.Context) error {
	if p.uncounted {
		return nil
	}
	first := !p.families[0].layout.counts
	err := p.lost.Open(iptables.Families()...)
	for _, f := range p.families {
		if err == nil && first {
			err = f.tryCounts(ctx)
		}
	}
	var failed *iptables.Error
	switch busy := errors.As(err, &failed) && failed.Busy(); {
	case ctx.Err() != nil:
		return ctx.Err()
	case busy && p.undecided < maxUndecided:
		p.undecided++
		return nil
	case err != nil:
		p.uncounted = true
		p.cfg.Log.Warn("packets that are refused or dropped are not counted by Service: the kernel lacks ipset (module ip_set_hash_ipport) or its match and target for iptables (xt_set)", "err", err)
	}
	for _, f := range p.families {
		f.layout.counts = err == nil
	}
	return nil
}

// tryCounts writes the rules that count into a chain to which nothing leads, and
// removes it again.
func (f *family) tryCounts(ctx context.Context) error {
	head := "*" + tableFilter + "\n:" + chainTry + " - [0:0]\n"
	var rules string
	for _, how := range []drops.Fate{drops.Rejected, drops.Dropped} {
		rules += "-A " + chainTry + " " + counted.Rule(f.layout.family, how) + "\n"
	}
	return f.tool.Restore(ctx, []byte(head+rules+"COMMIT\n"+head+"-X "+chainTry+"\nCOMMIT\n"))
}
