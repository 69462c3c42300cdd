package iptables

import (
	"context"
	"errors"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

// counts is what the Mode needs of drops.IPSets.
type counts interface {
	Open(families ...svc.Family) error
	Drops(ctx context.Context) ([]dataplane.DropCount, error)
	Close() error
}

// Drops is dataplane.Counter's. Where the kernel has no ipset nothing is counted.
func (m *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return m.drops.Drops(ctx) }

// maxUndecided is how often iptables may be too busy to report whether its rules
// can count. (The nf_tables variant calls itself busy, too, where the kernel
// lacks a part.)
const maxUndecided = 3

// count makes the sets that the rules count in, before everything is compared.
// The first time it finds out whether this kernel's rules can do so; if not, the
// mode works without counts. An error is about this moment: the caller comes
// again.
func (m *Mode) count(ctx context.Context) error {
	if m.uncounted {
		return nil
	}
	first := !m.targets[0].layout.counts
	err := m.drops.Open(socket.Families()...)
	for _, t := range m.targets {
		if err == nil && first {
			err = t.tryCounts(ctx)
		}
	}
	var failed *iptables.Error
	switch busy := errors.As(err, &failed) && failed.Busy(); {
	case ctx.Err() != nil:
		return ctx.Err()
	case busy && m.undecided < maxUndecided:
		m.undecided++
		return nil
	case err != nil:
		m.uncounted = true
		m.cfg.Log.Warn("packets that are rejected or dropped are not counted by Service: "+
			"the kernel lacks ipset (module ip_set_hash_ipport) or its match and target for iptables (xt_set)", "err", err)
	}
	for _, t := range m.targets {
		t.layout.counts = err == nil
	}
	return nil
}

// tryCounts writes the rules that count into a chain to which nothing leads, and
// removes it again.
func (t *target) tryCounts(ctx context.Context) error {
	var rules []string
	for _, how := range drops.Fates {
		rules = append(rules, counted.Rule(t.layout.family, how))
	}
	return iptables.Try(ctx, t.tool, tableFilter, chainTry, rules...)
}
