package filter

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// span is the addresses from first to the one before end, or to the last of the family if end is not valid.
type span struct{ first, end netip.Addr }

// spansOf returns the addresses of networks, in spans that neither overlap nor meet.
func spansOf(networks []netip.Prefix) map[span]bool {
	sorted := make([]netip.Prefix, len(networks))
	for i, p := range networks {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, netip.Prefix.Compare)
	out := map[span]bool{}
	var last span
	for _, p := range sorted {
		next := span{p.Addr(), endOf(p)}
		sameFamily := last.first.IsValid() && last.first.BitLen() == next.first.BitLen()
		switch {
		case sameFamily && !last.end.IsValid():
			continue // it goes on to the last address
		case sameFamily && !last.end.Less(next.first):
			delete(out, last)
			next.first = last.first
			if next.end.IsValid() && next.end.Less(last.end) {
				next.end = last.end
			}
		}
		out[next], last = true, next
	}
	return out
}

// endOf returns the address after the last one of a network, which is masked.
func endOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last.Next()
}

// nodes is the name of the set of Nodes and their Pods.
func (f family) nodes() string { return "nodes-" + f.name }

// nodesChange returns the transaction that leads from one set of nodes to another.
func nodesChange(old, nodes map[span]bool) *nftables.Batch {
	b := nftables.NewBatch()
	spans(b.DelRange, without(old, nodes))
	spans(b.AddRange, without(nodes, old))
	return b
}

// spans calls do for the ranges, set by set, so that they share messages.
func spans(do func(t nftables.Table, set string, first, end []byte), of map[span]bool) {
	for _, f := range families {
		for s := range of {
			if familyOf(s.first) == f {
				do(groupTable, f.nodes(), s.first.AsSlice(), s.end.AsSlice())
			}
		}
	}
}
