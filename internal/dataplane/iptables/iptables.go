// Package iptables is the mode that writes rules of iptables, for kernels and
// neighbours that nf_tables without iptables does not suit; see README.md.
package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
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
	// MasqueradeBit is the bit of the packet mark for connections to
	// masquerade, 0 to 31; 0 stands for 14, kube-proxy's.
	MasqueradeBit int
	// RejectBit is the bit for packets to reject; 0 stands for 15, which was
	// kube-proxy's for packets to drop. Both bits together mean to drop.
	RejectBit int
	// DropInvalid drops what a local endpoint sends outside of any known
	// connection. Not wanted with net.netfilter.nf_conntrack_tcp_be_liberal.
	DropInvalid bool
	// AcceptEstablished lets packets of open connections pass FORWARD, as kube-proxy does, not only of the ones that the rules have
	// translated: connect-time has translated others before their first packet, which met the policies of other programs.
	AcceptEstablished bool
	// Log gets a warning where rejected and dropped packets cannot be counted; nil
	// discards it.
	Log *slog.Logger
}

const (
	defaultMasqueradeBit = 14
	defaultRejectBit     = 15
)

func (c *Config) complete() error {
	if c.MasqueradeBit == 0 {
		c.MasqueradeBit = defaultMasqueradeBit
	}
	if c.RejectBit == 0 && c.MasqueradeBit == defaultRejectBit {
		c.RejectBit = defaultMasqueradeBit
	}
	if c.RejectBit == 0 {
		c.RejectBit = defaultRejectBit
	}
	for what, bit := range map[string]int{"masquerade": c.MasqueradeBit, "reject": c.RejectBit} {
		if bit < 1 || bit > 31 {
			return fmt.Errorf("iptables: %s bit %d is not within 1 and 31", what, bit)
		}
	}
	if c.MasqueradeBit == c.RejectBit {
		return fmt.Errorf("iptables: masquerade and reject cannot have the same bit %d", c.RejectBit)
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

// Mode is the dataplane.Applier of this mode. It works in the network namespace of
// the threads that call it.
type Mode struct {
	*dataplane.Reconciler
	dataplane.Changes
	// watch finds other programs' changes, nil if they are not looked for.
	watch   *iptables.Watch
	cfg     Config
	targets []*target
	drops   counts
	// uncounted reports that this kernel cannot count what is rejected and dropped;
	// undecided is how often that could not be found out.
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
	changes := dataplane.NewChanges()
	watch, err := iptables.NewWatch(v, []string{tableNAT, tableFilter}, ours, changes.Notify)
	if err != nil {
		cfg.Log.Warn("cannot watch the rules of iptables; they are compared periodically", "err", err)
	}
	m, err := newMode(cfg, func(f svc.Family) (tool, error) {
		t, err := iptables.New(v, f)
		if err != nil || watch == nil {
			return t, err
		}
		return watch.Tool(t), nil
	})
	if err != nil {
		if watch != nil {
			_ = watch.Close()
		}
		return nil, err
	}
	m.Changes, m.watch = changes, watch
	return m, nil
}

func newMode(cfg Config, tools func(svc.Family) (tool, error)) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m := &Mode{cfg: cfg, drops: drops.NewIPSets(counted), Changes: dataplane.NewChanges()}
	m.Reconciler = dataplane.NewReconciler(mode, dataplane.Hooks{Begin: m.begin})
	for _, f := range socket.Families() {
		tool, err := tools(f)
		if err != nil {
			return nil, fmt.Errorf("iptables mode: %w", err)
		}
		t := &target{layout: newLayout(f, &m.cfg), tool: tool, hash: newHasher()}
		m.targets = append(m.targets, t)
		m.Add(f, t)
	}
	return m, nil
}

func (m *Mode) begin(ctx context.Context, all bool) error {
	if !all {
		return nil
	}
	return m.count(ctx)
}

// Intact is dataplane.Checker's.
func (m *Mode) Intact() (bool, error) {
	if m.watch == nil || !m.Known() {
		return true, nil
	}
	return m.watch.Intact()
}

// Close releases what reads the counts and watches the rules. They stay.
func (m *Mode) Close() error {
	if m.watch == nil {
		return m.drops.Close()
	}
	return errors.Join(m.drops.Close(), m.watch.Close())
}
