package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// build returns what the server is to do for a Service, nil if that is not known yet.
func (p *proxying) build(n svc.Name, v *proxiedService) *proxied.Service {
	if v.spec == nil || !v.listed || needsNodes(v.spec) && !p.nodes.listed {
		return nil
	}
	s := &proxied.Service{
		Name: n, Spec: *v.spec, Backends: map[uint16][]netip.AddrPort{}, Weights: map[netip.AddrPort]int{}, Key: string(v.object.UID),
	}
	for _, name := range v.spec.Certificates {
		t := p.secrets[svc.Name{Namespace: n.Namespace, Name: name}]
		if t == nil || t.cert == nil {
			if t != nil && t.problem != "" {
				p.fail(v, fmt.Sprintf("cannot use the TLS Secret %s: %s", name, t.problem))
			}
			return nil
		}
		s.Certificates = append(s.Certificates, *t.cert)
	}
	for _, in := range v.object.Status.LoadBalancer.Ingress {
		if a, ok := ingressAddr(&in); ok && slices.Contains(p.claims[a], n) {
			s.Addrs = append(s.Addrs, a)
		}
	}
	family := familiesOf(v.object)[0]
	for i := range v.object.Spec.Ports {
		port := &v.object.Spec.Ports[i]
		var list []netip.AddrPort
		for _, b := range p.backends(v, port.Name, family) {
			list = append(list, b.addr)
			if w := p.weight(v, &b); w != 1 {
				s.Weights[b.addr] = w
			}
		}
		s.Backends[uint16(port.Port)] = list
	}
	return s
}

// backend is an endpoint.
type backend struct {
	addr   netip.AddrPort
	node   string // empty if it is unknown
	weight string // of its EndpointSlice, empty if that has none
}

// WeightAnnotation of an EndpointSlice is the weight of its endpoints in the proxied way.
const WeightAnnotation = "fairlead.dev/lb-weight"

// maxWeight is the largest weight.
const maxWeight = 256

// weight returns the share of connections that an endpoint is to have: that of its EndpointSlice times that of its
// Node. What is no weight counts as 1.
func (p *proxying) weight(v *proxiedService, b *backend) int {
	parse := func(text string) int {
		if n, err := strconv.Atoi(text); err == nil && n >= 0 && n <= maxWeight {
			return n
		}
		return 1
	}
	w := parse(b.weight)
	if l := v.spec.WeightLabel; l != "" {
		if n := p.nodes.known[b.node]; n != nil {
			w *= parse(n.labels[l])
		}
	}
	return w
}

// backends returns the endpoints of a port that get connections at this node.
func (p *proxying) backends(v *proxiedService, port string, family svc.Family) []backend {
	is := func(want string) func(*string) bool { return func(s *string) bool { return s != nil && *s == want } }
	if v.object.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		if out := v.endpoints(port, family, func(e *discoveryv1.Endpoint) bool { return is(p.node)(e.NodeName) }); len(out) > 0 {
			return out
		}
		// No other machine's connections come here: those of this node and its Pods may go anywhere, as
		// those to a cluster IP.
	}
	if !v.spec.CrossZone && p.zone != "" {
		if out := v.endpoints(port, family, func(e *discoveryv1.Endpoint) bool { return is(p.zone)(e.Zone) }); len(out) > 0 {
			return out
		}
	}
	return v.endpoints(port, family, func(*discoveryv1.Endpoint) bool { return true })
}

// endpoints returns the ready endpoints of a port that are of a family, and for which ok returns true.
func (v *proxiedService) endpoints(port string, family svc.Family, ok func(*discoveryv1.Endpoint) bool) (out []backend) {
	for _, slice := range v.slices {
		for _, p := range slice.Ports {
			if p.Name == nil || *p.Name != port || p.Port == nil {
				continue
			}
			for i := range slice.Endpoints {
				e := &slice.Endpoints[i]
				if e.Conditions.Ready != nil && !*e.Conditions.Ready || !ok(e) || len(e.Addresses) == 0 {
					continue
				}
				if a, err := netip.ParseAddr(e.Addresses[0]); err == nil && svc.FamilyOf(a) == family {
					b := backend{addr: netip.AddrPortFrom(a, uint16(*p.Port)), weight: slice.Annotations[WeightAnnotation]}
					if e.NodeName != nil {
						b.node = *e.NodeName
					}
					out = append(out, b)
				}
			}
		}
	}
	return out
}
