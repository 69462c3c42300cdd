package lb

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/reflector"
)

// nodes are what is known of all Nodes. They are followed from when a Service asks for something that depends on
// them, and not before: a cluster may have thousands.
type nodes struct {
	followed, listed bool
	known            map[string]*node
}

// node is what a Service may ask of a Node.
type node struct {
	labels   map[string]string
	addrs    []netip.Addr   // internal ones
	pods     []netip.Prefix // of its Pods
	cordoned bool
}

// needsNodes reports whether what a Service asks for depends on the Nodes.
func needsNodes(s *dialect.Spec) bool {
	return s.WeightLabel != "" || s.NodePorts || s.BackendNodes != ""
}

// followNodes follows the Nodes once a Service needs them.
func (p *proxying) followNodes(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	needed := len(p.ruled) > 0
	for _, v := range p.services {
		needed = needed || v.spec != nil && needsNodes(v.spec)
	}
	if !needed || p.nodes.followed {
		return
	}
	p.nodes.followed = true
	sink := reflector.Sink[*corev1.Node]{
		Replace: func(list []*corev1.Node) {
			next := make(map[string]*node, len(list))
			for _, o := range list {
				next[o.Name] = readNode(o)
			}
			p.changeNodes(func() bool { p.nodes.known, p.nodes.listed = next, true; return true })
		},
		Set: func(o *corev1.Node) {
			p.changeNodes(func() bool {
				now, was := readNode(o), p.nodes.known[o.Name]
				p.nodes.known[o.Name] = now
				return was == nil || !maps.Equal(was.labels, now.labels) || !slices.Equal(was.addrs, now.addrs) || !slices.Equal(was.pods, now.pods) ||
					was.cordoned != now.cordoned
			})
		},
		Delete: func(o *corev1.Node) { p.changeNodes(func() bool { delete(p.nodes.known, o.Name); return true }) },
	}
	from := reflector.From(p.client.CoreV1().Nodes(), metav1.ListOptions{})
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "lb-speaker/nodes", from, sink) })
}

// changeNodes calls f with the lock held. If that reports a change, Services that need Nodes are built again.
func (p *proxying) changeNodes(f func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !f() {
		return
	}
	for _, v := range p.services {
		if v.spec != nil && needsNodes(v.spec) {
			v.built = nil
		}
	}
	p.rulesChanged()
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
