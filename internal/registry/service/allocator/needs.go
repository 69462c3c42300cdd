package allocator

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/svc"
)

// NeedsClusterIP reports whether s has the cluster IP fields; "None" counts as
// a value.
func NeedsClusterIP(s *corev1.Service) bool { return s.Spec.Type != corev1.ServiceTypeExternalName }

// IsHeadless reports whether s was requested to have no cluster IP (behaviour 79).
func IsHeadless(s *corev1.Service) bool {
	return len(s.Spec.ClusterIPs) == 1 && s.Spec.ClusterIPs[0] == corev1.ClusterIPNone
}

// NeedsNodePort reports whether the ports of s may have node ports.
func NeedsNodePort(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeNodePort || s.Spec.Type == corev1.ServiceTypeLoadBalancer
}

// NeedsHealthCheckPort reports whether s has a healthCheckNodePort (behaviour
// 103).
func NeedsHealthCheckPort(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// NodePorts returns the node ports of s that are set, each number once.
func NodePorts(s *corev1.Service) map[int32]bool {
	out := map[int32]bool{}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			out[p.NodePort] = true
		}
	}
	return out
}

// AllocatesNodePorts reports whether ports of s without a node port get one.
func AllocatesNodePorts(s *corev1.Service) bool {
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeLoadBalancer:
		a := s.Spec.AllocateLoadBalancerNodePorts
		return a == nil || *a
	}
	return false
}

// resource is a kind of name that is allocated.
type resource uint8

const (
	ipv4 resource = iota
	ipv6
	nodePort
	resources // their number
)

func ipResource(f corev1.IPFamily) resource {
	if f == corev1.IPv6Protocol {
		return ipv6
	}
	return ipv4
}

// claim is one address or port by the name of its claim, the canonical text.
type claim struct {
	resource resource
	name     string
}

// ipClaims returns the claims of cluster IPs in any spelling; "None" and ""
// have none.
func ipClaims(ips []string) []claim {
	var out []claim
	for _, ip := range ips {
		if a, ok := parseClusterIP(ip); ok {
			name := a.String()
			out = append(out, claim{ipResource(familyOf(name)), name})
		}
	}
	return out
}

func portClaim(n int32) claim { return claim{nodePort, formatPort(uint16(n))} }

// claimsOf returns everything that is claimed for s.
func claimsOf(s *corev1.Service) []claim {
	var out []claim
	if NeedsClusterIP(s) {
		out = ipClaims(s.Spec.ClusterIPs)
	}
	ports := NodePorts(s)
	if n := s.Spec.HealthCheckNodePort; n != 0 {
		ports[n] = true
	}
	for n := range ports {
		out = append(out, portClaim(n))
	}
	return out
}

// parseClusterIP reads an address in any spelling that was ever accepted, such
// as with leading zeros. It returns false for "None" and "".
func parseClusterIP(ip string) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(ip))
	return a.Unmap(), ok
}

func ownerOf(s *corev1.Service) svc.Name { return svc.Name{Namespace: s.Namespace, Name: s.Name} }
