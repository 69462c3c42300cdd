package ipvs

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
)

// Dump is dataplane.Applier's: our virtual servers, sets and rules. The same Table
// gives the same text, however it was reached; marks, which do not, are told by
// the frontends that they are of.
func (m *Mode) Dump(ctx context.Context) (string, error) {
	if err := m.open(); err != nil {
		return "", err
	}
	var b strings.Builder
	for _, t := range m.targets {
		if err := t.dump(ctx, &b); err != nil {
			return "", fmt.Errorf("ipvs %s: %w", t.layout.family, err)
		}
	}
	return b.String(), nil
}

func (t *target) dump(ctx context.Context, b *strings.Builder) error {
	if err := t.kernel.sets.Create(t.layout.sets()...); err != nil {
		return err
	}
	found, err := t.read(func(k ipvs.Key) bool { return t.stored != nil && t.stored.servers[k] != nil })
	if err != nil {
		return err
	}
	inside := map[uint32][]string{}
	var sets [setCount][]string
	for e := range found.elements {
		if e.Mark != 0 {
			inside[e.Mark] = append(inside[e.Mark], e.Element.String()[:strings.Index(e.Element.String(), " ")])
			e.Mark = 0
		}
		sets[e.set] = append(sets[e.set], e.Element.String())
	}
	var servers []string
	for key, v := range found.servers {
		servers = append(servers, v.text(key, inside))
	}
	slices.Sort(servers)
	fmt.Fprintf(b, "%s\n%s", t.layout.family, strings.Join(servers, ""))
	for s := range setCount {
		slices.Sort(sets[s])
		fmt.Fprintf(b, "%s: %s\n", s.name(t.layout.family), strings.Join(sets[s], " "))
	}
	now, err := t.rules.read(ctx)
	if err != nil {
		return err
	}
	for _, name := range tables {
		fmt.Fprintf(b, "table %s: %s", name, now[name].text)
	}
	return nil
}

func (v *virtual) text(key ipvs.Key, inside map[uint32][]string) string {
	name := key.String()
	if key.Mark != 0 {
		slices.Sort(inside[key.Mark])
		name = "inside of " + strings.Join(inside[key.Mark], " and ")
	}
	text := name + " " + v.Scheduler
	if v.Flags&ipvs.Fallback != 0 {
		text += " with fallback"
	}
	if v.Persistence > 0 {
		text += fmt.Sprintf(" persistent %s", v.Persistence)
	}
	var dests []string
	for a, w := range v.dests {
		dests = append(dests, fmt.Sprintf("  -> %s weight %d\n", a, w))
	}
	slices.Sort(dests)
	return text + "\n" + strings.Join(dests, "")
}

var _ dataplane.Applier = (*Mode)(nil)
