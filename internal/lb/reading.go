package lb

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
)

// Read returns what a Service asks of its load balancer.
func Read(s *corev1.Service) *dialect.Reading {
	d := dialect.Service{
		Annotations: s.Annotations, LoadBalancerIP: s.Spec.LoadBalancerIP, SourceRanges: s.Spec.LoadBalancerSourceRanges,
		ClientIP: s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP,
	}
	for _, p := range s.Spec.Ports {
		d.Ports = append(d.Ports, dialect.Port{Name: p.Name, Number: uint16(p.Port), Protocol: string(p.Protocol)})
	}
	return dialect.Read(d)
}
