package table

import (
	"fmt"
	"net/netip"
	"slices"
)

// ranges are those of ClusterIPs.
type ranges struct {
	wanted []netip.Prefix
	// rejected are the ranges that the table leaves out, with the reasons.
	rejected []string
}

// SetServiceCIDRs sets the ranges of ClusterIPs. Build leaves out ranges that overlap
// what this node needs; see RejectedCIDRs.
func (b *Builder) SetServiceCIDRs(ranges []netip.Prefix) {
	b.ranges.wanted = nil
	for _, p := range ranges {
		b.ranges.wanted = append(b.ranges.wanted, p.Masked())
	}
	slices.SortFunc(b.ranges.wanted, netip.Prefix.Compare)
	b.ranges.wanted = slices.Compact(b.ranges.wanted)
}

// RejectedCIDRs returns why the last Build left ranges of ClusterIPs out, a line for
// each. What is sent to an address of such a range and of no Service is not dropped:
// a ServiceCIDR 10.0.0.0/8 would cut a node at 10.1.2.3 off from its server, and so
// from the correction.
func (b *Builder) RejectedCIDRs() []string { return b.ranges.rejected }

// choose decides which ranges the Table gets.
func (r *ranges) choose(n *node, virtual *vips) []netip.Prefix {
	r.rejected = nil
	return slices.DeleteFunc(slices.Clone(r.wanted), func(p netip.Prefix) bool {
		why := n.overlap(p, virtual)
		if why != "" {
			r.rejected = append(r.rejected, fmt.Sprintf("%s %s", p, why))
		}
		return why != ""
	})
}
