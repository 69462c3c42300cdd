package userspace

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// state is how a table in the kernel was found.
type state int

const (
	missing state = iota
	foreign       // of another layout: to be replaced
	fitting
)

// found is what the kernel has.
type found struct {
	*content
	state state
	// ports are the proxy ports that frontends lead to.
	ports map[dataplane.FrontKey]uint16
}

func (t *target) read(k kernel) (*found, error) {
	l := t.layout
	r := &found{content: newContent(), ports: map[dataplane.FrontKey]uint16{}}
	is, err := nftables.ReadTable(k, l.table)
	if err != nil || is == nil {
		return r, err
	}
	if is.Comment != schema || !l.fits(is) {
		r.state = foreign
		return r, nil
	}
	r.state = fitting
	for _, c := range is.Chains {
		r.chains[c.Name] = chain{name: c.Name, hook: c.Hook, stored: is.Rules[c.Name]}
	}
	for _, s := range l.sets() {
		if s.Dynamic {
			continue // it is packets that fill it
		}
		begin := func() {
			maps.DeleteFunc(r.elems, func(at slot, _ nftables.Elem) bool { return at.set == s.Name })
		}
		err := k.Elems(l.table, s.Name, begin, func(e nftables.Elem) {
			e.Key, e.Data = slices.Clone(e.Key), slices.Clone(e.Data)
			r.add(s.Name, e)
			if s.Name == setVIPs || s.Name == setNodePorts {
				if fk, _, ok := tables.ParseKey(e.Key, l.family, s.Name == setNodePorts); ok && len(e.Data) == 2 {
					r.ports[fk] = binary.BigEndian.Uint16(e.Data)
				}
			}
		})
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// fits reports whether a table has the base chains and the sets of this layout,
// and no other sets.
func (l *layout) fits(is *nftables.StoredTable) bool {
	hooks := map[string]*nftables.Hook{}
	for _, c := range l.base(&dataplane.Settings{}) {
		hooks[c.name] = c.hook
	}
	for _, c := range is.Chains {
		if !hooks[c.Name].Is(c.Hook) {
			return false
		}
		delete(hooks, c.Name)
	}
	ours := l.sets()
	for _, st := range is.Sets {
		if !slices.ContainsFunc(ours, func(s nftables.Set) bool { return st.Is(s) }) {
			return false
		}
	}
	return len(hooks) == 0 && len(is.Sets) == len(ours)
}

// Dump is dataplane.Applier's: what is in the kernel now, and where the proxy's ports
// lead, sorted. Ports of the proxy are the only thing in it that differs from
// one process to the next.
func (m *Mode) Dump(ctx context.Context) (string, error) {
	var b strings.Builder
	for _, t := range m.targets {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		r, err := t.read(t.kernel)
		if err != nil {
			return "", fmt.Errorf("userspace, table %s: read the installed rules: %w", t.layout.table, err)
		}
		t.dump(&b, r)
	}
	return b.String(), nil
}

func (t *target) dump(b *strings.Builder, r *found) {
	l := t.layout
	switch r.state {
	case foreign:
		fmt.Fprintf(b, "table %s: of another layout\n", l.table)
	case missing:
		fmt.Fprintf(b, "table %s: not there\n", l.table)
	case fitting:
		fmt.Fprintf(b, "table %s\n", l.table)
	}
	var lines []string
	for at, e := range r.elems {
		lines = append(lines, l.elemText(at, &e))
	}
	for _, ls := range t.listeners {
		for _, lis := range ls {
			lines = append(lines, fmt.Sprintf("  %s port %d -> %v", lis.Protocol, lis.Port, lis.balancer))
		}
	}
	slices.Sort(lines)
	for _, line := range lines {
		fmt.Fprintln(b, line)
	}
	for _, name := range slices.Sorted(maps.Keys(r.chains)) {
		fmt.Fprintf(b, "  chain %s\n", name)
		for _, rule := range r.chains[name].stored {
			text := rule.Text
			if rule.Hash == 0 {
				text = "a rule of another program"
			}
			fmt.Fprintf(b, "    %s\n", text)
		}
	}
}

// elemText is a line of Dump.
func (l *layout) elemText(at slot, e *nftables.Elem) string {
	to := ""
	switch {
	case len(e.Data) == 2:
		to = fmt.Sprintf(" -> port %d", binary.BigEndian.Uint16(e.Data))
	case e.Goto != "":
		to = " -> " + e.Goto
	}
	what := fmt.Sprintf("%x", e.Key)
	switch at.set {
	case setVIPs, setOtherVIPs:
		if k, _, ok := tables.ParseKey(e.Key, l.family, false); ok {
			what = k.String()
		}
	case setNodePorts, setOtherNode, setProxyPorts:
		if k, _, ok := tables.ParseKey(e.Key, l.family, true); ok {
			what = fmt.Sprintf("%s %d", k.Proto, k.Port)
		}
	default:
		if a, ok := netip.AddrFromSlice(e.Key); ok {
			what = a.String()
		}
	}
	return strings.TrimRight(fmt.Sprintf("  %s %s%s %s", at.set, what, to, e.Comment), " ")
}
