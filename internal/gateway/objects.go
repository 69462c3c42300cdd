package gateway

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// Objects are what fronts are built from. The objects in it are not changed.
type Objects struct {
	// Gateways have a class of this controller.
	Gateways map[svc.Name]*gwv1.Gateway
	Routes   map[svc.Name]*gwv1.HTTPRoute
	Calls    map[svc.Name]*gwv1.GRPCRoute
	Grants   map[svc.Name]*gwv1.ReferenceGrant
	// Namespaces are the labels of the namespaces.
	Namespaces map[string]map[string]string
	Services   map[svc.Name]*Service
	Secrets    map[svc.Name]Secret
	// Ingresses have a class of this controller, and Secured have one of NginxController.
	Ingresses map[svc.Name]*networkingv1.Ingress
	Secured   map[svc.Name]bool
	// Streams are the routes of connections and of datagrams, and Sets the ListenerSets of every Gateway.
	Streams map[StreamKey]*Stream
	Sets    map[svc.Name]*gwv1.ListenerSet
	// Policies are the BackendTLSPolicies, and Authorities is why an object with authorities cannot be used, "" if it can.
	Policies    *trust.Policies
	Authorities map[trust.Ref]string
	// Meshed are the routes that name a Service as their parent, by the Service.
	Meshed map[svc.Name]map[StreamKey]bool
}

// Service is what routes ask of a Service.
type Service struct {
	Ports []ServicePort
	// External is true for type ExternalName, which no route leads to: it could name any address.
	External bool
	// ClusterIPs are empty for a headless Service, and for type ExternalName.
	ClusterIPs []netip.Addr
	// Local is true if clients within the cluster get only endpoints of their own node (internalTrafficPolicy).
	Local bool
	UID   string
}

// ServicePort is a port of TCP or UDP of a Service.
type ServicePort struct {
	Name     string
	Number   uint16
	Protocol string // appProtocol
	UDP      bool
}

// Secret is what listeners ask of a Secret.
type Secret struct {
	// Problem is why it cannot be used for TLS, "" if it can.
	Problem string
}

// permitted reports whether a ReferenceGrant lets objects of a kind and a namespace name an object of the core group.
func (o *Objects) permitted(from gwv1.ReferenceGrantFrom, kind gwv1.Kind, to svc.Name) bool {
	if string(from.Namespace) == to.Namespace {
		return true
	}
	for n, g := range o.Grants {
		if n.Namespace == to.Namespace && lets(g, from, kind, to.Name) {
			return true
		}
	}
	return false
}

// grantFor returns the first of the ReferenceGrants that permit a reference to another namespace, by name, and the zero Name
// if there is none.
func (o *Objects) grantFor(from gwv1.ReferenceGrantFrom, kind gwv1.Kind, to svc.Name) (first svc.Name) {
	for n, g := range o.Grants {
		if n.Namespace == to.Namespace && lets(g, from, kind, to.Name) && (first == svc.Name{} || n.Compare(first) < 0) {
			first = n
		}
	}
	return first
}

func lets(g *gwv1.ReferenceGrant, from gwv1.ReferenceGrantFrom, kind gwv1.Kind, name string) bool {
	return slices.Contains(g.Spec.From, from) && slices.ContainsFunc(g.Spec.To, func(t gwv1.ReferenceGrantTo) bool {
		return t.Group == corev1.GroupName && t.Kind == kind && (t.Name == nil || *t.Name == "" || string(*t.Name) == name)
	})
}

// port returns a port of a Service, nil if it has none of that number and transport.
func (s *Service) port(number int32, udp bool) *ServicePort {
	for i := range s.Ports {
		if int32(s.Ports[i].Number) == number && s.Ports[i].UDP == udp {
			return &s.Ports[i]
		}
	}
	return nil
}

// ServiceOf returns what routes ask of a Service.
func ServiceOf(s *corev1.Service) *Service {
	out := &Service{
		External: s.Spec.Type == corev1.ServiceTypeExternalName, UID: string(s.UID),
		Local: valueOf(s.Spec.InternalTrafficPolicy, "") == corev1.ServiceInternalTrafficPolicyLocal,
	}
	for _, text := range s.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil && !out.External { // not "None"
			out.ClusterIPs = append(out.ClusterIPs, a.Unmap())
		}
	}
	for _, p := range s.Spec.Ports {
		if udp := p.Protocol == corev1.ProtocolUDP; udp || p.Protocol == corev1.ProtocolTCP || p.Protocol == "" {
			out.Ports = append(out.Ports, ServicePort{p.Name, uint16(p.Port), valueOf(p.AppProtocol, ""), udp}) //nolint:gosec // validated
		}
	}
	return out
}

// Equal reports whether routes find the same in two Services.
func (s *Service) Equal(o *Service) bool {
	return s.External == o.External && s.Local == o.Local && s.UID == o.UID && slices.Equal(s.Ports, o.Ports) &&
		slices.Equal(s.ClusterIPs, o.ClusterIPs)
}
