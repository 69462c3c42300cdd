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
)

// target is a dataplane.Target: our chains of one address family.
type target struct {
	layout *layout
	tool   tool
	hash   hasher
	// state is the desired state; nil before the first Read.
	state *state
	// stored is what the kernel has.
	stored stored
	// found is what the last Read found, until the Write that follows. drift is
	// what of it was not as it had been left, and before the chains then.
	found  *found
	drift  []drift
	before stored
	// spelled has the chains that iptables-save does not print as they were
	// written.
	spelled map[chainKey]spelling
}

// WritesSettings is dataplane.SettingsWriter's: where node ports answer stands in
// chains that are always there.
func (t *target) WritesSettings(old, next *dataplane.Settings) bool { return next.SamePorts(old) }

// Read is dataplane.Target's.
func (t *target) Read(ctx context.Context, c *dataplane.Change) error {
	found, err := t.read(ctx)
	if err != nil {
		return err
	}
	t.drift = nil
	if c.Trusted {
		t.drift = t.driftOf(found)
	}
	if len(t.drift) > 0 {
		t.before = maps.Clone(found.chains)
	}
	t.found, t.stored = found, found.chains
	t.state = newState(t.layout, c.Plan)
	return nil
}

// Write is dataplane.Target's. With Full, all that is in the kernel otherwise goes
// too.
func (t *target) Write(ctx context.Context, c *dataplane.Change) error {
	var base []chain
	switch {
	case c.Full:
		base = t.layout.baseChains(&c.Settings)
	case !c.Settings.Equal(&t.state.settings):
		base = t.layout.baseChains(&c.Settings)
	}
	t.state.settings = c.Settings
	err := t.write(ctx, c, base)
	t.found = nil
	if err != nil {
		return err
	}
	if base != nil {
		c.Fail(c.Settings.OpenLoopback())
	}
	if len(t.drift) > 0 {
		err = t.respell(ctx)
	}
	for _, d := range t.drift {
		c.Drift("%s", d.text)
	}
	t.drift = nil
	return err
}

func (l *layout) baseChains(set *dataplane.Settings) []chain {
	var out []chain
	l.base(set, func(table, name string, lines []byte) {
		out = append(out, chain{chainKey{table, name}, lines, false})
	})
	return out
}

// write brings frontends to the desired state, and base chains to the content that they must
// be. A frontend that the kernel rejects is left as it is.
func (t *target) write(ctx context.Context, c *dataplane.Change, base []chain) error {
	undo := map[dataplane.FrontKey]*front{}
	for k := range c.Dirty {
		next := t.state.wanted(k)
		if next != nil || t.state.fronts[k] != nil {
			undo[k] = t.state.set(k, next)
		}
	}
	chains := append(t.state.dirty(), base...)
	err := t.commitAll(ctx, chains)
	if err == nil {
		return nil
	}
	var failed *iptables.Error
	if ctx.Err() != nil || !errors.As(err, &failed) || failed.Busy() {
		return err
	}
	culprits := t.bisect(ctx, slices.Collect(maps.Keys(undo)))
	if len(culprits) == 0 {
		return err
	}
	for k, why := range culprits {
		t.state.set(k, undo[k])
		c.Reject(k, fmt.Errorf("%s of %s: %w", k, t.state.owner(k), why))
	}
	return t.commitAll(ctx, t.state.rerender(chains))
}

// commitAll writes chains, and then the chains that nothing leads to any more.
func (t *target) commitAll(ctx context.Context, chains []chain) error {
	err := t.commit(ctx, chains, t.found)
	if err == nil && t.state.leave() {
		err = t.commit(ctx, t.state.dirty(), nil)
	}
	return err
}

// commit writes the chains that are not as they are stored.
func (t *target) commit(ctx context.Context, chains []chain, found *found) error {
	var change []chain
	wanted := map[chainKey]bool{}
	for _, c := range chains {
		wanted[c.chainKey] = true
		sum, there := t.stored[c.chainKey]
		if c.gone != there && (c.gone || sum == t.hash.sum(c.lines)) {
			continue
		}
		change = append(change, c)
	}
	if found != nil {
		for k := range t.stored {
			if !wanted[k] {
				change = append(change, chain{chainKey: k, gone: true})
			}
		}
	}
	input := t.input(change, found)
	if len(input) == 0 {
		return nil
	}
	if err := t.tool.Restore(ctx, input); err != nil {
		return err
	}
	for _, c := range change {
		if c.gone {
			delete(t.stored, c.chainKey)
		} else {
			t.stored[c.chainKey] = t.hash.sum(c.lines)
		}
	}
	return nil
}

// input is what iptables-restore gets. A chain is emptied by its first line,
// and goes by its last.
func (t *target) input(change []chain, found *found) []byte {
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

// maxTries bounds the search for what the kernel rejects.
const maxTries = 100

// bisect finds out which of the frontends the kernel rejects, and why, by
// writing the rules of some into a chain that nothing leads to.
func (t *target) bisect(ctx context.Context, fks []dataplane.FrontKey) map[dataplane.FrontKey]error {
	bad := map[dataplane.FrontKey]error{}
	tries := 0
	var search func(part []dataplane.FrontKey)
	search = func(part []dataplane.FrontKey) {
		if len(part) == 0 || tries >= maxTries || ctx.Err() != nil {
			return
		}
		tries++
		err := iptables.Try(ctx, t.tool, tableNAT, chainTry, t.tryRules(part)...)
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
	return bad
}

// tryRules are the rules of some frontends, for iptables.Try.
func (t *target) tryRules(fks []dataplane.FrontKey) []string {
	var all []byte
	for _, k := range fks {
		fr := t.state.fronts[k]
		if fr == nil {
			continue
		}
		w := writer{chain: chainTry}
		t.layout.leaf(&w, fr, true)
		all = append(all, w.b...)
		t.layout.chains(&t.state.settings, fr, func(_ string, lines []byte) { all = append(all, lines...) })
	}
	var rules []string
	for line := range strings.Lines(string(all)) {
		// Our other chains need not be there.
		words := strings.Fields(line)[2:] // without -A and the chain
		if n := len(words); ours(words[n-1]) {
			words[n-2], words[n-1] = "-j", "RETURN"
		}
		rules = append(rules, strings.Join(words, " "))
	}
	return rules
}

// owner is the Service port that has, or must get, a frontend.
func (s *state) owner(k dataplane.FrontKey) string {
	if p, _ := s.plan.Wanted(k); p != nil {
		return p.ID.String()
	}
	if fr := s.fronts[k]; fr != nil {
		return fr.port.ID.String()
	}
	return "no Service"
}

// rerender renders the chains of trees once more, now that some frontends are not
// what they were when chains was made.
func (s *state) rerender(chains []chain) []chain {
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
