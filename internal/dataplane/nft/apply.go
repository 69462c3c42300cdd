package nft

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/table"
)

// target is a dataplane.Target: the table of one address family.
type target struct {
	layout *layout
	kernel kernel
	// direct passes packets on; what stays is translated here, so it is written last.
	direct *direct.Target
	// state is what the kernel has; nil before the first Read.
	state *state
	// found is the state that the last Read found, also of other programs, until that is
	// put right.
	found *found
}

const (
	// chunkBytes is the size at which a load is cut into transactions. Larger
	// ones are no faster.
	chunkBytes = 2 << 20
	// maxRejections bounds the search for what the kernel rejects: an error that is
	// about everything must not be asked for ten thousand times.
	maxRejections = 200
	// maxFronts bounds the frontends of one transaction, so that chains which
	// are prepared for them do not wait long.
	maxFronts = 5000
)

// Read is dataplane.Target's.
func (t *target) Read(_ context.Context, c *dataplane.Change) error {
	found, err := t.read(c.Attempt > 1, c.Ports())
	if err != nil {
		return fmt.Errorf("read table %s: %w", t.layout.table, err)
	}
	if c.Trusted {
		found.reportDrift(c, t.layout, t.state)
	}
	t.state, t.found = found.state, found
	t.state.plan, t.state.settings = c.Plan, c.Settings
	return t.direct.Read(c)
}

// Write is dataplane.Target's.
func (t *target) Write(ctx context.Context, c *dataplane.Change) error {
	if err := t.direct.Write(ctx, c); err != nil {
		return err
	}
	if err := t.write(ctx, c); err != nil {
		return err
	}
	return t.direct.Remove(ctx, c)
}

func (t *target) write(ctx context.Context, c *dataplane.Change) error {
	w := writer{
		target: t, change: c, chunk: min(chunkBytes, t.kernel.MaxBatch()*3/4),
		insist: c.Full && c.Attempt == dataplane.MaxAttempts,
	}
	if !c.Full {
		w.all(ctx, slices.Collect(maps.Keys(c.Dirty)))
		return nil
	}
	for k := range t.state.fronts {
		if _, wanted := c.Dirty[k]; !wanted {
			c.Dirty[k] = table.Key{}
		}
	}
	fks := slices.SortedFunc(maps.Keys(c.Dirty), dataplane.FrontKey.Compare)
	var err error
	if t.found.replace {
		fks, err = t.replace(fks)
	} else {
		err = t.commit(t.foundation)
	}
	if err != nil {
		return err
	}
	// Chain loopback, which is there now, keeps closed what this opens.
	c.Fail(c.Settings.OpenLoopback())
	w.all(ctx, fks)
	if err := t.commit(t.closeUnserved); err != nil {
		w.fail(err)
	}
	// A rejected frontend may need what nothing else does.
	if !w.failed && !c.Partial() {
		err = t.commit(t.removeGarbage)
	}
	t.found = nil
	return err
}

// commit asks the kernel for one transaction, and reverts the state if it does
// not get that.
func (t *target) commit(fill func(*change)) error {
	c := newChange(t.layout, t.state)
	fill(c)
	c.b.Tag(nil)
	c.sweep()
	if c.b.Empty() {
		return nil
	}
	err := t.kernel.Commit(c.b)
	if err != nil {
		c.revert()
	}
	return tables.Stale(err)
}

// writer writes the frontends of one Change.
type writer struct {
	*target
	change *dataplane.Change
	chunk  int // the size at which transactions are cut
	// insist is to go on after ErrStale, rather than leave it to the Reconciler to
	// read again first.
	insist     bool
	rejections int
	failed     bool
}

func (w *writer) fail(err error) {
	w.failed = true
	w.change.Fail(err)
}

// all brings frontends to the desired state, in as many transactions as their
// size asks for. Each is complete: no frontend ever leads to a chain or an
// endpoint that is not there. A frontend that the kernel rejects is left as it
// is.
func (w *writer) all(ctx context.Context, fks []dataplane.FrontKey) {
	for len(fks) > 0 {
		fks = w.some(ctx, fks)
	}
}

