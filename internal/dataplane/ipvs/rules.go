package ipvs

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
)

// rules writes our few rules of iptables, which are the same whatever Services
// there are.
type rules struct {
	layout *layout
	// plain is the tool that was found, and tool what it is used by.
	plain *iptables.Tool
	tool  tool
	// printed is how iptables-save prints them once they are written, by table.
	printed map[string]string
}

// foundRules is what a table has: our chains, the rules in other chains that
// lead to them, and all of it as text.
type foundRules struct {
	ours, leads []string
	count       int // rules, in our chains and in others
	text        string
}

// read reads what is in all tables.
func (r *rules) read(ctx context.Context) (map[string]*foundRules, error) {
	out := map[string]*foundRules{}
	lines := map[string][]string{}
	for _, t := range tables {
		out[t] = &foundRules{}
	}
	err := r.tool.SaveAll(ctx, func(table, name string) {
		if f := out[table]; f != nil && ourChain(name) {
			f.ours = append(f.ours, name)
		}
	}, func(table, name, line string) {
		switch f := out[table]; {
		case f == nil:
		case ourChain(name):
			lines[table] = append(lines[table], line)
		case iptables.Leads(line, ourChain):
			f.leads = append(f.leads, line)
		}
	})
	if err != nil {
		return nil, err
	}
	for table, f := range out {
		slices.Sort(f.ours)
		// The order of chains is the program's; that within a chain counts.
		slices.SortStableFunc(lines[table], func(a, b string) int { return strings.Compare(chainOf(a), chainOf(b)) })
		f.count = len(f.leads) + len(lines[table])
		f.text = strings.Join(f.ours, " ") + "\n" + strings.Join(slices.Concat(f.leads, lines[table]), "\n") + "\n"
	}
	return out, nil
}

func chainOf(line string) string {
	words := strings.SplitN(line, " ", 3)
	return words[1]
}

// ensure writes missing rules and returns what differed from the written state.
func (r *rules) ensure(ctx context.Context, set *dataplane.Settings) ([]string, error) {
	if l := r.layout; !slices.Equal(set.Services, l.services) || !slices.Equal(set.PodInterfaces, l.interfaces) {
		l.services, l.interfaces, r.printed = slices.Clone(set.Services), slices.Clone(set.PodInterfaces), nil
	}
	now, err := r.read(ctx)
	if err != nil {
		return nil, err
	}
	var changed []string
	var input []byte
	for _, table := range tables {
		if now[table].text == r.printed[table] {
			continue
		}
		if r.printed != nil {
			changed = append(changed, fmt.Sprintf("our %s rules in table %s were changed", r.layout.family, table))
		}
		input = append(input, r.input(table, now[table])...)
	}
	if len(input) == 0 {
		return nil, nil
	}
	if err := r.tool.Restore(ctx, input); err != nil {
		return changed, err
	}
	if now, err = r.read(ctx); err != nil {
		return changed, err
	}
	r.printed = map[string]string{}
	for table, f := range now {
		if !f.complete(r.layout.chains(table), len(jumps[table])) {
			// Who comes in between must not be taken for the one who wrote them.
			r.printed = nil
			return changed, fmt.Errorf("our rules in table %s were changed while they were written", table)
		}
		r.printed[table] = f.text
	}
	return changed, nil
}

// complete reports whether there are as many chains and rules as there should be.
func (f *foundRules) complete(want []chain, jumps int) bool {
	rules := jumps
	for _, c := range want {
		rules += len(c.rules)
	}
	return len(f.ours) == len(want) && f.count == rules
}

// input is the text that gives a table its desired content in one step.
func (r *rules) input(table string, now *foundRules) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", table)
	want := r.layout.chains(table)
	for _, c := range want {
		fmt.Fprintf(&b, ":%s - [0:0]\n", c.name)
	}
	for _, line := range now.leads {
		fmt.Fprintf(&b, "-D %s\n", strings.TrimPrefix(line, "-A "))
	}
	var extra []string
	for _, name := range now.ours {
		if !slices.ContainsFunc(want, func(c chain) bool { return c.name == name }) {
			extra = append(extra, name)
		}
	}
	for _, c := range want {
		for _, rule := range c.rules {
			fmt.Fprintf(&b, "-A %s %s\n", c.name, rule)
		}
	}
	for _, j := range jumps[table] {
		fmt.Fprintf(&b, "-I %s 1 %s-j %s\n", j[0], comment, j[1])
	}
	for _, name := range extra {
		fmt.Fprintf(&b, "-F %s\n", name)
	}
	for _, name := range extra {
		fmt.Fprintf(&b, "-X %s\n", name)
	}
	b.WriteString("COMMIT\n")
	return []byte(b.String())
}
