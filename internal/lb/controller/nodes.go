package controller

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// nodes are the nodes of the cluster and their speakers. set and setSpeaker are the only writers. Its owner holds the
// lock that guards it.
type nodes struct {
	records map[string]*node
	addrs   map[netip.Addr][]string // the Nodes of each address that counts, by name; derived from records
}

// node is a node of which a Node, a Speaker, or both exist.
type node struct {
	nodeFacts
	speaker *v1.Speaker // nil if there is none
}

// nodeFacts are what a Node object shows. They are zero while there is none.
type nodeFacts struct {
	exists       bool
	addrs        []netip.Addr // the ones that count
	others       []netip.Addr // some of the others that it lists
	pods         []pool.Range
	outOfService bool // it has the taint of this name
	silent       bool // no kubelet or agent reports its state
	labels       labels.Set
}

func newNodes() nodes { return nodes{records: map[string]*node{}, addrs: map[netip.Addr][]string{}} }

func readNode(o *corev1.Node) nodeFacts {
	n := nodeFacts{exists: true, pods: prefixes(o.Spec.PodCIDRs), labels: o.Labels}
	n.addrs, n.others = addresses(o)
	n.outOfService = slices.ContainsFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
	n.silent = slices.ContainsFunc(o.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
	return n
}

// What bounds the addresses of one Node: the ones of an administrator, and the ones that do not count but are remembered
// for a message.
const (
	maxConfirmed = 16
	maxOthers    = 64
)

// addresses returns the addresses of a Node that count, and some of the others that its status lists. The machine writes
// its status itself, and could list every address of a pool there. So the first address of each family counts, or what
// an administrator has confirmed.
func addresses(o *corev1.Node) (counted, others []netip.Addr) {
	text, confirmed := o.Annotations[svc.NodeAddressesAnnotation]
	if confirmed {
		for t := range strings.SplitSeq(text, ",") {
			a, err := netip.ParseAddr(strings.TrimSpace(t))
			if a = a.Unmap(); err == nil && len(counted) < maxConfirmed && !slices.Contains(counted, a) {
				counted = append(counted, a)
			}
		}
	}
	has := func(f svc.Family) bool {
		return slices.ContainsFunc(counted, func(a netip.Addr) bool { return svc.FamilyOf(a) == f })
	}
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, listed := range o.Status.Addresses {
			a, err := netip.ParseAddr(listed.Address)
			if a = a.Unmap(); err != nil || listed.Type != kind || slices.Contains(counted, a) {
				continue
			}
			switch {
			case !confirmed && !has(svc.FamilyOf(a)):
				counted = append(counted, a)
			case len(others) < maxOthers && !slices.Contains(others, a):
				others = append(others, a)
			}
		}
	}
	return counted, others
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
	for _, a := range was.addrs {
		n.addrs[a] = slices.DeleteFunc(n.addrs[a], func(of string) bool { return of == name })
		if len(n.addrs[a]) == 0 {
			delete(n.addrs, a)
		}
	}
	for _, a := range now.addrs {
		i, _ := slices.BinarySearch(n.addrs[a], name)
		n.addrs[a] = slices.Insert(n.addrs[a], i, name)
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
func (n *nodes) has(a netip.Addr) bool { return len(n.addrs[a]) > 0 }

// whose returns why a, an address of a node, is not given out.
func (n *nodes) whose(a netip.Addr) string { return "an address of Node " + n.addrs[a][0] }

// coverage returns what the speakers can announce while list is that of the voters.
func (n *nodes) coverage(list quorum.List) *coverage {
	all := reporters{speakers: map[string]*v1.Speaker{}, labels: map[string]labels.Set{}, silent: map[string]bool{}}
	for name, r := range n.records {
		if r.speaker != nil {
			all.speakers[name], all.labels[name], all.silent[name] = r.speaker, r.labels, r.silent || !r.exists
		}
	}
	return newCoverage(all, undecided(list, func(name string) bool { r := n.records[name]; return r != nil && r.silent }))
}
