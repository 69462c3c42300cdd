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
	"syscall"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/table"
)

// family is the half of a Mode for one address family.
type family struct {
	layout *layout
	kernel kernel
	// state is nil until the kernel was read.
	state *state
	// doubtful says that an error left the state not to be relied upon.
	doubtful bool
	// unswept says that the last full comparison left what nothing needs.
	unswept  bool
	repaired []string
}

const (
	// chunkBytes is the size at which a load is cut into transactions. Larger
	// ones are no faster.
	chunkBytes = 2 << 20
	// maxRefusals bounds the search for what the kernel does not like: an
	// error that is about everything must not be asked for ten thousand times.
	maxRefusals = 200
	// fullAttempts is how often everything is compared in one Apply.
	fullAttempts = 3
	// maxFronts bounds the frontends of one transaction, so that chains which
	// are prepared for them do not wait long.
	maxFronts = 5000
)

// apply writes the family's share of t.
func (f *family) apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	f.repaired = nil
	set := dataplane.SettingsOf(t, f.layout.family)
	if changed == nil || f.state == nil || f.doubtful || !set.Equal(&f.state.settings) {
		return f.full(ctx, t, set)
	}
	// Only what is named in changed is looked at.
	w := writer{family: f, chunk: f.chunk()}
	w.touched = f.state.claims.Take(t, f.layout.family, changed, mode, &w.refused)
	errs := w.all(ctx, slices.Collect(maps.Keys(w.touched)))
	if slices.ContainsFunc(errs, mismatch) {
		// Somebody else changed our table: look at all of it.
		return f.full(ctx, t, set)
	}
	f.doubtful = len(errs) > 0
	return w.refused.Err(errs...)
}

func (f *family) chunk() int { return min(chunkBytes, f.kernel.MaxBatch()*3/4) }

// mismatch says that the kernel's table is not as remembered.
func mismatch(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EEXIST) || errors.Is(err, syscall.EBUSY)
}

// writer writes frontends.
type writer struct {
	*family
	chunk int // the size at which transactions are cut
	// patient writers go on after a contradiction; others leave it to their
	// caller to read the kernel again first.
	patient bool
	// touched are the frontends to write, and for whose sake.
	touched  dataplane.Touched
	refusals int
	// refused are the ports that the kernel does not take, errs what else went
	// wrong.
	refused dataplane.Rejections
	errs    []error
}

// all brings frontends to what is claimed, in as many transactions as their
// size asks for. Each is complete: no frontend ever leads to a chain or an
// endpoint that is not there. A frontend that the kernel refuses is left as it
// is.
func (w *writer) all(ctx context.Context, fks []dataplane.FrontKey) []error {
	for rest := fks; len(rest) > 0; {
		rest = w.commit(ctx, rest)
	}
	return w.errs
}

// try asks the kernel for one change, and forgets it if refused.
func (f *family) try(fill func(*change)) error {
	c := newChange(f.layout, f.state)
	fill(c)
	c.b.Tag(nil)
	c.sweep()
	if c.b.Empty() {
		return nil
	}
	err := f.kernel.Commit(c.b)
	if err != nil {
		c.revert()
	}
	return err
}

// commit writes one transaction, and before it one for the chains it needs, and
// returns what did not fit in. If the kernel refuses, it finds out what, and
// writes the others.
func (w *writer) commit(ctx context.Context, fks []dataplane.FrontKey) (rest []dataplane.FrontKey) {
	if err := ctx.Err(); err != nil {
		w.errs = append(w.errs, err)
		return nil
	}
	n := 0
	err := w.try(func(c *change) {
		for n < len(fks) && (n == 0 || n < maxFronts && c.b.Size() < w.chunk) {
			c.prepare(fks[n])
			n++
		}
	})
	part := fks[:n]
	var unpaired map[netip.Addr]bool
	if err == nil {
		n = 0
		err = w.try(func(c *change) {
			for n < len(part) && (n == 0 || c.b.Size() < w.chunk) {
				c.set(part[n])
				n++
			}
			unpaired = c.unpaired
		})
		part = part[:n]
	}
	rest = fks[n:]
	if err == nil {
		if err := w.tidy(unpaired); err != nil {
			w.errs = append(w.errs, err)
			return w.unlessMismatch(err, rest)
		}
		return rest
	}
	if !w.patient && mismatch(err) {
		w.errs = append(w.errs, err)
		return nil
	}
	w.refusals++
	if len(part) < 2 || w.refusals > maxRefusals {
		w.give(part, err)
		return rest
	}
	w.divide(ctx, part, err)
	return rest
}

// tidy removes what must outlive the elements that needed it.
func (w *writer) tidy(unpaired map[netip.Addr]bool) error {
	err := w.try(func(c *change) {
		c.unpair(unpaired)
		maps.Copy(c.empty, w.state.unused)
	})
	if err == nil {
		clear(w.state.unused)
	}
	return err
}

// unlessMismatch is what there is left to write after an error.
func (w *writer) unlessMismatch(err error, rest []dataplane.FrontKey) []dataplane.FrontKey {
	if !w.patient && mismatch(err) {
		return nil
	}
	return rest
}

// give gives up on frontends that the kernel does not take.
func (w *writer) give(part []dataplane.FrontKey, err error) {
	var r *nftables.Refusal
	err = fmt.Errorf("%s: %w", names(part), err)
	if !errors.As(err, &r) {
		w.errs = append(w.errs, err)
		return
	}
	for _, k := range part {
		if !w.state.claims.Refuse(k, w.touched, err, &w.refused) {
			w.errs = append(w.errs, err)
		}
		if p, f := w.state.claims.Wanted(k); f != nil {
			s := w.layout.specFor(&w.state.settings, p, f)
			_, chains := w.layout.chains(&s, w.state.settings.Pods)
			for i := range chains {
				w.state.unused[chains[i].name] = true
			}
		}
	}
}

