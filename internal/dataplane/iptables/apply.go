package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/table"
)

// family is the half of a Mode for one address family.
type family struct {
	layout *layout
	tool   tool
	hash   hasher
	// state is nil until the kernel was read.
	state *state
	// stored is what the kernel has.
	stored stored
	// doubtful says that an error left stored not to be relied upon.
	doubtful bool
	repaired []string
	// spelled has the chains that iptables-save does not print as they were
	// written.
	spelled map[chainKey]spelling
}

// apply writes the family's share of t.
func (f *family) apply(ctx context.Context, t *table.Table, changed []table.Key) error {
	f.repaired = nil
	set := dataplane.SettingsOf(t, f.layout.family)
	if changed == nil || f.state == nil || f.doubtful {
		return f.full(ctx, t, set)
	}
	old := f.state.settings
	if !set.SamePorts(&old) {
		return f.full(ctx, t, set)
	}
	var refused dataplane.Rejections
	var errs []error
	var more []chain
	if !set.Equal(&old) {
		if err := set.OpenLoopback(); err != nil {
			errs = append(errs, err)
		}
		f.state.settings = set
		more = f.layout.baseChains(&set)
	}
	touched := f.state.claims.Take(t, f.layout.family, changed, mode, &refused)
	if len(touched) > 0 || len(more) > 0 {
		errs = append(errs, f.write(ctx, touched, more, nil, &refused)...)
	}
	f.doubtful = len(errs) > 0
	return refused.Err(errs...)
}

// full reads what is in the kernel, and makes it what t says.
func (f *family) full(ctx context.Context, t *table.Table, set dataplane.Settings) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	before := f.stored
	if f.doubtful {
		before = nil // what differs may be our own doing
	}
	f.doubtful = true
	var refused dataplane.Rejections
	var errs []error
	if err := set.OpenLoopback(); err != nil {
		errs = append(errs, err)
	}
	found, err := f.read(ctx)
	if err != nil {
		return err
	}
	var strange []oddity
	if before != nil {
		strange = f.strange(before, found)
	}
	now := maps.Clone(found.chains)
	f.stored = found.chains
	f.state = newState(f.layout, set)
	touched := f.state.claims.Take(t, f.layout.family, nil, mode, &refused)
	more := f.layout.baseChains(&set)
	errs = append(errs, f.write(ctx, touched, more, found, &refused)...)
	if len(strange) > 0 && len(errs) == 0 {
		err := f.learn(ctx, now, &strange)
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, o := range strange {
		f.repaired = append(f.repaired, o.text)
	}
	f.doubtful = len(errs) > 0
	return refused.Err(errs...)
}

func (l *layout) baseChains(set *dataplane.Settings) []chain {
	var out []chain
	l.base(set, func(table, name string, lines []byte) {
		out = append(out, chain{chainKey{table, name}, lines, false})
	})
	return out
}

// write brings frontends to what is claimed, and more chains to what they are
// to be; with found, all that is in the kernel otherwise goes too. A frontend
// that the kernel refuses is left as it is.
func (f *family) write(ctx context.Context, touched dataplane.Touched, more []chain, found *found, refused *dataplane.Rejections) []error {
	undo := map[dataplane.FrontKey]*front{}
	for k := range touched {
		next := f.state.wanted(k)
		if next != nil || f.state.fronts[k] != nil {
			undo[k] = f.state.set(k, next)
		}
	}
	chains := append(f.state.dirty(), more...)
	err := f.commit(ctx, chains, found)
	if err == nil && f.state.leave() {
		err = f.commit(ctx, f.state.dirty(), nil)
	}
	if err == nil {
		return nil
	}
	var failed *iptables.Error
	if ctx.Err() != nil || !errors.As(err, &failed) || failed.Busy() {
		return []error{err}
	}
	bad := f.blame(ctx, slices.Collect(maps.Keys(undo)))
	if len(bad) == 0 {
		return []error{err}
	}
	var errs []error
	for k, why := range bad {
		f.state.set(k, undo[k])
		why = fmt.Errorf("%s of %s: %w", k, f.state.owner(k), why)
		if !f.state.claims.Refuse(k, touched, why, refused) {
			errs = append(errs, why)
		}
	}
	err = f.commit(ctx, f.state.again(chains), found)
	if err == nil && f.state.leave() {
		err = f.commit(ctx, f.state.dirty(), nil)
	}
	if err != nil {
		errs = append(errs, err)
	}
	return errs
}

