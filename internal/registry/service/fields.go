package service

import (
	"cmp"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
)

// externallyAccessible reports whether traffic from outside may be addressed to
// svc.
func externallyAccessible(svc *corev1.Service) bool {
	switch svc.Spec.Type {
	case corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeClusterIP:
		return len(svc.Spec.ExternalIPs) > 0
	}
	return false
}

// isSelectorlessHeadless is the one case that may have families which the
// cluster does not.
func isSelectorlessHeadless(svc *corev1.Service) bool {
	return svc.Spec.ClusterIP == corev1.ClusterIPNone && len(svc.Spec.Selector) == 0
}

func familyPolicy(svc *corev1.Service) corev1.IPFamilyPolicy {
	if svc.Spec.IPFamilyPolicy == nil {
		return ""
	}
	return *svc.Spec.IPFamilyPolicy
}

func otherFamily(f corev1.IPFamily) corev1.IPFamily {
	if f == corev1.IPv4Protocol {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// familyOf is the family of an address in any spelling that was ever accepted.
func familyOf(ip string) corev1.IPFamily {
	if netutils.IsIPv6String(ip) {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

func sameClusterIPs(a, b *corev1.Service) bool {
	return a.Spec.ClusterIP == b.Spec.ClusterIP && slices.Equal(a.Spec.ClusterIPs, b.Spec.ClusterIPs)
}

func samePtr[T comparable](a, b *T) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// keepAllocated gives cur what prev has and cur left out, so that applying the
// manifest that a Service was made from changes nothing.
func keepAllocated(cur, prev *corev1.Service) {
	if allocator.NeedsClusterIP(prev) && allocator.NeedsClusterIP(cur) {
		if cur.Spec.ClusterIP == "" {
			cur.Spec.ClusterIP = prev.Spec.ClusterIP
		}
		if len(cur.Spec.ClusterIPs) == 0 && len(prev.Spec.ClusterIPs) > 0 {
			cur.Spec.ClusterIPs = slices.Clone(prev.Spec.ClusterIPs)
		}
	}
	if allocator.AllocatesNodePorts(prev) && allocator.AllocatesNodePorts(cur) {
		keepNodePorts(cur, prev)
	}
	if allocator.NeedsHealthCheckPort(prev) && allocator.NeedsHealthCheckPort(cur) && cur.Spec.HealthCheckNodePort == 0 {
		cur.Spec.HealthCheckNodePort = prev.Spec.HealthCheckNodePort
	}
}

// keepNodePorts finds the port that a node port belonged to by its name, and
// skips node ports that cur gives to another port.
func keepNodePorts(cur, prev *corev1.Service) {
	taken := allocator.NodePorts(cur)
	byName := map[string]int32{}
	for _, p := range prev.Spec.Ports {
		byName[p.Name] = p.NodePort
	}
	for i := range cur.Spec.Ports {
		p := &cur.Spec.Ports[i]
		if p.NodePort == 0 && !taken[byName[p.Name]] {
			p.NodePort = byName[p.Name]
		}
	}
}

// linkClusterIPs makes clusterIP and clusterIPs agree where the writer set only
// one of them. A writer either knows only clusterIP, or sets both. prev is nil
// on create.
func linkClusterIPs(cur, prev *corev1.Service) {
	if prev == nil {
		if cur.Spec.ClusterIP != "" && len(cur.Spec.ClusterIPs) == 0 {
			cur.Spec.ClusterIPs = []string{cur.Spec.ClusterIP}
		}
		return
	}
	if prev.Spec.ClusterIP == cur.Spec.ClusterIP {
		if len(cur.Spec.ClusterIPs) == 0 {
			cur.Spec.ClusterIPs = slices.Clone(prev.Spec.ClusterIPs)
		}
		return
	}
	if !slices.Equal(prev.Spec.ClusterIPs, cur.Spec.ClusterIPs) {
		return // both were changed: validation decides
	}
	if cur.Spec.ClusterIP == "" {
		cur.Spec.ClusterIPs = nil
	} else {
		cur.Spec.ClusterIPs = []string{cur.Spec.ClusterIP}
	}
}

// dropForType clears the fields that have no meaning for the type cur changes
// to, where they are as they were: what the writer did not touch must not be
// rejected. A field that was changed too stays and is left to validation.
func dropForType(cur, prev *corev1.Service) {
	if allocator.NeedsClusterIP(prev) && !allocator.NeedsClusterIP(cur) {
		if sameClusterIPs(cur, prev) {
			cur.Spec.ClusterIP, cur.Spec.ClusterIPs = "", nil
		}
		if reflect.DeepEqual(cur.Spec.IPFamilies, prev.Spec.IPFamilies) {
			cur.Spec.IPFamilies = nil
		}
		if samePtr(cur.Spec.IPFamilyPolicy, prev.Spec.IPFamilyPolicy) {
			cur.Spec.IPFamilyPolicy = nil
		}
	}
	if allocator.NeedsNodePort(prev) && !allocator.NeedsNodePort(cur) && hasNoNewNodePort(cur, prev) {
		for i := range cur.Spec.Ports {
			cur.Spec.Ports[i].NodePort = 0
		}
	}
	if allocator.NeedsHealthCheckPort(prev) && !allocator.NeedsHealthCheckPort(cur) &&
		cur.Spec.HealthCheckNodePort == prev.Spec.HealthCheckNodePort {
		cur.Spec.HealthCheckNodePort = 0
	}
	wasLB, isLB := prev.Spec.Type == corev1.ServiceTypeLoadBalancer, cur.Spec.Type == corev1.ServiceTypeLoadBalancer
	if wasLB && !isLB {
		if samePtr(cur.Spec.AllocateLoadBalancerNodePorts, prev.Spec.AllocateLoadBalancerNodePorts) {
			cur.Spec.AllocateLoadBalancerNodePorts = nil
		}
		if samePtr(cur.Spec.LoadBalancerClass, prev.Spec.LoadBalancerClass) {
			cur.Spec.LoadBalancerClass = nil
		}
	}
	if externallyAccessible(prev) && !externallyAccessible(cur) &&
		cur.Spec.ExternalTrafficPolicy == prev.Spec.ExternalTrafficPolicy {
		cur.Spec.ExternalTrafficPolicy = ""
	}
	if !isLB {
		// The load balancer goes away later; the user need not see that.
		cur.Status.LoadBalancer = corev1.LoadBalancerStatus{}
	}
}

func hasNoNewNodePort(cur, prev *corev1.Service) bool {
	old := allocator.NodePorts(prev)
	for p := range allocator.NodePorts(cur) {
		if !old[p] {
			return false
		}
	}
	return true
}

func sorted[T cmp.Ordered](v ...T) []T {
	slices.Sort(v)
	return v
}

// notIn returns NotSupported unless v is one of allowed.
func notIn[T ~string](path *field.Path, v T, allowed ...T) field.ErrorList {
	if slices.Contains(allowed, v) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, v, sorted(allowed...))}
}
