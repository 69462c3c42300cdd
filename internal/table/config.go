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
	// DetectLocal decides which clients are pods of this node.
	DetectLocal DetectLocal
	// NodePortAddresses chooses where node ports answer.
	NodePortAddresses NodePortAddresses
	// NoLoopback reports whether the mode cannot lead packets from 127.0.0.0/8 to an endpoint.
	NoLoopback bool
	// Scheduler reads ServicePort.Scheduler out of a Service's annotations. An
	// error becomes a Problem, and the Service is served without. Nil reads
	// nothing.
	Scheduler func(annotations map[string]string) (string, error)
	// Unweighted returns why the mode chooses endpoints evenly whatever their weights are,
	// for a Service of that ServicePort.Scheduler; empty if it does not. Nil is for modes
	// that follow weights.
	Unweighted func(scheduler string) string
}

// DetectLocal is the value of --detect-local-mode: how pods of this node are told
// from all other clients.
type DetectLocal uint8

// The ways to tell. By ClusterCIDR and NodeCIDR the same ranges also decide what is
// masqueraded on the way to a ClusterIP, as with kube-proxy. DetectAuto leaves that to
// Config.ClusterCIDRs, and knows local pods by the Node's podCIDRs; of a family
// without any by Config.ClusterCIDRs.
const (
	DetectAuto DetectLocal = iota
	DetectClusterCIDR
	DetectNodeCIDR
)

// ParseDetectLocal reads the value of --detect-local-mode; empty is DetectAuto.
func ParseDetectLocal(word string) (DetectLocal, error) {
	switch word {
	case "":
		return DetectAuto, nil
	case "ClusterCIDR":
		return DetectClusterCIDR, nil
	case "NodeCIDR":
		return DetectNodeCIDR, nil
	}
	return 0, fmt.Errorf("--detect-local-mode is %q; want ClusterCIDR or NodeCIDR", word)
}

// cidrs returns Table.ClusterCIDRs and Table.LocalCIDRs. node are the Node's
// podCIDRs.
func (c *Config) cidrs(node []netip.Prefix) (cluster, local []netip.Prefix) {
	switch c.DetectLocal {
	case DetectClusterCIDR:
		return c.ClusterCIDRs, c.ClusterCIDRs
	case DetectNodeCIDR:
		return node, node
	case DetectAuto:
	}
	local = slices.Clone(node)
	for _, p := range c.ClusterCIDRs {
		if !slices.ContainsFunc(node, func(n netip.Prefix) bool { return svc.FamilyOf(n.Addr()) == svc.FamilyOf(p.Addr()) }) {
			local = append(local, p)
		}
	}
	return c.ClusterCIDRs, local
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
			return NodePortAddresses{}, fmt.Errorf("--nodeport-addresses: %q is neither the single word \"primary\" "+
				"nor an address range such as 192.0.2.0/24", w)
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
