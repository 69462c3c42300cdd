package front

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/reflector"
)

// nodes caches what Services ask of Nodes. Nodes are followed once a Service depends on them, and not before: a cluster
// may have thousands. The Front's mu guards it.
type nodes struct {
	followed, listed bool
	known            map[string]*node
}

// node is what a Service may ask of a Node.
type node struct {
	labels   map[string]string
	addrs    []netip.Addr   // internal ones
	pods     []netip.Prefix // spec.podCIDRs
	cordoned bool
}

func (n *node) zone() string { return n.labels[corev1.LabelTopologyZone] }

// same reports whether nothing that a Service may ask for differs.
func (n *node) same(o *node) bool {
	return n.cordoned == o.cordoned && maps.Equal(n.labels, o.labels) && slices.Equal(n.addrs, o.addrs) && slices.Equal(n.pods, o.pods)
}

// needsNodes reports whether a Service depends on the Nodes.
func needsNodes(s *dialect.Spec) bool {
	return s.WeightLabel != "" || s.NodePorts || s.BackendNodes != ""
}

// followNodes follows the Nodes once a Service needs them.
func (f *Front) followNodes(ctx context.Context, running *sync.WaitGroup) {
	f.mu.Lock()
	defer f.mu.Unlock()
	needed := len(f.rules.services) > 0
	for _, s := range f.services {
		needed = needed || s.spec != nil && needsNodes(s.spec)
	}
	if !needed || f.nodes.followed {
		return
	}
	f.nodes.followed = true
	sink := reflector.Sink[*corev1.Node]{
		Replace: func(list []*corev1.Node) {
			next := make(map[string]*node, len(list))
			for _, o := range list {
				next[o.Name] = readNode(o)
			}
			f.changeNodes(func() bool {
				f.nodes.known, f.nodes.listed = next, true
				return true
			})
		},
		Set: func(o *corev1.Node) {
			f.changeNodes(func() bool {
				now, was := readNode(o), f.nodes.known[o.Name]
				f.nodes.known[o.Name] = now
				return was == nil || !was.same(now)
			})
		},
		Delete: func(o *corev1.Node) {
			f.changeNodes(func() bool {
				delete(f.nodes.known, o.Name)
				return true
			})
		},
	}
	from := reflector.From(f.client.CoreV1().Nodes(), metav1.ListOptions{})
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "lb-speaker/nodes", from, sink) })
}

// unmatched returns the problem of a Service whose selector of nodes matches no Node, "" if there is none.
func (n *nodes) unmatched(s *service) string {
	if s.spec == nil || s.spec.BackendNodes == "" || s.selector == nil || !n.listed {
		return ""
	}
	for _, one := range n.known {
		if s.selector.Matches(labels.Set(one.labels)) {
			return ""
		}
	}
	return fmt.Sprintf("it has no backend: its selector of nodes, %.200s, matches no Node", s.spec.BackendNodes)
}

// changeNodes calls change with mu held. If that reports a change, Services that depend on Nodes are built again.
func (f *Front) changeNodes(change func() bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !change() {
		return
	}
	for _, s := range f.services {
		if s.spec != nil && needsNodes(s.spec) {
			s.built = nil
		}
	}
	f.rules.changed()
}

func readNode(o *corev1.Node) *node {
	n := &node{labels: o.Labels, cordoned: o.Spec.Unschedulable}
	for _, a := range o.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			n.addrs = append(n.addrs, ip.Unmap())
		}
	}
	for _, text := range o.Spec.PodCIDRs {
		if cidr, err := netip.ParsePrefix(text); err == nil {
			n.pods = append(n.pods, cidr)
		}
	}
	return n
}
