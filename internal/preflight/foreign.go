package preflight

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// ownTables begins the names of fairlead's tables; kubeProxyTable is kube-proxy's in its mode nftables.
const (
	ownTables      = "fairlead"
	kubeProxyTable = "kube-proxy"
)

// Bounds of the look at other programs' rules: how many are read, how deep jumps are followed and how many rules are looked at in
// all, as chains may be jumped to from many places.
const (
	maxRules = 20_000
	maxDepth = 16
	maxSteps = 100_000
)

// foreign returns the rules of other programs that drop or reject packets to and from the ranges.
func foreign(ranges []netip.Prefix) ([]nftables.Decoded, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all, err := c.Ruleset(maxRules, func(table string) bool { return strings.HasPrefix(table, ownTables) || table == kubeProxyTable })
	if err != nil {
		return nil, err
	}
	return losses(all, ranges), nil
}

// losses returns the rules that drop or reject packets of Pods and Services: rules for addresses of the ranges, at every place that
// such packets pass, and rules for all packets that the machine forwards, unless an earlier rule of their base chain may accept them.
// A rule with a condition that is not understood is left out, as programs for network policies have them.
func losses(all *nftables.Ruleset, ranges []netip.Prefix) []nftables.Decoded {
	w := walk{all: all, ranges: ranges, steps: maxSteps}
	for _, hook := range []uint32{nftables.Prerouting, nftables.Forward, nftables.Output, nftables.Postrouting} {
		w.forward = hook == nftables.Forward
		for _, base := range all.Base[hook] {
			w.accepts, w.unsure = nil, false
			w.chain(base, nftables.Decoded{}, 0)
		}
	}
	return w.found
}

// walk goes through the rules of base chains in the order in which packets meet them.
type walk struct {
	all     *nftables.Ruleset
	ranges  []netip.Prefix
	forward bool // the base chain is one of forwarded packets
	accepts []nftables.Decoded
	unsure  bool // an earlier rule may accept some packets
	steps   int
	found   []nftables.Decoded
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
			if known(r.Target) {
				w.unsure = true
				continue
			}
			w.chain(nftables.BaseChain{Table: at.Table, Name: r.Target}, both, depth+1)
		case nftables.Returns:
			w.unsure = true
		case nftables.Accepts:
			w.unsure = true
			if !both.Opaque && len(both.Narrow) == 0 {
				w.accepts = append(w.accepts, both)
			}
		case nftables.Drops, nftables.Rejects:
			if w.loses(&both) && !slices.ContainsFunc(w.found, func(f nftables.Decoded) bool { return f.Chain == r.Chain && f.Handle == r.Handle }) {
				w.found = append(w.found, both)
			}
		}
	}
}

// known reports whether a chain of iptables is one of fairlead's own, or of kube-proxy: they reject connections to Services that have
// no endpoints.
func known(chain string) bool {
	return strings.HasPrefix(chain, "FAIRLEAD") || strings.HasPrefix(chain, "KUBE-")
}

// loses reports whether a rule loses packets of Pods or Services.
func (w *walk) loses(r *nftables.Decoded) bool {
	if r.Opaque {
		return false
	}
	if !r.Source.IsValid() && !r.Destination.IsValid() {
		return w.forward && len(r.Narrow) == 0 && !w.unsure
	}
	ours := func(p netip.Prefix) bool {
		return p.IsValid() && p.Bits() > 0 && slices.ContainsFunc(w.ranges, p.Overlaps)
	}
	accepted := func(a nftables.Decoded) bool {
		return covers(a.Source, r.Source) && covers(a.Destination, r.Destination)
	}
	return (ours(r.Source) || ours(r.Destination)) && !slices.ContainsFunc(w.accepts, accepted)
}

// covers reports whether all addresses of p are of a; invalid stands for all addresses.
func covers(a, p netip.Prefix) bool {
	return !a.IsValid() || p.IsValid() && a.Bits() <= p.Bits() && a.Contains(p.Addr())
}

// meet returns the rule r for the packets that a jump of by leads to it, and false if there are none.
func meet(r, by nftables.Decoded) (nftables.Decoded, bool) {
	out := r
	out.Narrow, out.Opaque = slices.Concat(by.Narrow, r.Narrow), by.Opaque || r.Opaque
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