// some writes one transaction, and before it one for the chains it needs, and
// returns what did not fit in. If the kernel rejects it, it finds out what of it,
// and writes the others.
func (w *writer) some(ctx context.Context, fks []dataplane.FrontKey) (rest []dataplane.FrontKey) {
	if err := ctx.Err(); err != nil {
		w.fail(err)
		return nil
	}
	n := 0
	err := w.commit(func(c *change) {
		for n < len(fks) && (n == 0 || n < maxFronts && c.b.Size() < w.chunk) {
			c.prepare(fks[n])
			n++
		}
	})
	part := fks[:n]
	var unpaired map[netip.Addr]bool
	if err == nil {
		n = 0
		err = w.commit(func(c *change) {
			for n < len(part) && (n == 0 || c.b.Size() < w.chunk) {
				c.set(part[n])
				n++
			}
			unpaired = c.unpaired
		})
		part = part[:n]
	}
	rest = fks[n:]
	written := err == nil
	if written {
		err = w.tidy(unpaired)
	}
	stale := errors.Is(err, dataplane.ErrStale) && !w.insist
	switch {
	case err == nil:
	case stale:
		w.fail(err)
		return nil
	case written:
		w.fail(err)
	default:
		w.bisect(ctx, part, err)
	}
	return rest
}

// tidy removes what must outlive the elements that needed it.
func (w *writer) tidy(unpaired map[netip.Addr]bool) error {
	err := w.commit(func(c *change) {
		c.unpair(unpaired)
		maps.Copy(c.empty, w.state.unused)
	})
	if err == nil {
		clear(w.state.unused)
	}
	return err
}

// bisect writes the frontends of a rejected transaction in smaller ones, and gives
// up on the last one that is rejected.
func (w *writer) bisect(ctx context.Context, part []dataplane.FrontKey, err error) {
	if w.rejections++; len(part) < 2 || w.rejections > maxRejections {
		w.reject(part, err)
		return
	}
	good, bad := culprits(part, err)
	if len(good) == 0 {
		good, bad = part[:len(part)/2], part[len(part)/2:]
	}
	w.all(ctx, good)
	w.all(ctx, bad)
}

// reject leaves out frontends that the kernel rejects. An error of another kind is
// not about them.
func (w *writer) reject(part []dataplane.FrontKey, err error) {
	var r *nftables.Refusal
	err = fmt.Errorf("%s: %w", names(part), err)
	if !errors.As(err, &r) {
		w.fail(err)
		return
	}
	for _, k := range part {
		w.change.Reject(k, err)
		if p, f := w.state.plan.Wanted(k); f != nil {
			s := w.layout.specFor(&w.state.settings, p, f)
			_, chains := w.layout.chains(&s, &w.state.settings)
			for i := range chains {
				w.state.unused[chains[i].name] = true
			}
		}
	}
}

// culprits parts the frontends of a rejected transaction into those the kernel had
// nothing against and the others. It names none if it is against all.
func culprits(part []dataplane.FrontKey, err error) (good, bad []dataplane.FrontKey) {
	var r *nftables.Refusal
	if !errors.As(err, &r) || len(r.Tags) == 0 {
		return nil, part
	}
	named := map[dataplane.FrontKey]bool{}
	for _, tag := range r.Tags {
		if k, ok := tag.(dataplane.FrontKey); ok {
			named[k] = true
		}
	}
	for _, k := range part {
		if named[k] {
			bad = append(bad, k)
		} else {
			good = append(good, k)
		}
	}
	if len(bad) == 0 {
		return nil, part
	}
	return good, bad
}

func names(fks []dataplane.FrontKey) string {
	if len(fks) > 3 {
		return fmt.Sprintf("%s, %s and %d more", fks[0], fks[1], len(fks)-2)
	}
	var s []string
	for _, k := range fks {
		s = append(s, k.String())
	}
	return strings.Join(s, ", ")
}

// replace removes a table of another layout, of which nothing can stay. As much
// as fits of ours is installed at the same moment; the rest is returned.
func (t *target) replace(fks []dataplane.FrontKey) (rest []dataplane.FrontKey, err error) {
	n := 0
	err = t.commit(func(c *change) {
		t.foundation(c)
		for n < len(fks) && c.b.Size() < t.kernel.MaxBatch()*3/4 {
			c.prepare(fks[n])
			c.set(fks[n])
			n++
		}
		if n == len(fks) {
			t.closeUnserved(c)
		}
	})
	if err == nil {
		t.found.closed = n == len(fks)
		return fks[n:], nil
	}
	// A bad frontend must not keep the old table.
	return fks, t.commit(t.foundation)
}

