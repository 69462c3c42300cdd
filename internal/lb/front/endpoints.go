package front

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// backend is an endpoint, or a node port.
type backend struct {
	addr netip.AddrPort
	node string // empty if it is unknown
	// weight is its share of new connections. One of weight 0 keeps the connections that it has.
	weight int
	state  table.State // of an endpoint, whatever its weight
}

// candidates are the endpoints of a port before a policy chooses. Each one's Origin is its index in of.
type candidates struct {
	all []table.Candidate
	of  []backend
}

// backends returns the endpoints, or node ports, that get connections to a port at this node.
func (d *draft) backends(port *corev1.ServicePort, family svc.Family) []backend {
	proto, err := svc.ParseProtocol(string(port.Protocol))
	if err != nil {
		return nil
	}
	c := d.candidates(table.Key{ID: svc.PortName{Name: d.name, Port: port.Name}, Family: family}, proto)
	if d.to.Spec.NodePorts {
		return d.nodePorts(port, family, c)
	}
	return d.endpoints(c)
}

// candidates returns the endpoints of a port on the nodes that the Service selects.
func (d *draft) candidates(k table.Key, proto svc.Protocol) (c candidates) {
	nearby := !d.to.Spec.CrossZone && d.zone != ""
	var some []table.Candidate
	for _, name := range slices.Sorted(maps.Keys(d.from.slices)) { // the order decides between two that are otherwise equal
		slice := d.from.slices[name]
		weight, _ := svc.ParseWeight(cmp.Or(slice.Annotations[svc.LBWeightAnnotation], slice.Annotations[svc.WeightAnnotation]))
		some = table.AppendCandidates(some[:0], slice, k, proto, d.node)
		for _, one := range some {
			e := &slice.Endpoints[one.Origin]
			b := backend{addr: one.Addr, weight: weight, state: one.State}
			if e.NodeName != nil {
				b.node = *e.NodeName
			}
			if !d.selects(b.node) {
				continue
			}
			if b.weight *= d.size(b.node); b.weight == 0 {
				one.State = one.Idle()
			}
			one.Near = nearby && e.Zone != nil && *e.Zone == d.zone
			one.Weight = uint16(min(b.weight, 1<<16-1)) //nolint:gosec // only the order of two with one address
			one.Origin = int32(len(c.of))               //nolint:gosec // far fewer
			c.all, c.of = append(c.all, one), append(c.of, b)
		}
	}
	c.all = table.Unique(c.all)
	return c
}

// selects reports whether the Service wants the endpoints of a node.
func (d *draft) selects(node string) bool {
	if d.to.Spec.BackendNodes == "" {
		return true
	}
	n, selector := d.nodes.known[node], d.from.selector
	return n != nil && selector != nil && selector.Matches(labels.Set(n.labels))
}

// size returns the weight of a node by the label that the Service names.
func (d *draft) size(node string) int {
	label := d.to.Spec.WeightLabel
	n := d.nodes.known[node]
	if label == "" || n == nil {
		return 1
	}
	size, _ := svc.ParseWeight(n.labels[label])
	return size
}

// endpoints returns the endpoints that package table chooses: no other way chooses otherwise (behaviours 93, 129, 199).
// An address may be reached by clients of this node and its Pods although policy Local hides every endpoint from it: they
// get the endpoints of policy Cluster, as at a cluster IP.
func (d *draft) endpoints(c candidates) []backend {
	if claim.IsLocal(d.from.object) {
		out := c.pick(table.ForLocal)
		if slices.ContainsFunc(out, func(b backend) bool { return b.weight != 0 }) {
			return out
		}
	}
	return c.pick(func(all []table.Candidate) func(*table.Candidate) bool { return table.ForCluster(all, d.node, d.zone) })
}

// pick returns the backends with a weight that a policy chooses, and the backends of weight 0 that it would choose if
// they had one: these keep connections.
func (c candidates) pick(policy func([]table.Candidate) func(*table.Candidate) bool) (out []backend) {
	asWeighted := slices.Clone(c.all)
	hasReady := false
	for i := range c.all {
		asWeighted[i].State = c.of[c.all[i].Origin].state
		hasReady = hasReady || c.all[i].Is(table.Ready)
	}
	chosen := policy(c.all)
	keeps := chosen
	if !hasReady { // draining ones are the last resort of new connections only
		keeps = policy(asWeighted)
	}
	for i := range c.all {
		b := c.of[c.all[i].Origin]
		if b.weight != 0 && chosen(&c.all[i]) || b.weight == 0 && keeps(&asWeighted[i]) {
			out = append(out, b)
		}
	}
	return out
}

// nodePorts returns the node ports that get connections to a port, as the clouds' controllers choose them: on the
// selected nodes; with policy Local, or where the Service asks for it, only on nodes with a Pod. With policy Local
// the weight is the number of a node's Pods, as its proxy forwards only to these (behaviours 142, 149, 179, 181 to 183).
func (d *draft) nodePorts(port *corev1.ServicePort, family svc.Family, c candidates) (out []backend) {
	local := claim.IsLocal(d.from.object)
	pods := d.podsByNode(c)
	nearby := false
	for name, n := range d.nodes.known {
		_, excluded := n.labels[corev1.LabelNodeExcludeBalancers]
		cordoned := n.cordoned && d.to.Spec.SkipCordoned
		empty := pods[name] == 0 && (local || d.to.Spec.OnlyNodesWithPod)
		if excluded || cordoned || empty || !d.selects(name) {
			continue
		}
		i := slices.IndexFunc(n.addrs, func(a netip.Addr) bool { return svc.FamilyOf(a) == family })
		if i < 0 {
			continue
		}
		b := backend{addr: netip.AddrPortFrom(n.addrs[i], uint16(port.NodePort)), node: name, weight: d.size(name)} //nolint:gosec // a port
		if local {
			b.weight *= min(pods[name], svc.MaxWeight)
		}
		nearby = nearby || n.zone() == d.zone
		out = append(out, b)
	}
	if !d.to.Spec.CrossZone && d.zone != "" && nearby {
		out = slices.DeleteFunc(out, func(b backend) bool { return d.nodes.known[b.node].zone() != d.zone })
	}
	return out
}

// podsByNode returns how many endpoints of a port each node has: ready ones, or draining ones if none is ready.
func (d *draft) podsByNode(c candidates) map[string]int {
	pods := map[string]int{}
	all := slices.Clone(c.all)
	for i := range all {
		all[i].Near, all[i].State = false, c.of[all[i].Origin].state
	}
	counts := table.ForCluster(all, "", "") // without topology
	for i := range all {
		if counts(&all[i]) {
			pods[c.of[all[i].Origin].node]++
		}
	}
	return pods
}
