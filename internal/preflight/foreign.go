package preflight

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// ownTables begins the names of fairlead's tables, ownChains those of its chains of iptables; kubeProxyTable is kube-proxy's in its
// mode nftables.
const (
	ownTables      = "fairlead"
	ownChains      = "FAIRLEAD"
	kubeProxyTable = "kube-proxy"
)

// Bounds of the look at other programs' rules: how many are read, how deep jumps are followed and how many rules are looked at in
// all, as chains may be jumped to from many places.
const (
	maxRules = 20_000
	maxDepth = 16
	maxSteps = 100_000
)

// Packets are what a node has to let pass.
type Packets struct {
	// Ranges are the ranges of Services and Pods, Pods only the latter.
	Ranges, Pods []netip.Prefix
	// DNSPort is where the node's DNS server gets what Pods ask, 0 if that is not known.
	DNSPort uint16
}

// errMany is the error of a look that left rules out.
var errMany = fmt.Errorf("there are more than %d rules of other programs: not all of them were looked at", maxRules)

// foreign returns what other programs do to lose such packets, in words. The error wraps exec.ErrNotFound if there are rules of
// iptables-legacy and no program to read them, or errMany; what was found is returned with any error.
func foreign(ctx context.Context, p Packets) ([]string, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all, err := c.Ruleset(maxRules, func(at nftables.BaseChain) bool {
		return Ours(at) || at.Table.Name == kubeProxyTable || known(at.Name)
	})
	if err != nil {
		return nil, err
	}
	if err = addLegacy(ctx, all); err == nil && all.Partial {
		err = errMany
	}
	return losses(all, p), err
}

// losses returns the rules that drop or reject packets of Pods and Services: rules for addresses of the ranges, at every place that
// such packets pass, unless an earlier rule of their base chain may accept them; and what drops all packets of a path, which takes
// all rules. A rule with a condition that is not understood is left out, as programs for network policies have them.
func losses(all *nftables.Ruleset, p Packets) (out []string) {
	w := walk{all: all, ranges: p.Ranges, steps: maxSteps}
	for _, hook := range []uint32{nftables.Prerouting, nftables.Forward, nftables.Output, nftables.Postrouting} {
		for _, base := range all.Base[hook] {
			w.accepts = nil
			w.chain(base, nftables.Decoded{}, 0)
		}
	}
	for i := range w.found {
		out = append(out, w.found[i].String())
	}
	if all.Partial {
		return out
	}
	for _, path := range p.paths() {
		w.steps = maxSteps
		for _, base := range all.Base[path.hook] {
			if by, why := w.loses(base, &path); why != "" && !w.has(&by) {
				w.found = append(w.found, by)
				out = append(out, why)
			}
		}
	}
	return out
}

// walk goes through the rules of base chains in the order in which packets meet them.
type walk struct {
	all     *nftables.Ruleset
	ranges  []netip.Prefix
	accepts []nftables.Decoded
	steps   int
	found   []nftables.Decoded
}

// has reports whether a rule, or the policy of a chain, was found before: a rule may lose packets of several paths.
func (w *walk) has(r *nftables.Decoded) bool {
	return slices.ContainsFunc(w.found, func(f nftables.Decoded) bool { return f.Chain == r.Chain && f.Handle == r.Handle })
}

// chain walks through a chain for the packets that come there by a jump.
func (w *walk) chain(at nftables.BaseChain, by nftables.Decoded, depth int) {
	for _, r := range w.all.Rules[at] {
		if w.steps--; w.steps < 0 || depth > maxDepth {
			return
		}
		both, meets := meet(r, by)
		if !meets {
			continue
		}
		switch r.Verdict {
		case nftables.Jumps:
			if !known(r.Target) {
				w.chain(nftables.BaseChain{Table: at.Table, Name: r.Target}, both, depth+1)
			}
		case nftables.Accepts:
			if !both.Opaque && len(both.Conditions) == 0 {
				w.accepts = append(w.accepts, both)
			}
		case nftables.Drops, nftables.Rejects:
			if w.concerns(&both) && !w.has(&r) {
				w.found = append(w.found, both)
			}
		}
	}
}

// known reports whether a chain of iptables is one of fairlead's own, or of kube-proxy: they reject connections to Services that have
// no endpoints.
func known(chain string) bool {
	return strings.HasPrefix(chain, ownChains) || strings.HasPrefix(chain, "KUBE-")
}

// Ours reports whether a chain is one of fairlead's own, by the names of the table and the chain.
func Ours(at nftables.BaseChain) bool {
	return strings.HasPrefix(at.Table.Name, ownTables) || strings.HasPrefix(at.Name, ownChains)
}

// concerns reports whether a rule that drops is for packets of Pods or Services.
func (w *walk) concerns(r *nftables.Decoded) bool {
	rare := func(c nftables.Condition) bool {
		return c.Field == nftables.State && c.Mask&newOrEstablished == 0 || c.Field == nftables.Status
	}
	if r.Opaque || slices.ContainsFunc(r.Conditions, rare) {
		return false
	}
	ours := func(p netip.Prefix) bool {
		return p.IsValid() && p.Bits() > 0 && slices.ContainsFunc(w.ranges, p.Overlaps)
	}
	accepted := func(a nftables.Decoded) bool {
		return covers(a.Source, r.Source) && covers(a.Destination, r.Destination)
	}
	if ours(r.Source) && r.Destination.Bits() > 0 && !ours(r.Destination) { // what Pods may not reach outside is a decision
		return false
	}
	return (ours(r.Source) || ours(r.Destination)) && !slices.ContainsFunc(w.accepts, accepted)
}

// newOrEstablished are the states of connections that carry data.
const newOrEstablished = nftables.CtStateNew | nftables.CtStateEstablished

// covers reports whether all addresses of p are of a; invalid stands for all addresses.
func covers(a, p netip.Prefix) bool {
	return !a.IsValid() || p.IsValid() && a.Bits() <= p.Bits() && a.Contains(p.Addr())
}

// meet returns the rule r for the packets that a jump of by leads to it, and false if there are none.
func meet(r, by nftables.Decoded) (nftables.Decoded, bool) {
	out := r
	out.Conditions, out.Opaque = slices.Concat(by.Conditions, r.Conditions), by.Opaque || r.Opaque
	smaller := func(a, b netip.Prefix) (netip.Prefix, bool) {
		switch {
		case !a.IsValid():
			return b, true
		case !b.IsValid() || b.Bits() < a.Bits():
			return a, !b.IsValid() || b.Overlaps(a)
		}
		return b, b.Overlaps(a)
	}
	var ok, ok2 bool
	out.Source, ok = smaller(r.Source, by.Source)
	out.Destination, ok2 = smaller(r.Destination, by.Destination)
	return out, ok && ok2
}
