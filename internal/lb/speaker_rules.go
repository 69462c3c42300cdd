package lb

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/svc"
)

// ruledService is a Service of a Network Load Balancer, of either way.
type ruledService struct {
	object  *corev1.Service
	clients []netip.Prefix // of its last good configuration
}

// setRules takes over whether a Service has the rules of a Network Load Balancer.
func (p *proxying) setRules(o *corev1.Service, r *dialect.Reading) {
	n := nameOf(o)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch v := p.ruled[n]; {
	case r.Invalid() && v != nil:
		v.object = o
	case r.Spec.NLB && !r.Invalid():
		p.ruled[n] = &ruledService{o, r.Spec.SourceRanges}
	case v != nil:
		delete(p.ruled, n)
	default:
		return
	}
	p.rulesChanged()
}

func (p *proxying) dropRules(n svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ruled[n] != nil {
		delete(p.ruled, n)
		p.rulesChanged()
	}
}

// rulesChanged makes run write the rules.
func (p *proxying) rulesChanged() {
	p.rulesDirty.Store(true)
	signal(p.wake)
}

// applyRules writes the rules if they have changed. What an earlier process has left stays until all that they depend on has
// been listed. Without rules, as on a kernel that has no nf_tables, the load balancers work on.
func (p *proxying) applyRules() {
	if !p.rulesDirty.Load() || !p.listed() {
		return
	}
	p.mu.Lock()
	if len(p.ruled) > 0 && !p.nodes.listed {
		p.mu.Unlock()
		return
	}
	p.rulesDirty.Store(false)
	groups := p.groups()
	var nodes []netip.Prefix
	if len(groups) > 0 {
		nodes = p.networks()
	}
	p.mu.Unlock()
	failure := ""
	if err := p.rules.Set(nodes, groups); err != nil {
		failure = err.Error()
		p.rulesDirty.Store(true)
	}
	if failure != p.rulesErr && failure != "" {
		p.log.Warn("cannot write the rules of Network Load Balancers; retrying", "err", failure)
	}
	p.rulesErr = failure
}

// networks returns, with mu held, the addresses of Nodes and their Pods.
func (p *proxying) networks() (networks []netip.Prefix) {
	for _, name := range slices.Sorted(maps.Keys(p.nodes.known)) {
		n := p.nodes.known[name]
		for _, a := range n.addrs {
			networks = append(networks, netip.PrefixFrom(a, a.BitLen()))
		}
		networks = append(networks, n.pods...)
	}
	return networks
}

// groups returns, with mu held, the rules of the Services that have an address.
func (p *proxying) groups() (out []filter.Group) {
	unruled := func(n svc.Name) bool { return p.ruled[n] == nil }
	for _, n := range slices.SortedFunc(maps.Keys(p.ruled), func(a, b svc.Name) int { return strings.Compare(a.String(), b.String()) }) {
		v := p.ruled[n]
		g := filter.Group{Name: n.String(), Clients: v.clients}
		for _, in := range v.object.Status.LoadBalancer.Ingress {
			if a, err := netip.ParseAddr(in.IP); err == nil && slices.Contains(p.claims[a], n) {
				g.Listeners = append(g.Listeners, listenersAt(v.object, a)...)
				if a.Is4() && !slices.ContainsFunc(p.claims[a], unruled) {
					g.PathMTU = append(g.PathMTU, a)
				}
			}
		}
		if len(g.Listeners) == 0 {
			continue
		}
		for _, port := range v.object.Spec.Ports {
			if protocol, err := svc.ParseProtocol(string(port.Protocol)); err == nil && port.NodePort != 0 {
				g.NodePorts = append(g.NodePorts, filter.NodePort{Protocol: protocol, Port: uint16(port.NodePort)})
			}
		}
		if port := v.object.Spec.HealthCheckNodePort; port != 0 && isLocal(v.object) {
			g.HealthPorts = []uint16{uint16(port)}
		}
		out = append(out, g)
	}
	return out
}

func listenersAt(o *corev1.Service, a netip.Addr) (out []filter.Listener) {
	for _, port := range o.Spec.Ports {
		if protocol, err := svc.ParseProtocol(string(port.Protocol)); err == nil {
			out = append(out, filter.Listener{Protocol: protocol, At: netip.AddrPortFrom(a, uint16(port.Port))})
		}
	}
	return out
}
