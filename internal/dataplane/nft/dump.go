package nft

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/table"
)

// Dump is dataplane.Applier's: what is in the kernel now, sorted, without what
// depends on the order of events (slots, keys of map targets, remembered
// clients). The same Table gives the same text, however it was reached.
func (m *Mode) Dump(ctx context.Context) (string, error) {
	var b strings.Builder
	for _, t := range m.targets {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		r, err := t.read(true, func(func(*table.ServicePort) bool) {})
		if err != nil {
			return "", fmt.Errorf("nft %s: read the table: %w", t.layout.table, err)
		}
		r.write(&b, t.layout)
	}
	for _, t := range m.targets {
		if err := t.direct.Dump(&b); err != nil {
			return "", fmt.Errorf("nft: read table %s: %w", direct.TableName, err)
		}
	}
	return b.String(), nil
}

func (f *found) write(b *strings.Builder, l *layout) {
	switch {
	case f.replace:
		fmt.Fprintf(b, "table %s: of another layout\n", l.table)
		return
	case !f.usable:
		fmt.Fprintf(b, "table %s: not there\n", l.table)
		return
	}
	fmt.Fprintf(b, "table %s\n", l.table)
	names := map[uint32]string{idRefuse: chainRefuse, idDrop: chainDrop}
	for name, ch := range f.chains {
		if ch.target {
			names[ch.id] = name
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(f.fronts), dataplane.FrontKey.Compare) {
		f.fronts[k].write(b, k, names)
	}
	writeAddrs(b, "node addresses", maps.Keys(f.nodeAddrs))
	writeAddrs(b, "cluster IPs", maps.Keys(f.clusterIPs))
	writeAddrs(b, "local endpoints", maps.Keys(f.pairs))
	chains := maps.Clone(f.base)
	for name, ch := range f.chains {
		if !ch.present {
			fmt.Fprintf(b, "  missing chain %s\n", name)
			continue
		}
		if !ch.target {
			fmt.Fprintf(b, "  nothing leads to chain %s\n", name)
		}
		chains[name] = ch.stored
	}
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		fmt.Fprintf(b, "  chain %s\n", name)
		for _, r := range chains[name] {
			text := r.Text
			if r.Hash == 0 {
				text = "a rule of another program"
			}
			fmt.Fprintf(b, "    %s\n", text)
		}
	}
	for _, s := range l.sets() {
		if !f.sets[s.Name] {
			fmt.Fprintf(b, "  missing set %s\n", s.Name)
		}
	}
	for _, s := range slices.Sorted(slices.Values(f.foreignSets)) {
		fmt.Fprintf(b, "  foreign set %s\n", s)
	}
	if n := len(f.junk); n > 0 {
		fmt.Fprintf(b, "  %d foreign elements\n", n)
	}
	if !f.refuse || !f.drop {
		fmt.Fprintf(b, "  missing elements of %s\n", setTargets)
	}
}

func (f *front) write(b *strings.Builder, k dataplane.FrontKey, names map[uint32]string) {
	entry := "nowhere"
	if f.present {
		var ok bool
		if entry, ok = names[f.id]; !ok {
			entry = fmt.Sprintf("unknown target %#x", f.id)
		}
	}
	fmt.Fprintf(b, "  %s %s -> %s\n", k, f.owner, entry)
	for list, word := range []string{"", "inside "} {
		addrs := make([]netip.AddrPort, 0, len(f.lists[list]))
		for _, e := range f.lists[list] {
			addrs = append(addrs, e.Addr)
		}
		slices.SortFunc(addrs, netip.AddrPort.Compare)
		for _, a := range addrs {
			text := a.String()
			if !a.IsValid() {
				text = "a missing slot"
			}
			if f.sticky {
				text += " sticky"
			}
			if f.sticky != f.stored[list][a] {
				text += ", but not so in the set of serving endpoints"
			}
			fmt.Fprintf(b, "    %s%s\n", word, text)
		}
	}
}

func writeAddrs(b *strings.Builder, what string, addrs func(func(netip.Addr) bool)) {
	list := slices.SortedFunc(addrs, netip.Addr.Compare)
	if len(list) == 0 {
		return
	}
	fmt.Fprintf(b, "  %s:", what)
	for _, a := range list {
		fmt.Fprintf(b, " %s", a)
	}
	b.WriteString("\n")
}
