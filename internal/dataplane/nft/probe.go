package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

// probeName is a table that exists within one transaction only.
const probeName = "fairlead-probe"

// Probe returns why this mode cannot work here, or nil. It asks the kernel for
// everything the mode uses, in a transaction that also takes it back.
func Probe() error {
	k, err := nftables.Dial()
	if err != nil {
		return fmt.Errorf("nft mode: %w", err)
	}
	defer func() { _ = k.Close() }()
	for _, f := range socket.Families() {
		cfg := Config{DropInvalid: true}
		if err := cfg.complete(); err != nil {
			return err
		}
		l := newLayout(f, &cfg)
		l.table.Name = probeName
		if err := k.Commit(l.probe()); err != nil {
			return probeError(l, err)
		}
	}
	return nil
}

func probeError(l *layout, err error) error {
	var r *nftables.Refusal
	what := ""
	if errors.As(err, &r) && len(r.Tags) > 0 {
		what = fmt.Sprintf(" (%s)", r.Tags[0])
	}
	switch {
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("nft mode needs CAP_NET_ADMIN in this network namespace: run as root: %w", err)
	case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.EAFNOSUPPORT), errors.Is(err, syscall.ENOENT),
		errors.Is(err, syscall.EPROTONOSUPPORT):
		return fmt.Errorf("nft mode needs Linux 5.9 with nf_tables for family %s%s; choose another --mode: %w", l.Word, what, err)
	}
	return fmt.Errorf("nft mode does not work here, family %s%s: %w", l.Word, what, err)
}

// probe is a transaction that makes one of everything and removes it again.
func (l *layout) probe() *nftables.Batch {
	b := nftables.NewBatch()
	b.Tag("the table")
	b.AddTable(l.table, schema)
	for _, s := range l.sets() {
		b.Tag("set " + s.Name)
		b.AddSet(l.table, s)
	}
	set := &dataplane.Settings{Localhost: true, Services: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
	if l.family == svc.IPv6 {
		set = &dataplane.Settings{Services: []netip.Prefix{netip.MustParsePrefix("2001:db8::/32")}}
	}
	for _, c := range l.base(set) {
		b.Tag("chain " + c.name)
		b.AddChain(l.table, nftables.Chain{Name: c.name, Hook: c.hook})
		for _, r := range c.rules {
			b.Tag("rule " + r.Text)
			b.AddRule(l.table, c.name, r)
		}
	}
	pods := []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 8)}
	if l.family == svc.IPv6 {
		pods = []netip.Prefix{netip.PrefixFrom(netip.IPv6Unspecified(), 8)}
	}
	for _, s := range []spec{
		{n: [2]int{2, 3}, split: true, masq: dataplane.MasqueradeOutside},
		{n: [2]int{2, 3}, split: true, masq: dataplane.MasqueradeAlways, affinity: 10, node: true},
		{n: [2]int{2, 0}, affinity: 10, limited: true, own: "probe"},
	} {
		_, chains := l.chains(&s, &dataplane.Settings{Pods: pods, LocalPods: pods})
		for i := range chains {
			b.Tag("chain " + chains[i].name)
			b.AddChain(l.table, nftables.Chain{Name: chains[i].name})
			for _, r := range chains[i].rules() {
				b.Tag("rule " + r.Text)
				b.AddRule(l.table, chains[i].name, r)
			}
		}
	}
	b.Tag("the table's removal")
	b.DelTable(l.table)
	return b
}

// Cleanup removes our tables, all that the mode ever wrote. Where there are
// none it does nothing.
func Cleanup(ctx context.Context) error {
	return errors.Join(tables.Cleanup(ctx, mode, direct.TableName), tables.Cleanup(ctx, mode, tableName))
}
