// Package iptables is the mode that writes rules of iptables, for kernels and
// neighbours that nf_tables alone does not suit; see README.md.
package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Variant is the kernel interface that iptables uses.
type Variant string

// The variants. Auto stands for the one that Choose finds.
const (
	Auto   Variant = "auto"
	NFT    Variant = "nft"
	Legacy Variant = "legacy"
)

// ParseVariant reads the name of a variant; empty is Auto.
func ParseVariant(s string) (Variant, error) {
	switch v := Variant(s); v {
	case "":
		return Auto, nil
	case Auto, NFT, Legacy:
		return v, nil
	}
	return "", fmt.Errorf("iptables variant %q is not one of auto, nft, legacy", s)
}

// Config is what a Mode needs to know; the zero value is usable.
type Config struct {
	Variant Variant
	Balance dataplane.Balance
	// ServiceCIDRs are the ranges of ClusterIPs. What is sent to an address
	// there that no Service has is dropped, like upstream, instead of leaving
	// this node.
	ServiceCIDRs []netip.Prefix
	// MasqueradeBit is the bit of the packet mark for connections to
	// masquerade, 0 to 31; 0 stands for 14, kube-proxy's.
	MasqueradeBit int
	// RefuseBit is the bit for packets to refuse; 0 stands for 15, which was
	// kube-proxy's for packets to drop. Both bits together mean to drop.
	RefuseBit int
	// DropInvalid drops what a local endpoint sends outside of any known
	// connection. Not wanted with net.netfilter.nf_conntrack_tcp_be_liberal.
	DropInvalid bool
	// Log is told where lost packets cannot be counted; nil discards it.
	Log *slog.Logger
}

const (
	defaultMasqueradeBit = 14
	defaultRefuseBit     = 15
)

func (c *Config) complete() error {
	if c.MasqueradeBit == 0 {
		c.MasqueradeBit = defaultMasqueradeBit
	}
	if c.RefuseBit == 0 {
		c.RefuseBit = defaultRefuseBit
	}
	for what, bit := range map[string]int{"masquerade": c.MasqueradeBit, "refuse": c.RefuseBit} {
		if bit < 1 || bit > 31 {
			return fmt.Errorf("iptables: %s bit %d is not within 1 and 31", what, bit)
		}
	}
	if c.MasqueradeBit == c.RefuseBit {
		return fmt.Errorf("iptables: masquerade and refuse cannot have the same bit %d", c.RefuseBit)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	v, err := ParseVariant(string(c.Variant))
	c.Variant = v
	return err
}

// tool is what the Mode needs of iptables.Tool.
type tool interface {
	Restore(ctx context.Context, input []byte) error
	Save(ctx context.Context, table string, chain func(name string), rule func(chain, line string)) error
}

// Mode is a dataplane.Applier. It works in the network namespace of the threads that
// call it.
type Mode struct {
	cfg      Config
	families []*family
	repaired []string
	lost     counts
	// uncounted says that this kernel cannot count lost packets, undecided how
	// often that could not be found out.
	uncounted bool
	undecided int
}

// New returns a Mode. It changes nothing in the kernel yet.
func New(cfg Config) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	v, _, err := Choose(context.Background(), cfg.Variant)
	if err != nil {
		return nil, err
	}
	return newMode(cfg, func(f svc.Family) (tool, error) { return iptables.New(v, f) })
}

func newMode(cfg Config, tools func(svc.Family) (tool, error)) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	p := &Mode{cfg: cfg, lost: drops.NewIPSets(counted)}
	for _, f := range iptables.Families() {
		t, err := tools(f)
		if err != nil {
			return nil, fmt.Errorf("iptables mode: %w", err)
		}
		p.families = append(p.families, &family{layout: newLayout(f, &p.cfg), tool: t, hash: newHasher()})
	}
	return p, nil
}

// Close releases what reads the counts. The rules stay.
func (p *Mode) Close() error { return p.lost.Close() }

// Repaired says what the last Apply with changed nil found missing or foreign
// and put right, one line each. The first Apply of a process repairs nothing:
// it only brings up to date what an earlier one left.
func (p *Mode) Repaired() []string { return p.repaired }

// Apply is dataplane.Applier's.
func (p *Mode) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	var errs []error
	if changed == nil || p.families[0].state == nil {
		p.repaired = nil
		if err := p.count(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	for _, f := range p.families {
		first := f.state == nil
		if err := f.apply(ctx, t, changed); err != nil {
			errs = append(errs, fmt.Errorf("iptables %s: %w", f.layout.family, err))
		}
		if changed == nil && !first {
			p.repaired = append(p.repaired, f.repaired...)
		}
	}
	return dataplane.Both(errs...)
}
