package direct

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// chunkBytes is the size at which a load is cut into transactions.
const chunkBytes = 2 << 20

// Kernel is what a Target needs of nftables.Conn.
type Kernel interface {
	Commit(*nftables.Batch) error
	MaxBatch() int
	nftables.Dumper
	Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error
	Get(t nftables.Table, set string, keys [][]byte, f func(nftables.Elem)) error
}

// Target writes one family of a dataplane.Target, for the part that passes packets on. It has a table while a Service asks for
// direct return.
type Target struct {
	layout *layout
	kernel Kernel
	// fronts are what the kernel has, settings what its chains were written for.
	fronts   map[dataplane.FrontKey]*front
	settings dataplane.Settings
	// found is what the last Read found, until that is put right.
	found *found
}

// New returns the Target of a family.
func New(f svc.Family, k Kernel) *Target {
	return &Target{layout: newLayout(f), kernel: k, fronts: map[dataplane.FrontKey]*front{}}
}

// Read is dataplane.Target's, and so is Write.
func (t *Target) Read(c *dataplane.Change) error {
	found, err := t.read(c.Attempt > 1)
	if err != nil {
		return fmt.Errorf("read table %s: %w", t.layout.table, err)
	}
	if c.Trusted {
		found.reportDrift(c, t)
	}
	t.found, t.fronts = found, found.fronts
	return nil
}

// Write writes what is passed on before nft writes what stays on this node, and Remove removes after it what is not passed on any
// more: a node without an endpoint drops what it does not pass on.
func (t *Target) Write(ctx context.Context, c *dataplane.Change) error {
	settings := &c.Settings
	if c.Full {
		if !settings.Direct {
			return nil
		}
		if err := t.commit(func(b *nftables.Batch) { t.foundation(b, settings) }); err != nil {
			return err
		}
		for k := range t.fronts {
			if _, there := c.Dirty[k]; !there {
				c.Dirty[k] = table.Key{}
			}
		}
		t.found, t.settings = nil, *settings
	}
	if !settings.Direct {
		return nil
	}
	next := make(map[dataplane.FrontKey]*front, len(c.Dirty))
	for k := range c.Dirty {
		if is := t.layout.frontFor(c.Wanted(k)); !k.Node && is != nil {
			next[k] = is
		}
	}
	return t.all(ctx, next)
}

// Remove is called after Write and what nft writes.
func (t *Target) Remove(ctx context.Context, c *dataplane.Change) error {
	if !c.Settings.Direct {
		if c.Full {
			return t.remove()
		}
		return nil
	}
	next := map[dataplane.FrontKey]*front{}
	for k := range c.Dirty {
		if t.fronts[k] != nil && !k.Node && !passedOn(c.Wanted(k)) {
			next[k] = nil
		}
	}
	return t.all(ctx, next)
}

// all brings frontends to their plans, nil for none, in as many transactions as their size asks for.
func (t *Target) all(ctx context.Context, next map[dataplane.FrontKey]*front) error {
	keys := slices.SortedFunc(maps.Keys(next), dataplane.FrontKey.Compare)
	chunk := min(chunkBytes, t.kernel.MaxBatch()*3/4)
	for len(keys) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := 0
		err := t.commit(func(b *nftables.Batch) {
			for ; n < len(keys) && (n == 0 || b.Size() < chunk); n++ {
				t.layout.diff(b, keys[n], t.fronts[keys[n]], next[keys[n]])
			}
		})
		if err != nil {
			return err
		}
		for _, k := range keys[:n] {
			if t.fronts[k] = next[k]; next[k] == nil {
				delete(t.fronts, k)
			}
		}
		keys = keys[n:]
	}
	return nil
}

// commit asks the kernel for one transaction, if it has anything.
func (t *Target) commit(fill func(*nftables.Batch)) error {
	b := nftables.NewBatch()
	fill(b)
	if b.Empty() {
		return nil
	}
	return tables.Stale(t.kernel.Commit(b))
}

// remove removes the table, with the remembered flows.
func (t *Target) remove() error {
	there := t.found.there
	t.found, t.fronts, t.settings = nil, map[dataplane.FrontKey]*front{}, dataplane.Settings{}
	if !there {
		return nil
	}
	return t.commit(func(b *nftables.Batch) { b.DelTable(t.layout.table) })
}

// foundation writes the missing chains and sets, and removes foreign ones.
func (t *Target) foundation(b *nftables.Batch, settings *dataplane.Settings) {
	l, found := t.layout, t.found
	if found.there && !found.usable {
		b.DelTable(l.table)
	}
	if !found.usable {
		b.AddTable(l.table, schema)
	}
	for _, s := range l.sets() {
		if !found.sets[s.Name] {
			b.AddSet(l.table, s)
		}
	}
	for _, ch := range l.chains(settings) {
		stored, there := found.chains[ch.name]
		if there && sameRules(stored, ch.rules) {
			continue
		}
		if there {
			b.FlushChain(l.table, ch.name)
		} else {
			b.AddChain(l.table, nftables.Chain{Name: ch.name, Hook: ch.hook})
		}
		for _, r := range ch.rules {
			b.AddRule(l.table, ch.name, r)
		}
	}
	for _, e := range found.junk {
		b.DelElem(l.table, e.set, []byte(e.key))
	}
}

func sameRules(a []nftables.StoredRule, b []nftables.Rule) bool {
	return slices.EqualFunc(a, b, func(x nftables.StoredRule, y nftables.Rule) bool { return x.Hash == y.Hash() })
}

// addressOf reads an address of the family.
func (l *layout) addressOf(b []byte) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(b)
	return a, ok && len(b) == int(l.Len)
}
