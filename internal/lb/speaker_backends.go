package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// build returns what the server is to do for a Service, nil if that is not known yet.
func (p *proxying) build(n svc.Name, v *proxiedService) *proxied.Service {
	if v.spec == nil || !v.listed || needsNodes(v.spec) && !p.nodes.listed {
		return nil
	}
	s := &proxied.Service{
		Name: n, Spec: *v.spec, Backends: map[uint16][]netip.AddrPort{}, Datagrams: map[uint16][]netip.AddrPort{},
		Weights: map[netip.AddrPort]int{}, Key: string(v.object.UID),
	}
	for _, name := range v.spec.TLSSecrets() {
		t := p.secrets[secretKey{svc.Name{Namespace: n.Namespace, Name: name}, forTLS}]
		if t == nil || t.cert == nil {
			if t != nil && t.problem != "" {
				p.fail(v, fmt.Sprintf("cannot use the TLS Secret %s: %s", name, t.problem))
			}
			return nil
		}
		if slices.Contains(v.spec.Certificates, name) {
			cert := *t.cert
			if t.staple.valid(time.Now()) {
				cert.OCSPStaple = t.staple.der
			}
			s.Certificates = append(s.Certificates, cert)
			if name == v.spec.Certificates[0] && len(v.spec.ACMEHosts) > 0 {
				s.Challenges = t.challenges
			}
		}
		if name == v.spec.BackendTLS.Certificate {
			s.PodCertificate = t.cert
		}
	}
	if text := v.spec.BackendTLS.Authority; text != "" {
		a := p.roots[objectName{n.Namespace, text}]
		if a == nil || a.pool == nil { // connections to Pods that cannot be verified are not made
			if a != nil && a.problem != "" {
				p.fail(v, fmt.Sprintf("cannot verify Pods by %s: %s", text, a.problem))
			}
			return nil
		}
		s.PodRoots = a.pool
	}
	for _, in := range v.object.Status.LoadBalancer.Ingress {
		if a, ok := ingressAddr(&in); ok && slices.Contains(p.claims[a], n) {
			s.Addrs = append(s.Addrs, a)
		}
	}
	family := familiesOf(v.object)[0]
	for i := range v.object.Spec.Ports {
		port := &v.object.Spec.Ports[i]
		list := p.backends(v, port.Name, family)
		if v.spec.NodePorts {
			if port.NodePort == 0 {
				p.fail(v, fmt.Sprintf("port %d has no node port to which connections could go", port.Port))
				return nil
			}
			list = p.nodePorts(v, port, family)
		}
		for _, b := range list {
			to := s.Backends
			if port.Protocol == corev1.ProtocolUDP {
				to = s.Datagrams
			}
			to[uint16(port.Port)] = append(to[uint16(port.Port)], b.addr)
			if w := p.weight(v, &b); w != 1 {
				s.Weights[b.addr] = w
			}
		}
	}
	if h := &s.Spec.Health; v.spec.NodePorts && isLocal(v.object) && h.Protocol == dialect.TCP && h.Port == 0 {
		// It tells whether a Pod is there (behaviour 103), which nothing does at a node port that rejects.
		if n := v.object.Spec.HealthCheckNodePort; n != 0 {
			h.Protocol, h.Port, h.Path, h.Codes = dialect.HTTP, uint16(n), "/healthz", "200"
		}
	}
	return s
}

