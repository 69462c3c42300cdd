package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
)

// Dump is dataplane.Applier's: our chains as iptables-save prints them, in the order
// of their names, after the rules that lead to them. The same Table gives the
// same text, however it was reached.
func (m *Mode) Dump(ctx context.Context) (string, error) {
	var b strings.Builder
	for _, t := range m.targets {
		for _, table := range []string{tableFilter, tableNAT} {
			if err := t.dump(ctx, &b, table); err != nil {
				return "", err
			}
		}
	}
	return b.String(), nil
}

func (t *target) dump(ctx context.Context, b *strings.Builder, table string) error {
	text := map[string][]string{}
	var others []string
	err := t.tool.Save(ctx, table, func(name string) {
		if ours(name) {
			text[name] = nil
		}
	}, func(name, line string) {
		switch {
		case ours(name):
			text[name] = append(text[name], strings.TrimPrefix(line, "-A "+name+" "))
		case iptables.Leads(line, ours):
			others = append(others, strings.TrimPrefix(line, "-A "))
		}
	})
	if err != nil {
		return fmt.Errorf("iptables %s: read table %s: %w", t.layout.family, table, err)
	}
	fmt.Fprintf(b, "%s table %s\n", t.layout.family, table)
	slices.Sort(others)
	for _, line := range others {
		fmt.Fprintf(b, "  %s\n", line)
	}
	for _, name := range slices.Sorted(maps.Keys(text)) {
		fmt.Fprintf(b, "  chain %s\n", name)
		for _, line := range text[name] {
			fmt.Fprintf(b, "    %s\n", line)
		}
	}
	return nil
}
