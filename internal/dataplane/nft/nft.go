// Package nft is the mode that lets the kernel's nf_tables translate addresses.
// A Service costs elements of maps, not chains or rules; see README.md.
package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Config is what a Mode needs to know; the zero value is usable.
type Config struct {
	Balance dataplane.Balance
	// ServiceCIDRs are the ranges of ClusterIPs. What is sent to an address
	// there that no Service has is dropped, like upstream, instead of leaving
	// this node.
	ServiceCIDRs []netip.Prefix
	// MasqueradeBit is the bit of the packet mark for connections to
	// masquerade, 1 to 31; 0 stands for 14, kube-proxy's.
	MasqueradeBit int
	// DropInvalid drops what a local endpoint sends outside of any known
	// connection. Not wanted with net.netfilter.nf_conntrack_tcp_be_liberal.
	DropInvalid bool
}

const defaultMasqueradeBit = 14

func (c *Config) complete() error {
	if c.MasqueradeBit == 0 {
		c.MasqueradeBit = defaultMasqueradeBit
	}
	if c.MasqueradeBit < 1 || c.MasqueradeBit > 31 {
		return fmt.Errorf("nft: masquerade bit %d is not within 1 and 31", c.MasqueradeBit)
	}
	return nil
}

// kernel is what the Mode needs of nftables.Conn.
type kernel interface {
	Commit(*nftables.Batch) error
	Generation() (uint32, error)
	MaxBatch() int
	nftables.Dumper
	Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error
	Get(t nftables.Table, set string, keys [][]byte, f func(nftables.Elem)) error
	Close() error
}

// Mode is a dataplane.Applier. It works in the network namespace in which New was
// called.
type Mode struct {
	kernel   *watched
	families []*family
	repaired []string
	lost     *drops.Tables
}

// New returns a Mode. It does nothing to the kernel's tables yet.
func New(cfg Config) (*Mode, error) {
	k, err := nftables.Dial()
	if err != nil {
		return nil, fmt.Errorf("nft: %w", err)
	}
	p, err := newMode(cfg, k)
	if err == nil {
		p.lost, err = drops.OpenTables(tableName)
	}
	if err != nil {
		_ = k.Close()
		return nil, err
	}
	return p, nil
}

func newMode(cfg Config, k kernel) (*Mode, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	p := &Mode{kernel: &watched{kernel: k}}
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		p.families = append(p.families, &family{layout: newLayout(f, &cfg), kernel: p.kernel})
	}
	return p, nil
}

// Close releases the connection to the kernel. The tables stay.
func (p *Mode) Close() error {
	return errors.Join(p.kernel.Close(), p.lost.Close())
}

// Drops is dataplane.Counter's.
func (p *Mode) Drops(ctx context.Context) ([]dataplane.DropCount, error) { return p.lost.Drops(ctx) }

// Repaired says what the last Apply with changed nil found missing or foreign
// and put right, one line each. The first Apply of a process repairs nothing:
// it only brings up to date what an earlier one left.
func (p *Mode) Repaired() []string { return p.repaired }

// Apply is dataplane.Applier's. A full comparison is made only if somebody else has
// changed any table since the last one; the kernel counts changes.
func (p *Mode) Apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	full := changed == nil
	if full {
		p.repaired = nil
		if p.untouched() {
			changed = p.differing(t)
		} else {
			p.kernel.begin()
		}
	}
	var errs []error
	for _, f := range p.families {
		first := f.state == nil
		if err := f.apply(ctx, t, changed); err != nil {
			errs = append(errs, fmt.Errorf("nft %s: %w", f.layout.table, err))
		}
		if full && !first {
			p.repaired = append(p.repaired, f.repaired...)
		}
	}
	return dataplane.Both(errs...)
}

// untouched says that the kernel has what this process wrote, for certain.
func (p *Mode) untouched() bool {
	for _, f := range p.families {
		if f.state == nil || f.doubtful || f.unswept {
			return false
		}
	}
	return p.kernel.alone()
}

// differing are the keys of ports that are not those last written.
func (p *Mode) differing(t *table.Table) []table.Key {
	keys := []table.Key{}
	for q := range t.All() {
		for _, f := range p.families {
			if f.layout.family == q.Family && f.state.claims.Port(q.Key()) != q {
				keys = append(keys, q.Key())
			}
		}
	}
	for _, f := range p.families {
		for k := range f.state.claims.Keys() {
			if t.Get(k) == nil {
				keys = append(keys, k)
			}
		}
	}
	return keys
}

// watched is the kernel, and whether it is known that nobody else changed it.
type watched struct {
	kernel
	sure bool
	gen  uint32 // after the last change that is known
}

// begin is called before everything is read: what is read is the truth from
// now on, unless there are changes meanwhile.
func (w *watched) begin() {
	var err error
	w.gen, err = w.Generation()
	w.sure = err == nil
}

// alone says that nobody but this process changed anything since begin.
func (w *watched) alone() bool {
	gen, err := w.Generation()
	return w.sure && err == nil && gen == w.gen
}

// Commit is the kernel's, and counts.
func (w *watched) Commit(b *nftables.Batch) error {
	if !w.sure {
		return w.kernel.Commit(b)
	}
	w.sure = w.alone()
	err := w.kernel.Commit(b)
	if err == nil {
		w.gen++
		w.sure = w.sure && w.alone()
	}
	return err
}