// divide writes the frontends of a refused transaction in smaller ones.
func (w *writer) divide(ctx context.Context, part []dataplane.FrontKey, err error) {
	good, bad := blame(part, err)
	if len(good) == 0 {
		good, bad = part[:len(part)/2], part[len(part)/2:]
	}
	for _, p := range [][]dataplane.FrontKey{good, bad} {
		for len(p) > 0 {
			p = w.commit(ctx, p)
		}
	}
}

// blame parts the frontends of a refused transaction into those the kernel had
// nothing against and the others. It names none if it is against all.
func blame(part []dataplane.FrontKey, err error) (good, bad []dataplane.FrontKey) {
	var r *nftables.Refusal
	if !errors.As(err, &r) || len(r.Tags) == 0 {
		return nil, part
	}
	guilty := map[dataplane.FrontKey]bool{}
	for _, tag := range r.Tags {
		if k, ok := tag.(dataplane.FrontKey); ok {
			guilty[k] = true
		}
	}
	for _, k := range part {
		if guilty[k] {
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

// full makes what is in the kernel what t says. Should the kernel contradict
// what was just read, it is read again: somebody else was faster, or a dump did
// not show everything.
func (f *family) full(ctx context.Context, t *table.Table, set dataplane.Settings) error {
	var before *state
	if !f.doubtful {
		before = f.state
	}
	for try := 1; ; try++ {
		var refused dataplane.Rejections
		errs := f.compare(ctx, t, set, before, try, &refused)
		f.doubtful = len(errs) > 0
		if try == fullAttempts || !slices.ContainsFunc(errs, mismatch) {
			return refused.Err(errs...)
		}
	}
}

// compare reads what is in the kernel and writes the difference. before is what
// this process believes to be there.
func (f *family) compare(ctx context.Context, t *table.Table, set dataplane.Settings, before *state, try int, refused *dataplane.Rejections) []error {
	if err := ctx.Err(); err != nil {
		return []error{err}
	}
	var errs []error
	// Chain loopback keeps closed what this opens.
	if err := set.OpenLoopback(); err != nil {
		errs = append(errs, err)
	}
	found, err := f.read(try > 1, t.All())
	if err != nil {
		return []error{fmt.Errorf("read the table: %w", err)}
	}
	if before != nil && try == 1 {
		f.repaired = found.strange(f.layout, before)
	}
	f.state = found.state
	f.state.settings = set

	w := writer{family: f, chunk: f.chunk(), patient: try == fullAttempts}
	w.touched = f.state.claims.Take(t, f.layout.family, nil, mode, refused)
	for k := range f.state.fronts {
		if _, wanted := w.touched[k]; !wanted {
			w.touched[k] = table.Key{}
		}
	}

	sorted := slices.SortedFunc(maps.Keys(w.touched), dataplane.FrontKey.Compare)
	if found.replace {
		if sorted, err = f.replace(found, sorted); err != nil {
			return append(errs, err)
		}
	} else if err := f.try(func(c *change) { f.foundation(c, found) }); err != nil {
		return append(errs, err)
	}
	wrong := w.all(ctx, sorted)
	// A refused frontend may need what nothing else does.
	if f.unswept = len(wrong) > 0 || w.refused.Len() > 0; !f.unswept {
		if err := f.try(func(c *change) { f.leftovers(c, found) }); err != nil {
			wrong = append(wrong, err)
		}
	}
	refused.Merge(&w.refused)
	return append(errs, wrong...)
}

// replace removes a table of another layout, of which nothing can stay. As much
// as fits of ours is there in the same moment; the rest is returned.
func (f *family) replace(found *found, fks []dataplane.FrontKey) (rest []dataplane.FrontKey, err error) {
	n := 0
	err = f.try(func(c *change) {
		f.foundation(c, found)
		for n < len(fks) && c.b.Size() < f.kernel.MaxBatch()*3/4 {
			c.prepare(fks[n])
			c.set(fks[n])
			n++
		}
	})
	if err == nil {
		return fks[n:], nil
	}
	// A bad frontend must not keep the old table.
	return fks, f.try(func(c *change) { f.foundation(c, found) })
}

// foundation writes what is always there, as far as it is missing.
func (f *family) foundation(c *change, found *found) {
	l := f.layout
	if found.replace {
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
	for _, ch := range l.base(f.state.settings.Localhost) {
		stored, there := found.base[ch.name]
		if there && sameRules(stored, ch.rules) {
			continue
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
	for _, a := range f.state.settings.NodeAddrs {
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

// leftovers removes what the full comparison found and nothing claimed.
func (f *family) leftovers(c *change, found *found) {
	l := f.layout
	for name, ch := range f.state.chains {
		if ch.count == 0 {
			c.empty[name] = true
		}
	}
	for a, p := range f.state.pairs {
		if p.count == 0 {
			c.b.DelElem(l.table, setLocalEndpoints, twice(a))
			delete(f.state.pairs, a)
		}
	}
	for a, p := range f.state.clusterIPs {
		if p.count == 0 {
			c.b.DelElem(l.table, setClusterIPs, a.AsSlice())
			delete(f.state.clusterIPs, a)
		}
	}
	c.sweep()
	var gone []string
	for name := range found.base {
		if !slices.ContainsFunc(l.base(f.state.settings.Localhost), func(ch chain) bool { return ch.name == name }) {
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
