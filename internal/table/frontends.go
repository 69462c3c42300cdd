package table

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// labelProxyName names another proxy that takes care of a Service.
const labelProxyName = "service.kubernetes.io/service-proxy-name"

// want is one frontend that a Service asks for, before it is known whether it
// gets it.
type want struct {
	key  Key
	kind FrontendKind
	at   svc.Frontend
}

// skipLabels reports that an object is not for this proxy: another one has it, or
// it belongs to a headless Service. kube-proxy's watches leave out the same.
func skipLabels(labels map[string]string) bool {
	_, other := labels[labelProxyName]
	_, headless := labels[corev1.IsHeadlessService]
	return other || headless
}

// proxied reports whether a Service has virtual addresses that are this proxy's to
// serve (behaviours 32, 79, 88).
func proxied(s *corev1.Service) bool {
	return s != nil && s.Spec.Type != corev1.ServiceTypeExternalName &&
		s.Spec.ClusterIP != corev1.ClusterIPNone && s.Spec.ClusterIP != "" && !skipLabels(s.Labels)
}

// clusterIPs returns the cluster IPs, one a family at most.
func clusterIPs(s *corev1.Service, c *complaints) []netip.Addr {
	texts := s.Spec.ClusterIPs
	if len(texts) == 0 {
		texts = []string{s.Spec.ClusterIP}
	}
	return firstOfEachFamily(parseAddrs(texts, "spec.clusterIPs", c))
}

func parseAddrs(texts []string, field string, c *complaints) []netip.Addr {
	var out []netip.Addr
	for _, text := range texts {
		a, err := netip.ParseAddr(text)
		if err != nil || a.IsUnspecified() {
			c.add(ReasonInvalidAddress, "%s: %q is not an address to serve", field, text)
			continue
		}
		out = append(out, a.Unmap())
	}
	return out
}

// loadBalancerIPs returns the ingress addresses that a node must serve: those
// with ipMode VIP, which is also the default. Host names and addresses that a
// proxying load balancer answers itself are not among them.
func loadBalancerIPs(s *corev1.Service, c *complaints) []netip.Addr {
	var texts []string
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IP != "" && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP) {
			texts = append(texts, in.IP)
		}
	}
	return parseAddrs(texts, "status.loadBalancer.ingress", c)
}

// wants returns the frontends a proxied Service asks for, per key in the order
// of kind and address, no frontend twice. An address that is listed both as
// external and as load balancer IP counts as the latter, whose source ranges
// protect it.
func wants(s *corev1.Service, c *complaints) []want {
	cluster := clusterIPs(s, c)
	load := loadBalancerIPs(s, c)
	external := parseAddrs(s.Spec.ExternalIPs, "spec.externalIPs", c)
	var out []want
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		proto, err := svc.ParseProtocol(string(p.Protocol))
		if err != nil || p.Port < 1 || p.Port > 65535 || p.NodePort < 0 || p.NodePort > 65535 {
			c.add(ReasonInvalidPort, "spec.ports[%d]: port %d, nodePort %d, protocol %q", i, p.Port, p.NodePort, p.Protocol)
			continue
		}
		if slices.ContainsFunc(s.Spec.Ports[:i], func(o corev1.ServicePort) bool { return o.Name == p.Name }) {
			c.add(ReasonInvalidPort, "spec.ports[%d]: a port before it has the name %q, too", i, p.Name)
			continue
		}
		for _, vip := range cluster {
			w := want{key: Key{ID: svc.PortName{Name: svc.NameOf(s), Port: p.Name}, Family: svc.FamilyOf(vip)}}
			out = appendWant(out, w, ClusterIP, proto, vip, p.Port)
			for _, a := range load {
				out = appendWant(out, w, LoadBalancerIP, proto, a, p.Port)
			}
			for _, a := range external {
				out = appendWant(out, w, ExternalIP, proto, a, p.Port)
			}
			if p.NodePort != 0 {
				out = appendWant(out, w, NodePort, proto, anyAddr(w.key.Family), p.NodePort)
			}
		}
	}
	slices.SortStableFunc(out, func(a, b want) int {
		if c := a.key.ID.Compare(b.key.ID); c != 0 {
			return c
		}
		if a.key.Family != b.key.Family {
			return int(a.key.Family) - int(b.key.Family)
		}
		if a.kind != b.kind {
			return int(a.kind) - int(b.kind)
		}
		return a.at.Compare(b.at)
	})
	return out
}

func appendWant(out []want, w want, kind FrontendKind, proto svc.Protocol, a netip.Addr, port int32) []want {
	if svc.FamilyOf(a) != w.key.Family {
		return out
	}
	w.kind, w.at = kind, svc.Frontend{Protocol: proto, Addr: netip.AddrPortFrom(a, uint16(port))}
	if slices.ContainsFunc(out, func(o want) bool { return o.at == w.at }) {
		return out
	}
	return append(out, w)
}

func anyAddr(f svc.Family) netip.Addr {
	if f == svc.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// sourceRanges returns the clients that a Service's load balancer IPs let in,
// both families together, and whether it limits them at all. The annotation is
// the older form; the field goes before it (behaviour 101).
func sourceRanges(s *corev1.Service, c *complaints) (ranges []netip.Prefix, limited bool) {
	texts, field := s.Spec.LoadBalancerSourceRanges, "spec.loadBalancerSourceRanges"
	if old := strings.TrimSpace(s.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]); len(texts) == 0 && old != "" {
		texts, field = strings.Split(old, ","), "annotation "+corev1.AnnotationLoadBalancerSourceRangesKey
	}
	for _, text := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			c.add(ReasonInvalidSourceRange, "%s: %q is not a CIDR", field, text)
			continue
		}
		ranges = append(ranges, p.Masked())
	}
	slices.SortFunc(ranges, netip.Prefix.Compare)
	return slices.Compact(ranges), len(texts) > 0
}

// rangesFor narrows ranges to the family of the load balancer IP lb. As in
// kube-proxy, a family that no range speaks of is open, and lb itself may come
// in where this node may: a node that has lb as a local address uses it as the
// source when it calls itself. Where no element was valid no client comes in,
// as an empty list says.
func rangesFor(ranges []netip.Prefix, limited bool, lb netip.Addr, node []netip.Addr) []netip.Prefix {
	if !limited {
		return nil
	}
	if len(ranges) == 0 {
		return []netip.Prefix{}
	}
	var out []netip.Prefix
	nodeIn := false
	for _, p := range ranges {
		if p.Addr().Is4() != lb.Is4() {
			continue
		}
		out = append(out, p)
		nodeIn = nodeIn || slices.ContainsFunc(node, p.Contains)
	}
	if nodeIn {
		out = append(out, netip.PrefixFrom(lb, lb.BitLen()))
		slices.SortFunc(out, netip.Prefix.Compare)
		out = slices.Compact(out)
	}
	return out
}
