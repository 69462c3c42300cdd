package table

import (
	"fmt"
	"net/netip"
	"slices"
)

// SetServiceCIDRs sets the ranges of ClusterIPs. Build leaves out ranges that overlap
// what this node needs; see RejectedCIDRs.
func (b *Builder) SetServiceCIDRs(ranges []netip.Prefix) {
	b.ranges = nil
	for _, p := range ranges {
		b.ranges = append(b.ranges, p.Masked())
	}
	slices.SortFunc(b.ranges, netip.Prefix.Compare)
	b.ranges = slices.Compact(b.ranges)
}

// RejectedCIDRs returns why the last Build left ranges of ClusterIPs out, a line for
// each. What is sent to an address of such a range and of no Service is not dropped:
// a ServiceCIDR 10.0.0.0/8 would cut a node at 10.1.2.3 off from its server, and so
// from the correction.
func (b *Builder) RejectedCIDRs() []string { return b.rejectedCIDRs }

// serviceCIDRs decides which ranges the Table gets.
func (b *Builder) serviceCIDRs() []netip.Prefix {
	b.rejectedCIDRs = nil
	return slices.DeleteFunc(slices.Clone(b.ranges), func(p netip.Prefix) bool {
		why := b.overlap(p)
		if why != "" {
			b.rejectedCIDRs = append(b.rejectedCIDRs, fmt.Sprintf("%s %s", p, why))
		}
		return why != ""
	})
}

// overlap returns what of this node's surroundings a range has, "" for nothing.
func (b *Builder) overlap(p netip.Prefix) string {
	for _, who := range []reserver{reservedAPI, reservedServer} {
		for _, at := range b.reserved[who] {
			// A client inside of the cluster may reach its server at a ClusterIP.
			if a := at.Addr.Addr(); p.Contains(a) && b.vips.owner(a) == nil {
				return fmt.Sprintf("has %s, %s", a, who)
			}
		}
	}
	for _, a := range b.primary {
		if p.Contains(a) {
			return fmt.Sprintf("has %s, an address of this node", a)
		}
	}
	for _, pods := range slices.Concat(b.cfg.ClusterCIDRs, b.podCIDRs) {
		if p.Overlaps(pods) {
			return fmt.Sprintf("overlaps %s, a range of pods", pods)
		}
	}
	return ""
}