// foundation writes what is always there, as far as it is missing.
func (t *target) foundation(c *change) {
	l, found, settings := t.layout, t.found, &t.state.settings
	if found.replace {
		if found.oldClusterIPs {
			// See nftables.Remove: a packet under way in the old rules is not refused.
			c.b.FlushSet(l.table, setClusterIPs)
		}
		c.b.DelTable(l.table)
	}
	if !found.usable {
		c.b.AddTable(l.table, schema)
	}
	for _, s := range l.sets() {
		if !found.sets[s.Name] {
			c.b.AddSet(l.table, s)
		}
	}
	for _, ch := range l.base(settings) {
		stored, there := found.base[ch.name]
		if there && sameRules(stored, ch.rules) {
			continue
		}
		if ch.name == chainUnserved && len(stored) == 0 {
			if !there {
				c.b.AddChain(l.table, nftables.Chain{Name: ch.name})
			}
			continue // closeUnserved
		}
		if there {
			c.b.FlushChain(l.table, ch.name)
		} else {
			c.b.AddChain(l.table, nftables.Chain{Name: ch.name, Hook: ch.hook})
		}
		for _, r := range ch.rules {
			c.b.AddRule(l.table, ch.name, r)
		}
	}
	for j := range found.junk {
		c.b.DelElem(l.table, j.set, []byte(j.key))
	}
	if !found.refuse {
		c.b.AddElem(l.table, setTargets, &nftables.Elem{Key: nftables.Uint32(idRefuse), Goto: chainRefuse})
	}
	if !found.drop {
		c.b.AddElem(l.table, setTargets, &nftables.Elem{Key: nftables.Uint32(idDrop), Goto: chainDrop})
	}
	stay := map[netip.Addr]bool{}
	for _, a := range settings.NodeAddrs {
		if !found.nodeAddrs[a] && !stay[a] {
			c.b.AddElem(l.table, setNodeAddresses, &nftables.Elem{Key: a.AsSlice()})
		}
		stay[a] = true
	}
	for a := range found.nodeAddrs {
		if !stay[a] {
			c.b.DelElem(l.table, setNodeAddresses, a.AsSlice())
		}
	}
}

// closeUnserved gives chain unserved its rules, which a new one gets last: a
// frontend that is not written yet may be served by what an earlier mode left,
// whose hooks come after ours.
func (t *target) closeUnserved(c *change) {
	if len(t.found.base[chainUnserved]) == 0 && !t.found.closed {
		for _, r := range t.layout.unserved(t.state.settings.Services) {
			c.b.AddRule(t.layout.table, chainUnserved, r)
		}
	}
}

// removeGarbage removes what the last Read found and nothing needs.
func (t *target) removeGarbage(c *change) {
	l, found, settings := t.layout, t.found, &t.state.settings
	for name, ch := range t.state.chains {
		if ch.count == 0 {
			c.empty[name] = true
		}
	}
	for a, p := range t.state.pairs {
		if p.count == 0 {
			c.b.DelElem(l.table, setLocalEndpoints, pairKey(a))
			delete(t.state.pairs, a)
		}
	}
	for a, p := range t.state.clusterIPs {
		if p.count == 0 {
			c.b.DelElem(l.table, setClusterIPs, a.AsSlice())
			delete(t.state.clusterIPs, a)
		}
	}
	c.sweep()
	var gone []string
	for name := range found.base {
		if !slices.ContainsFunc(l.base(settings), func(ch chain) bool { return ch.name == name }) {
			gone = append(gone, name)
		}
	}
	slices.Sort(gone)
	for _, name := range gone {
		c.b.FlushChain(l.table, name)
	}
	for _, name := range gone {
		c.b.DelChain(l.table, name)
	}
	for _, name := range found.foreignSets {
		c.b.DelSet(l.table, name)
	}
}

// plainPick reads the name of the chain for n endpoints that most frontends
// use; its key in map targets is n, for the eye.
func plainPick(name string) (uint32, bool) {
	digits, ok := strings.CutPrefix(name, "pick-")
	n, err := strconv.ParseUint(digits, 10, 16)
	return uint32(n), ok && err == nil && n > 0
}
