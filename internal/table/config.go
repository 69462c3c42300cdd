package table

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// Config is what a Builder knows of its node from flags. It does not change
// during the Builder's life.
type Config struct {
	// NodeName is the name of this node's Node object; endpoints that carry it
	// are local.
	NodeName string
	// ClusterCIDRs and MasqueradeAll are handed on in the Table.
	ClusterCIDRs  []netip.Prefix
	MasqueradeAll bool
	// NodePortAddresses chooses where node ports answer.
	NodePortAddresses NodePortAddresses
	// Scheduler reads ServicePort.Scheduler out of a Service's annotations. An
	// error becomes a Problem, and the Service is served without. Nil reads
	// nothing.
	Scheduler func(annotations map[string]string) (string, error)
}

// NodePortAddresses is the value of --nodeport-addresses: which of a node's
// addresses answer on node ports (behaviour 93).
//
// The zero value chooses every address but loopback and IPv6 link-local ones.
// (Link-local addresses come and go with every pod's link. Both kinds count
// when a listed range names them.)
type NodePortAddresses struct {
	primary bool
	ranges  []netip.Prefix
}

// ParseNodePortAddresses reads the elements of --nodeport-addresses: nothing,
// the single word "primary" (the node's InternalIP of each family), or CIDRs.
func ParseNodePortAddresses(words []string) (NodePortAddresses, error) {
	if len(words) == 1 && words[0] == "primary" {
		return NodePortAddresses{primary: true}, nil
	}
	var n NodePortAddresses
	for _, w := range words {
		p, err := netip.ParsePrefix(strings.TrimSpace(w))
		if err != nil {
			return NodePortAddresses{}, fmt.Errorf("--nodeport-addresses: %q is neither \"primary\" alone nor an address range such as 192.0.2.0/24",
				w)
		}
		n.ranges = append(n.ranges, p.Masked())
	}
	return n, nil
}

// choose returns the addresses that answer on node ports, in address order.
func (n NodePortAddresses) choose(machine, primary []netip.Addr) []netip.Addr {
	from := machine
	if n.primary {
		from = primary
	}
	var out []netip.Addr
	for _, a := range from {
		a = a.Unmap().WithZone("")
		if n.matches(a) {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

func (n NodePortAddresses) matches(a netip.Addr) bool {
	switch {
	case n.primary:
		return true
	case len(n.ranges) == 0:
		return !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast())
	}
	return slices.ContainsFunc(n.ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}

// firstOfEachFamily keeps the first IPv4 and the first IPv6 address.
func firstOfEachFamily(addrs []netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, a := range addrs {
		f := svc.FamilyOf(a)
		if !slices.ContainsFunc(out, func(b netip.Addr) bool { return svc.FamilyOf(b) == f }) {
			out = append(out, a)
		}
	}
	return out
}

// IsDefault reports that nothing was chosen.
func (n NodePortAddresses) IsDefault() bool { return !n.primary && len(n.ranges) == 0 }
