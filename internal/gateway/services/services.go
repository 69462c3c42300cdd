// Package services is what routes ask of Services.
package services

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Service is what routes ask of a Service.
type Service struct {
	Ports []Port
	// External is true for type ExternalName, which no route leads to: it could name any address.
	External bool
	// ClusterIPs are empty for a headless Service, and for type ExternalName.
	ClusterIPs []netip.Addr
	// Local is true if clients within the cluster get only endpoints of their own node (internalTrafficPolicy).
	Local bool
	UID   string
}

// Port is a port of TCP or UDP of a Service.
type Port struct {
	Name     string
	Number   uint16
	Protocol string // appProtocol
	UDP      bool
}

// Find returns a port of a Service, nil if it has none of that number and transport.
func (s *Service) Find(number int32, udp bool) *Port {
	for i := range s.Ports {
		if int32(s.Ports[i].Number) == number && s.Ports[i].UDP == udp {
			return &s.Ports[i]
		}
	}
	return nil
}

// First returns the number of the first port of TCP, 0 without one. It may be called for nil.
func (s *Service) First() int32 {
	if s == nil {
		return 0
	}
	for _, p := range s.Ports {
		if !p.UDP {
			return int32(p.Number)
		}
	}
	return 0
}

// Of returns what routes ask of a Service.
func Of(s *corev1.Service) *Service {
	out := &Service{
		External: s.Spec.Type == corev1.ServiceTypeExternalName, UID: string(s.UID),
	}
	if p := s.Spec.InternalTrafficPolicy; p != nil {
		out.Local = *p == corev1.ServiceInternalTrafficPolicyLocal
	}
	for _, text := range s.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil && !out.External { // not "None"
			out.ClusterIPs = append(out.ClusterIPs, a.Unmap())
		}
	}
	for _, p := range s.Spec.Ports {
		if udp := p.Protocol == corev1.ProtocolUDP; udp || p.Protocol == corev1.ProtocolTCP || p.Protocol == "" {
			port := Port{Name: p.Name, Number: uint16(p.Port), UDP: udp} //nolint:gosec // validated
			if p.AppProtocol != nil {
				port.Protocol = *p.AppProtocol
			}
			out.Ports = append(out.Ports, port)
		}
	}
	return out
}

// Equal reports whether routes find the same in two Services.
func (s *Service) Equal(o *Service) bool {
	return s.External == o.External && s.Local == o.Local && s.UID == o.UID && slices.Equal(s.Ports, o.Ports) &&
		slices.Equal(s.ClusterIPs, o.ClusterIPs)
}

// IsTLSByName reports whether a port without an appProtocol is of TLS by its name.
func (p *Port) IsTLSByName() bool {
	return p.Protocol == "" && (strings.HasPrefix(p.Name, "https") || strings.HasPrefix(p.Name, "tls"))
}

// IsHTTP reports whether a port is of HTTP by its appProtocol or, without one, by its name: it has none, or begins with that of
// the protocol. A route that names no port must not take a port of another protocol.
func (p *Port) IsHTTP() bool {
	switch p.Protocol {
	case "":
		first, _, _ := strings.Cut(p.Name, "-")
		return slices.Contains([]string{"", "http", "http2", "h2c", "grpc", "web"}, first)
	case "http", "http2", "grpc", "kubernetes.io/h2c", "kubernetes.io/ws":
		return true
	}
	return false
}
