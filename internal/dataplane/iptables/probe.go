package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Choose finds the variant to use and the reason. For Auto it is that of the
// rules that are there already: ours, then kubelet's, then anybody's; else the
// one the administrator made the default.
func Choose(ctx context.Context, want Variant) (iptables.Variant, string, error) {
	switch want {
	case NFT:
		return iptables.NFT, "asked for", nil
	case Legacy:
		return iptables.Legacy, "asked for", nil
	}
	v, why := choose(ctx)
	_, err := iptables.New(v, svc.IPv4)
	if err == nil {
		return v, why, nil
	}
	other := iptables.NFT + iptables.Legacy - v
	if _, err := iptables.New(other, svc.IPv4); err == nil {
		return other, fmt.Sprintf("%s is not installed", v), nil
	}
	return v, why, fmt.Errorf("iptables mode: %w", err)
}

// census is what the tables of a variant have.
type census struct{ ours, kubelet, rules int }

func choose(ctx context.Context) (iptables.Variant, string) {
	var of [2]census
	for _, v := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		for _, f := range socket.Families() {
			if t, err := iptables.New(v, f); err == nil {
				count(ctx, t, &of[v])
			}
		}
	}
	n, l := of[iptables.NFT], of[iptables.Legacy]
	for _, c := range []struct {
		n, l int
		why  string
	}{
		{n.ours, l.ours, "our own rules of an earlier run are there"},
		{n.kubelet, l.kubelet, "the kubelet's rules are there"},
		{n.rules, l.rules, "most other rules are there"},
	} {
		switch {
		case c.n > c.l:
			return iptables.NFT, c.why
		case c.l > c.n:
			return iptables.Legacy, c.why
		}
	}
	if v, err := iptables.Default(ctx); err == nil {
		return v, "the program iptables is of this variant"
	}
	return iptables.NFT, "nothing speaks for the other one"
}

func count(ctx context.Context, t *iptables.Tool, c *census) {
	// What cannot be read counts for nothing.
	_ = t.Tables(ctx, func(name string) {
		switch {
		case ours(name):
			c.ours++
		case name == "KUBE-IPTABLES-HINT", name == "KUBE-KUBELET-CANARY":
			c.kubelet++
		}
	}, func(string, string) { c.rules++ })
}

// ProbeVariant returns the variant that Choose finds and why, or why this mode
// cannot work here. It writes a chain with everything that the mode uses, to
// which no other chain leads, and removes it.
func ProbeVariant(ctx context.Context, want Variant) (Variant, string, error) {
	v, why, err := Choose(ctx, want)
	if err != nil {
		return want, why, err
	}
	got := NFT
	if v == iptables.Legacy {
		got = Legacy
	}
	for _, f := range socket.Families() {
		t, err := iptables.New(v, f)
		if err == nil {
			err = probe(ctx, t, f)
		}
		if err != nil {
			return got, why, fmt.Errorf("iptables mode does not work here with variant %s (%s), family %s: %w", got, why, f, probeHint(err))
		}
	}
	return got, why, nil
}

func probeHint(err error) error {
	var e *iptables.Error
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("%w; or choose another --mode", err)
	case errors.As(err, &e) && strings.Contains(e.Said, "Permission denied"):
		return fmt.Errorf("it needs CAP_NET_ADMIN in this network namespace: run as root: %w", err)
	}
	return fmt.Errorf("%w; the kernel may lack a module of iptables: choose another --mode", err)
}

// probe tries the rules of a Table that has one of everything but SCTP, which a
// kernel may well lack.
func probe(ctx context.Context, t tool, f svc.Family) error {
	cfg := Config{DropInvalid: true}
	if err := cfg.complete(); err != nil {
		return err
	}
	l := newLayout(f, &cfg)
	ep := func(n byte) table.Endpoint {
		a := netip.AddrFrom4([4]byte{192, 0, 2, n})
		if f == svc.IPv6 {
			a = netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: n})
		}
		return table.Endpoint{Addr: netip.AddrPortFrom(a, 80)}
	}
	fronts := []table.Frontend{{Addr: ep(1).Addr, Endpoints: []table.Endpoint{ep(2), ep(3)}}}
	plan, dirty := dataplane.NewPlan(mode, f), dataplane.Dirty{}
	plan.Settings.Localhost = f == svc.IPv4
	plan.Settings.Guard = plan.Settings.Localhost
	tg := &target{layout: l, tool: t, state: newState(l, plan)}
	for i, p := range []*table.ServicePort{
		{Family: f, Protocol: svc.TCP, Frontends: fronts}, {Family: f, Protocol: svc.UDP, Frontends: fronts, Affinity: 1},
	} {
		plan.Set(table.Key{ID: svc.PortName{Port: fmt.Sprint(i)}}, p, dirty)
	}
	for k := range dirty {
		tg.state.set(k, tg.state.wanted(k))
	}
	lines := map[string][]string{tableNAT: tg.tryRules(slices.Collect(maps.Keys(dirty)))}
	l.base(&plan.Settings, func(table, _ string, text []byte) {
		for line := range strings.Lines(string(text)) {
			words := strings.Fields(line)
			if !ours(words[len(words)-1]) {
				lines[table] = append(lines[table], strings.Join(words[2:], " "))
			}
		}
	})
	for _, table := range []string{tableNAT, tableFilter} {
		if err := iptables.Try(ctx, t, table, chainTry, lines[table]...); err != nil {
			return err
		}
	}
	return nil
}

// Present reports whether this mode has written chains, in this process or another one. Another user than root does not see the ones of
// legacy tables, which only root can list (/proc/net/ip_tables_names).
func Present(ctx context.Context) (found bool, err error) {
	variants := []iptables.Variant{iptables.NFT}
	if os.Geteuid() == 0 {
		variants = append(variants, iptables.Legacy)
	}
	err = iptables.EachOf(func(t *iptables.Tool) error {
		p, err := t.Part(ctx, ours)
		found = found || err == nil && p.Chains > 0
		return err
	}, variants...)
	return found, err
}

// Cleanup removes all our chains, of both variants, the rules that lead to them,
// and the sets that they count in. Where there are none it does nothing.
func Cleanup(ctx context.Context) error {
	if err := errors.Join(iptables.RemoveChains(ctx, ours), ipset.Remove(ctx, counted.Names()...)); err != nil {
		return fmt.Errorf("iptables cleanup: %w", err)
	}
	return nil
}
