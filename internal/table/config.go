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
	// PodInterfaces are the interfaces of this node's Pods, for the two ways of DetectLocal that go by them.
	PodInterfaces []Interface
	// NodePortAddresses chooses where node ports answer. PrimaryAddress, if it is valid, is the Node's primary address
	// of its family in place of what the Node says.
	NodePortAddresses NodePortAddresses
	PrimaryAddress    netip.Addr
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
	// Forwarding reports whether the annotations of a Service ask for direct return, Frontend.Hops. An error becomes a
	// Problem. Nil never does.
	Forwarding func(annotations map[string]string) (bool, error)
}

// Interface is an interface by its name, or all whose names begin with it.
type Interface struct {
	Name   string
	Prefix bool
}

// String is the interface as nft(8) has it.
func (i Interface) String() string {
	if i.Prefix {
		return i.Name + "*"
	}
	return i.Name
}

// maxInterface is the length of the longest name of an interface (IFNAMSIZ less its end).
const maxInterface = 15

// ParseInterface reads the name of an interface, or the beginning of names. It refuses what no interface can have
// (dev_valid_name of the kernel), and what another program's rules would read as a pattern.
func ParseInterface(name string, prefix bool) (Interface, error) {
	if name == "" || len(name) > maxInterface || name == "." || name == ".." ||
		strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`/:"*+!\\`, r) }) {
		return Interface{}, fmt.Errorf("%q cannot be the name of an interface: want 1 to %d printable characters but %s", name, maxInterface,
			`/ : " * + ! \`)
	}
	return Interface{name, prefix}, nil
}

// DetectLocal is the value of --detect-local-mode: how pods of this node are told
// from all other clients.
type DetectLocal uint8

// The ways to tell. By ClusterCIDR and NodeCIDR the same ranges also decide what is
// masqueraded on the way to a ClusterIP, as with kube-proxy. DetectAuto leaves that to
// Config.ClusterCIDRs, and knows local pods by the Node's podCIDRs; of a family
// without any by Config.ClusterCIDRs. DetectInterface goes by Config.PodInterfaces only.
const (
	DetectAuto DetectLocal = iota
	DetectClusterCIDR
	DetectNodeCIDR
	DetectInterface
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
	case "BridgeInterface", "InterfaceNamePrefix":
		return DetectInterface, nil
	}
	return 0, fmt.Errorf("--detect-local-mode is %q; want ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix", word)
}

// cidrs returns Table.ClusterCIDRs and Table.LocalCIDRs. node are the Node's
// podCIDRs.
func (c *Config) cidrs(node []netip.Prefix) (cluster, local []netip.Prefix) {
	switch c.DetectLocal {
	case DetectClusterCIDR:
		return c.ClusterCIDRs, c.ClusterCIDRs
	case DetectNodeCIDR:
		return node, node
	case DetectInterface:
		return nil, nil
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
	primary, all bool
	ranges       []netip.Prefix
}

// loopbacks are the ranges of the word "localhost".
var loopbacks = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

// ParseNodePortAddresses reads the elements of --nodeport-addresses: nothing, or any of "primary" (the node's
// InternalIP of each family), "localhost" (127.0.0.0/8 and ::1), "all" (every address, loopback too, but not IPv6
// link-local ones) and CIDRs.
func ParseNodePortAddresses(words []string) (NodePortAddresses, error) {
	var n NodePortAddresses
	for _, w := range words {
		switch w = strings.TrimSpace(w); w {
		case "primary":
			n.primary = true
		case "localhost":
			n.ranges = append(n.ranges, loopbacks...)
		case "all":
			n.all = true
			n.ranges = append(n.ranges, loopbacks...)
		default:
			p, err := netip.ParsePrefix(w)
			if err != nil {
				return NodePortAddresses{}, fmt.Errorf("--nodeport-addresses: %q is neither \"primary\", \"localhost\" or \"all\" "+
					"nor an address range such as 192.0.2.0/24", w)
			}
			n.ranges = append(n.ranges, p.Masked())
		}
	}
	return n, nil
}

// choose returns the addresses that answer on node ports, in address order.
func (n NodePortAddresses) choose(machine, primary []netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, a := range machine {
		if a = a.Unmap().WithZone(""); n.matches(a) {
			out = append(out, a)
		}
	}
	if n.primary {
		for _, a := range primary {
			if a = a.Unmap().WithZone(""); !a.IsLoopback() {
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// matches reports whether an address answers, the primary ones aside.
func (n NodePortAddresses) matches(a netip.Addr) bool {
	if n.Everywhere() && !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast()) {
		return true
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

// Everywhere reports that every address answers which others reach, but for IPv6 link-local ones.
func (n NodePortAddresses) Everywhere() bool { return n.all || !n.primary && len(n.ranges) == 0 }
