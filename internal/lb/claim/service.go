package claim

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/svc"
)

// Read returns what a Service asks of its load balancer.
func Read(s *corev1.Service) *dialect.Reading {
	d := dialect.Service{
		Annotations: s.Annotations, LoadBalancerIP: s.Spec.LoadBalancerIP, SourceRanges: s.Spec.LoadBalancerSourceRanges,
		ClientIP: s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP,
	}
	for _, p := range s.Spec.Ports {
		port := dialect.Port{Name: p.Name, Number: uint16(p.Port), Protocol: string(p.Protocol)}
		if p.AppProtocol != nil {
			port.AppProtocol = *p.AppProtocol
		}
		d.Ports = append(d.Ports, port)
	}
	return dialect.Read(d)
}

// Ingress returns the address of an item of status.loadBalancer.ingress. ok is false if it has none.
func Ingress(i *corev1.LoadBalancerIngress) (addr netip.Addr, ok bool) {
	a, err := netip.ParseAddr(i.IP)
	return a.Unmap(), err == nil
}

// Families returns the families of a Service's addresses, the preferred one first.
func Families(s *corev1.Service) []svc.Family {
	var out []svc.Family
	for _, f := range s.Spec.IPFamilies {
		if f == corev1.IPv6Protocol {
			out = append(out, svc.IPv6)
		} else {
			out = append(out, svc.IPv4)
		}
	}
	if len(out) == 0 {
		out = append(out, svc.IPv4)
	}
	return out
}

// IsLocal reports whether only nodes with an endpoint of the Service may get its connections.
func IsLocal(s *corev1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}
