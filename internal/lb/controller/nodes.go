package controller

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// nodes are the nodes of the cluster and their speakers. set and setSpeaker are the only writers. Its owner holds the
// lock that guards it.
type nodes struct {
	records map[string]*node
	addrs   map[netip.Addr]int // how often Nodes list each address; derived from records
}

// node is a node of which a Node, a Speaker, or both exist.
type node struct {
	nodeFacts
	speaker *v1.Speaker // nil if there is none
}

// nodeFacts are what a Node object shows. They are zero while there is none.
type nodeFacts struct {
	exists       bool
	addrs        []netip.Addr
	pods         []pool.Range
	outOfService bool // it has the taint of this name
	silent       bool // no kubelet or agent reports its state
}

func newNodes() nodes { return nodes{records: map[string]*node{}, addrs: map[netip.Addr]int{}} }

func readNode(o *corev1.Node) nodeFacts {
	n := nodeFacts{exists: true, pods: prefixes(o.Spec.PodCIDRs)}
	for _, a := range o.Status.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		if err == nil && (a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP) {
			n.addrs = append(n.addrs, ip.Unmap())
		}
	}
	n.outOfService = slices.ContainsFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
	n.silent = slices.ContainsFunc(o.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
	return n
}

// prefixes returns the valid prefixes of a list as ranges.
func prefixes(list []string) []pool.Range {
	var out []pool.Range
	for _, text := range list {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, pool.FromPrefix(p))
		}
	}
	return out
}

// set records what a Node shows, and returns what it showed before.
func (n *nodes) set(name string, now nodeFacts) (was nodeFacts) {
	r := n.record(name)
	was, r.nodeFacts = r.nodeFacts, now
	for _, a := range now.addrs {
		n.addrs[a]++
	}
	for _, a := range was.addrs {
		if n.addrs[a]--; n.addrs[a] == 0 {
			delete(n.addrs, a)
		}
	}
	n.forget(name)
	return was
}

// setSpeaker records the Speaker of a node, nil if it is deleted, and returns the one before.
func (n *nodes) setSpeaker(name string, now *v1.Speaker) (was *v1.Speaker) {
	r := n.record(name)
	was, r.speaker = r.speaker, now
	n.forget(name)
	return was
}

func (n *nodes) record(name string) *node {
	r := n.records[name]
	if r == nil {
		r = &node{}
		n.records[name] = r
	}
	return r
}

// forget removes a record with neither a Node nor a Speaker.
func (n *nodes) forget(name string) {
	if r := n.records[name]; !r.exists && r.speaker == nil {
		delete(n.records, name)
	}
}

// has reports whether a is an address of a node.
func (n *nodes) has(a netip.Addr) bool { return n.addrs[a] > 0 }

// coverage returns what the speakers can announce.
func (n *nodes) coverage() *coverage {
	speakers := map[string]*v1.Speaker{}
	for name, r := range n.records {
		if r.speaker != nil {
			speakers[name] = r.speaker
		}
	}
	return newCoverage(speakers, func(name string) bool { r := n.records[name]; return r.silent || !r.exists })
}
