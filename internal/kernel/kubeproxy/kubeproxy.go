// Package kubeproxy finds and removes the rules that a kube-proxy left on a
// node: they answer the same packets as ours, and never change any more.
package kubeproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// tableName is the name of its nf_tables tables, of both families.
const tableName = "kube-proxy"

// chains and prefixes are the names of its iptables chains, of modes iptables
// and ipvs. The kubelet's are not among them (KUBE-FIREWALL,
// KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT).
var (
	chains = []string{
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-FORWARD",
		"KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY", "KUBE-MARK-MASQ", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER",
		"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}
	prefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-FW-", "KUBE-EXT-", "KUBE-SEP-", "KUBE-XLB-"}
)

func its(chain string) bool {
	return slices.Contains(chains, chain) || slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
}

// Find says what is there, a line each; nothing, if there is nothing. It works
// in the network namespace of the calling thread.
func Find(ctx context.Context) ([]string, error) {
	var out []string
	var errs []error
	errs = append(errs, eachTable(func(_ *nftables.Conn, t nftables.Table) error {
		out = append(out, "table "+t.String()+" of nf_tables")
		return nil
	}), eachTool(ctx, func(t *iptables.Tool, f svc.Family, r *rules) error {
		if n := len(r.chains); n > 0 {
			out = append(out, fmt.Sprintf("%d chains of iptables (%s, %s)", n, t.Variant(), f))
		}
		return nil
	}))
	return out, errors.Join(errs...)
}

// Remove takes it away. What a running kube-proxy needs it writes again.
func Remove(ctx context.Context) error {
	return errors.Join(eachTable(func(c *nftables.Conn, t nftables.Table) error {
		b := nftables.NewBatch()
		b.DelTable(t)
		return c.Commit(b)
	}), eachTool(ctx, func(t *iptables.Tool, _ svc.Family, r *rules) error {
		if len(r.chains) == 0 {
			return nil
		}
		return t.Restore(ctx, r.removal())
	}))
}

func eachTable(do func(*nftables.Conn, nftables.Table) error) error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var errs []error
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t := nftables.Table{Family: nftables.FamilyOf(f), Name: tableName}
		_, there, err := c.Table(t)
		if err == nil && there {
			err = do(c, t)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("table %s: %w", t, err))
		}
	}
	return errors.Join(errs...)
}

// rules are what kube-proxy has in the tables of one variant and family.
type rules struct {
	chains []place
	// jumps are the rules in other chains that lead there, as iptables-save
	// prints them.
	jumps []place
}

// place is a chain, or the line of a rule, in a table.
type place struct{ table, text string }

func eachTool(ctx context.Context, do func(*iptables.Tool, svc.Family, *rules) error) error {
	var errs []error
	for _, v := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
			t, err := iptables.New(v, f)
			if errors.Is(err, exec.ErrNotFound) {
				continue // what is not installed has written nothing
			}
			r := &rules{}
			if err == nil {
				err = t.SaveAll(ctx, func(table, name string) {
					if its(name) {
						r.chains = append(r.chains, place{table, name})
					}
				}, func(table, chain, line string) {
					if !its(chain) && leads(line) {
						r.jumps = append(r.jumps, place{table, line})
					}
				})
			}
			if err == nil {
				err = do(t, f, r)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("iptables %s %s: %w", v, f, err))
			}
		}
	}
	return errors.Join(errs...)
}

func leads(line string) bool {
	words := strings.Fields(line)
	for i, w := range words[:len(words)-1] {
		if (w == "-j" || w == "-g") && its(words[i+1]) {
			return true
		}
	}
	return false
}

// removal is the input of iptables-restore: first nothing leads there, then
// the chains are emptied, then they go.
func (r *rules) removal() []byte {
	var b bytes.Buffer
	var tables []string
	for _, c := range r.chains {
		if !slices.Contains(tables, c.table) {
			tables = append(tables, c.table)
		}
	}
	for _, table := range tables {
		fmt.Fprintf(&b, "*%s\n", table)
		for _, c := range r.chains {
			if c.table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.text)
			}
		}
		for _, j := range r.jumps {
			if j.table == table {
				fmt.Fprintf(&b, "-D %s\n", strings.TrimPrefix(j.text, "-A "))
			}
		}
		for _, c := range r.chains {
			if c.table == table {
				fmt.Fprintf(&b, "-X %s\n", c.text)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.Bytes()
}