func isLocal(o *corev1.Service) bool {
	return o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// backend is an endpoint, or a node port.
type backend struct {
	addr   netip.AddrPort
	node   string // empty if it is unknown
	weight string // of its EndpointSlice, or the number of the node's Pods; empty for 1
}

// WeightAnnotation of an EndpointSlice is the weight of its endpoints in the proxied way, in
// place of svc.WeightAnnotation.
const WeightAnnotation = "fairlead.dev/lb-weight"

// weight returns the share of connections that an endpoint is to have: that of its EndpointSlice times that of its
// Node. What is no weight counts as 1.
func (p *proxying) weight(v *proxiedService, b *backend) int {
	w, _ := svc.ParseWeight(b.weight)
	if l := v.spec.WeightLabel; l != "" {
		if n := p.nodes.known[b.node]; n != nil {
			size, _ := svc.ParseWeight(n.labels[l])
			w *= size
		}
	}
	return w
}

// nodePorts returns the node ports that get connections to a port, as the clouds' controllers choose them: those of all nodes
// that are selected; with policy Local, or where it is asked for, of those with a ready Pod, and with policy Local each by how
// many it has, since its proxy goes on to these alone (behaviours 142, 149, 179, 181 to 183).
func (p *proxying) nodePorts(v *proxiedService, port *corev1.ServicePort, family svc.Family) (out []backend) {
	pods := map[string]int{}
	for _, e := range v.endpoints(port.Name, family, func(*discoveryv1.Endpoint) bool { return true }) {
		pods[e.node]++
	}
	nearby := false
	for name, n := range p.nodes.known {
		_, excluded := n.labels[corev1.LabelNodeExcludeBalancers]
		if excluded || !p.selected(v, name) || n.cordoned && v.spec.SkipCordoned ||
			pods[name] == 0 && (isLocal(v.object) || v.spec.OnlyNodesWithPod) {
			continue
		}
		i := slices.IndexFunc(n.addrs, func(a netip.Addr) bool { return svc.FamilyOf(a) == family })
		if i < 0 {
			continue
		}
		b := backend{addr: netip.AddrPortFrom(n.addrs[i], uint16(port.NodePort)), node: name}
		if isLocal(v.object) {
			b.weight = strconv.Itoa(min(pods[name], svc.MaxWeight))
		}
		nearby = nearby || n.labels[corev1.LabelTopologyZone] == p.zone
		out = append(out, b)
	}
	if !v.spec.CrossZone && p.zone != "" && nearby {
		out = slices.DeleteFunc(out, func(b backend) bool { return p.nodes.known[b.node].labels[corev1.LabelTopologyZone] != p.zone })
	}
	return out
}

// selected reports whether a node is one of those that a Service selects.
func (p *proxying) selected(v *proxiedService, name string) bool {
	if v.spec.BackendNodes == "" {
		return true
	}
	n, selector := p.nodes.known[name], v.selector
	return n != nil && selector != nil && selector.Matches(labels.Set(n.labels))
}

// backends returns the endpoints of a port that get connections at this node.
func (p *proxying) backends(v *proxiedService, port string, family svc.Family) []backend {
	is := func(want string) func(*string) bool { return func(s *string) bool { return s != nil && *s == want } }
	chosen := func(ok func(*discoveryv1.Endpoint) bool) []backend {
		return v.endpoints(port, family, func(e *discoveryv1.Endpoint) bool {
			return ok(e) && (v.spec.BackendNodes == "" || e.NodeName != nil && p.selected(v, *e.NodeName))
		})
	}
	if isLocal(v.object) {
		if out := chosen(func(e *discoveryv1.Endpoint) bool { return is(p.node)(e.NodeName) }); len(out) > 0 {
			return out
		}
		// No other machine's connections come here: those of this node and its Pods may go anywhere, as
		// those to a cluster IP.
	}
	if !v.spec.CrossZone && p.zone != "" {
		if out := chosen(func(e *discoveryv1.Endpoint) bool { return is(p.zone)(e.Zone) }); len(out) > 0 {
			return out
		}
	}
	return chosen(func(*discoveryv1.Endpoint) bool { return true })
}

// endpoints returns the ready endpoints of a port that are of a family, and for which ok returns true.
func (v *proxiedService) endpoints(port string, family svc.Family, ok func(*discoveryv1.Endpoint) bool) (out []backend) {
	for _, slice := range v.slices {
		weight := cmp.Or(slice.Annotations[WeightAnnotation], slice.Annotations[svc.WeightAnnotation])
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
					b := backend{addr: netip.AddrPortFrom(a, uint16(*p.Port)), weight: weight}
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