// commit writes the chains that are not as they are stored.
func (f *family) commit(ctx context.Context, chains []chain, found *found) error {
	var change []chain
	wanted := map[chainKey]bool{}
	for _, c := range chains {
		wanted[c.chainKey] = true
		sum, there := f.stored[c.chainKey]
		if c.gone != there && (c.gone || sum == f.hash.sum(c.lines)) {
			continue
		}
		change = append(change, c)
	}
	if found != nil {
		for k := range f.stored {
			if !wanted[k] {
				change = append(change, chain{chainKey: k, gone: true})
			}
		}
	}
	input := f.input(change, found)
	if len(input) == 0 {
		return nil
	}
	if err := f.tool.Restore(ctx, input); err != nil {
		return err
	}
	for _, c := range change {
		if c.gone {
			delete(f.stored, c.chainKey)
		} else {
			f.stored[c.chainKey] = f.hash.sum(c.lines)
		}
	}
	return nil
}

// input is what iptables-restore is told. A chain is emptied by its first line,
// and goes by its last.
func (f *family) input(change []chain, found *found) []byte {
	slices.SortFunc(change, func(a, b chain) int { return a.compare(b.chainKey) })
	var b bytes.Buffer
	for _, table := range []string{tableFilter, tableNAT} {
		var part []chain
		for _, c := range change {
			if c.table == table {
				part = append(part, c)
			}
		}
		var hooks []string
		if found != nil {
			hooks = found.hooks(table)
		}
		if len(part) == 0 && len(hooks) == 0 {
			continue
		}
		b.WriteString("*" + table + "\n")
		for _, c := range part {
			b.WriteString(":" + c.name + " - [0:0]\n")
		}
		for _, c := range part {
			b.Write(c.lines)
		}
		for _, h := range hooks {
			b.WriteString(h + "\n")
		}
		for _, c := range part {
			if c.gone {
				b.WriteString("-X " + c.name + "\n")
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.Bytes()
}

const (
	// maxTries bounds the search for what the kernel does not like.
	maxTries = 100
)

// blame finds out which of the frontends the kernel refuses, and why, by
// writing the rules of some into a chain that nothing leads to.
func (f *family) blame(ctx context.Context, fks []dataplane.FrontKey) map[dataplane.FrontKey]error {
	bad := map[dataplane.FrontKey]error{}
	tries := 0
	var search func(part []dataplane.FrontKey)
	search = func(part []dataplane.FrontKey) {
		if len(part) == 0 || tries >= maxTries || ctx.Err() != nil {
			return
		}
		tries++
		err := f.tool.Restore(ctx, f.try(part))
		switch {
		case err == nil:
		case len(part) == 1:
			bad[part[0]] = err
		default:
			search(part[:len(part)/2])
			search(part[len(part)/2:])
		}
	}
	search(fks)
	// An error here shows itself at the next full comparison.
	_ = f.tool.Restore(ctx, []byte("*nat\n:"+chainTry+" - [0:0]\n-X "+chainTry+"\nCOMMIT\n"))
	return bad
}

// try is the input that tries the rules of some frontends.
func (f *family) try(fks []dataplane.FrontKey) []byte {
	var all []byte
	for _, k := range fks {
		fr := f.state.fronts[k]
		if fr == nil {
			continue
		}
		w := writer{chain: chainTry}
		f.layout.leaf(&w, fr, true)
		all = append(all, w.b...)
		f.layout.chains(&f.state.settings, fr, func(_ string, lines []byte) { all = append(all, lines...) })
	}
	var b bytes.Buffer
	b.WriteString("*nat\n:" + chainTry + " - [0:0]\n")
	for line := range strings.Lines(string(all)) {
		// Our other chains need not be there.
		words := strings.Fields(line)
		words[1] = chainTry
		if n := len(words); ours(words[n-1]) {
			words[n-2], words[n-1] = "-j", "RETURN"
		}
		b.WriteString(strings.Join(words, " ") + "\n")
	}
	b.WriteString("COMMIT\n")
	return b.Bytes()
}

// owner is the Service port that has, or is to have, a frontend.
func (s *state) owner(k dataplane.FrontKey) string {
	if p, _ := s.claims.Wanted(k); p != nil {
		return p.ID.String()
	}
	if fr := s.fronts[k]; fr != nil {
		return fr.port.ID.String()
	}
	return "nobody"
}

// again renders the chains of trees anew, now that some frontends are not what
// they were when chains was made.
func (s *state) again(chains []chain) []chain {
	at := map[chainKey]chain{}
	for _, c := range chains {
		at[c.chainKey] = c
		if c.table != tableNAT {
			continue
		}
		switch letter := strings.TrimPrefix(c.name, prefix); {
		case c.name == chainVIPs, strings.HasPrefix(letter, "V-"):
			s.vips.dirty[c.name] = true
		case c.name == chainNodePorts, strings.HasPrefix(letter, "N-"):
			s.nodes.dirty[c.name] = true
		case c.name == chainHairpin, strings.HasPrefix(letter, "H-"):
			s.hairpins.dirty[c.name] = true
		}
	}
	for _, c := range s.dirty() {
		at[c.chainKey] = c
	}
	return slices.Collect(maps.Values(at))
}
