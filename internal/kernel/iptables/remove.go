package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Each calls f with the Tool of each variant and family, as far as they are
// installed: a missing tool has written nothing. Its error names them all.
func Each(f func(*Tool) error) error { return EachOf(f, NFT, Legacy) }

// EachOf is Each for some variants.
func EachOf(f func(*Tool) error, variants ...Variant) error {
	var errs []error
	for _, v := range variants {
		for _, fam := range socket.Families() {
			t, err := New(v, fam)
			if errors.Is(err, exec.ErrNotFound) {
				continue
			}
			if err == nil {
				err = f(t)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("iptables %s %s: %w", v, fam, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Installed reports whether Each calls f at all.
func Installed() bool {
	found := false
	_ = Each(func(*Tool) error { found = true; return nil })
	return found
}

// RemoveChains is Tool.RemoveChains of each variant and family.
func RemoveChains(ctx context.Context, its func(chain string) bool) error {
	return Each(func(t *Tool) error { return t.RemoveChains(ctx, its) })
}

// RemoveEmptyTables removes the tables that iptables of variant nft has made for rules and
// leaves behind without one, but no table that another program has anything in.
func RemoveEmptyTables() error {
	var errs []error
	for _, name := range []string{"nat", "filter", "mangle"} {
		if err := nftables.RemoveEmpty(name); err != nil && !nftables.IsUnsupported(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Restorer is a Tool, or a WatchedTool.
type Restorer interface {
	Restore(ctx context.Context, input []byte) error
}

// Try finds out whether the kernel takes rules, which lack "-A CHAIN ": it writes them
// into a chain of a table, to which nothing leads, and removes that again.
func Try(ctx context.Context, t Restorer, table, chain string, rules ...string) error {
	head := "*" + table + "\n:" + chain + " - [0:0]\n"
	var b strings.Builder
	b.WriteString(head)
	for _, r := range rules {
		fmt.Fprintf(&b, "-A %s %s\n", chain, r)
	}
	fmt.Fprintf(&b, "COMMIT\n%s-X %s\nCOMMIT\n", head, chain)
	return t.Restore(ctx, []byte(b.String()))
}

// Leads reports whether a rule, as iptables-save prints it, leads to one of the
// chains that its names.
func Leads(line string, its func(chain string) bool) bool {
	words := strings.Fields(line)
	for i, w := range words[:max(len(words)-1, 0)] {
		if (w == "-j" || w == "-g") && its(words[i+1]) {
			return true
		}
	}
	return false
}

// Part is what one program has in the tables of a Tool.
type Part struct {
	// Chains is how many chains there are.
	Chains int
	tables []*partOfTable
	// unread is the message of iptables-save about tables that it cannot read.
	unread []string
}

type partOfTable struct {
	name   string
	chains []string
	// leads are the rules in other chains that lead there.
	leads []string
}

// Part reads what the program has whose chains its names. It brings no table
// about.
func (t *Tool) Part(ctx context.Context, its func(chain string) bool) (*Part, error) {
	p := &Part{}
	now := &partOfTable{}
	err := t.run(ctx, t.save, nil, nil, &reader{
		table: func(name string) {
			now = &partOfTable{name: name}
			p.tables = append(p.tables, now)
		},
		chain: func(name string) {
			if its(name) {
				now.chains = append(now.chains, name)
				p.Chains++
			}
		},
		rule: func(chain, line string) {
			if !its(chain) && Leads(line, its) {
				now.leads = append(now.leads, line)
			}
		},
		unread: func(line string) { p.unread = append(p.unread, line) },
	})
	return p, err
}

// RemoveChains takes all chains away that its names, in every table, and the
// rules in other chains that lead there. Where there are none it does nothing.
func (t *Tool) RemoveChains(ctx context.Context, its func(chain string) bool) error {
	p, err := t.Part(ctx, its)
	if err != nil {
		return err
	}
	input := p.removal()
	if len(input) == 0 {
		return nil
	}
	if err := t.Restore(ctx, input); err != nil {
		return err
	}
	if len(p.unread) > 0 {
		return fmt.Errorf("some tables cannot be read: %.200q", p.unread)
	}
	return nil
}

// removal is the input of iptables-restore: first nothing leads there, then the
// chains are empty, then they go.
func (p *Part) removal() []byte {
	var b bytes.Buffer
	for _, t := range p.tables {
		if len(t.chains)+len(t.leads) == 0 {
			continue
		}
		slices.Sort(t.chains)
		fmt.Fprintf(&b, "*%s\n", t.name)
		for _, c := range t.chains {
			fmt.Fprintf(&b, ":%s - [0:0]\n", c)
		}
		for _, line := range t.leads {
			fmt.Fprintf(&b, "-D %s\n", strings.TrimPrefix(line, "-A "))
		}
		for _, c := range t.chains {
			fmt.Fprintf(&b, "-X %s\n", c)
		}
		b.WriteString("COMMIT\n")
	}
	return b.Bytes()
}
