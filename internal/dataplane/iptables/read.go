package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
)

// found is what is in the kernel.
type found struct {
	chains stored
	// foreign are the rules in chains that are not ours which lead to ours, by
	// table, as iptables-save prints them.
	foreign map[string][]string
}

// read reads our chains.
func (t *target) read(ctx context.Context) (*found, error) {
	out := &found{chains: stored{}, foreign: map[string][]string{}}
	for _, table := range []string{tableFilter, tableNAT} {
		text := map[string][]byte{}
		err := t.tool.Save(ctx, table, func(name string) {
			if ours(name) {
				text[name] = nil
			}
		}, func(name, line string) {
			switch {
			case ours(name):
				text[name] = append(append(text[name], line...), '\n')
			case strings.Contains(line, " "+prefix):
				out.foreign[table] = append(out.foreign[table], line)
			}
		})
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", table, err)
		}
		for name, lines := range text {
			k, sum := chainKey{table, name}, t.hash.sum(lines)
			if sp, ok := t.spelled[k]; ok && sp.printed == sum {
				sum = sp.written
			}
			out.chains[k] = sum
		}
	}
	return out, nil
}

// hooks are the commands that make the rules in a table's built-in chains lead
// into our chains once each.
func (f *found) hooks(table string) []string {
	var out []string
	have := map[string]bool{}
	want := map[string]string{}
	for _, j := range jumps() {
		if j[0] == table {
			want["-A "+j[1]+" "+j[2]] = "-I " + j[1] + " 1 " + j[2]
		}
	}
	for _, line := range f.foreign[table] {
		if !iptables.Leads(line, ours) {
			continue
		}
		if want[line] == "" || have[line] {
			out = append(out, "-D "+strings.TrimPrefix(line, "-A "))
		}
		have[line] = true
	}
	for _, line := range slices.Sorted(maps.Keys(want)) {
		if !have[line] {
			out = append(out, want[line])
		}
	}
	return out
}

// spelling is how the kernel prints a chain that was written.
type spelling struct{ written, printed digest }

// respell looks at what was repaired. A chain that is printed as before, though it
// was written again, is as it should be: another version of iptables spells its
// rules differently. It is no drift, and its spelling is known from now on. Anything
// else was changed in between by another program, which is dataplane.ErrStale: the
// iptables.Watch takes the last state read for the desired one.
func (t *target) respell(ctx context.Context) error {
	now, err := t.read(ctx)
	if err != nil {
		return err
	}
	same := map[chainKey]bool{}
	for k, sum := range now.chains {
		if want, ours := t.stored[k]; ours && sum != want && sum.rules() == want.rules() {
			if t.spelled == nil {
				t.spelled = map[chainKey]spelling{}
			}
			t.spelled[k] = spelling{written: want, printed: sum}
			same[k] = sum == t.before[k]
			now.chains[k] = want
		}
	}
	t.drift = slices.DeleteFunc(t.drift, func(d drift) bool { return same[d.chain] })
	if d := t.driftOf(now); len(d) > 0 {
		return fmt.Errorf("%w: %s", dataplane.ErrStale, d[0].text)
	}
	return nil
}

// drift is something that was not as it was written; chain is the zero value if it
// is not about one of our chains.
type drift struct {
	chain chainKey
	text  string
}

// driftOf returns how the kernel's state differs from the written one.
func (t *target) driftOf(now *found) []drift {
	before := t.stored
	var out []drift
	say := func(k chainKey, format string, args ...any) {
		out = append(out, drift{k, fmt.Sprintf("iptables %s: "+format, append([]any{t.layout.family}, args...)...)})
	}
	for _, k := range slices.SortedFunc(maps.Keys(before), chainKey.compare) {
		sum, there := now.chains[k]
		switch {
		case !there:
			say(k, "chain %s of table %s was missing%s", k.name, k.table, t.state.about(k))
		case sum != before[k]:
			say(k, "the rules of chain %s of table %s were changed%s", k.name, k.table, t.state.about(k))
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(now.chains), chainKey.compare) {
		if _, known := before[k]; !known {
			say(k, "a foreign chain %s was in table %s", k.name, k.table)
		}
	}
	for _, table := range []string{tableFilter, tableNAT} {
		for _, h := range now.hooks(table) {
			words := strings.Fields(h)
			if words[0] == "-D" {
				say(chainKey{}, "a foreign rule in chain %s of table %s led to our chains", words[1], table)
			} else {
				say(chainKey{}, "the rule in chain %s of table %s that leads to our chains was missing", words[1], table)
			}
		}
	}
	return out
}

// about names the frontends that have rules in a chain.
func (s *state) about(k chainKey) string {
	if k.table != tableNAT {
		return ""
	}
	var names []string
	for _, t := range []*tree[*front]{s.vips, s.nodes} {
		if n, _, items, ok := t.chain(k.name); ok && !n.inner {
			for _, it := range items {
				names = append(names, fmt.Sprintf("%s of %s", it.fk, it.port.ID))
			}
		}
	}
	if len(names) == 0 {
		return ""
	}
	if n := len(names) - 3; n > 0 {
		names = append(names[:3], fmt.Sprintf("%d more", n))
	}
	return ", with " + strings.Join(names, ", ")
}
