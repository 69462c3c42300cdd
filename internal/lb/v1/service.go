package v1

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Proxied reports whether an address of a Service is published with IPMode Proxy: its
// connections end at a speaker, and nodes send their own Pods' connections there too.
func Proxied(s *corev1.Service) bool {
	return slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(in corev1.LoadBalancerIngress) bool {
		return in.IPMode != nil && *in.IPMode == corev1.LoadBalancerIPModeProxy
	})
}
