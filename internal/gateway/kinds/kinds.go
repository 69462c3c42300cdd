// Package kinds names the routes of all kinds of the Gateway API, and reads the ones of connections and of datagrams.
package kinds

import (
	"cmp"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// The kinds of routes: the first two are of requests, the others of connections and of datagrams.
const (
	HTTPRoute gwv1.Kind = "HTTPRoute"
	GRPCRoute gwv1.Kind = "GRPCRoute"
	TLSRoute  gwv1.Kind = "TLSRoute"
	TCPRoute  gwv1.Kind = "TCPRoute"
	UDPRoute  gwv1.Kind = "UDPRoute"
)

// Route names a route of any kind.
type Route struct {
	Kind gwv1.Kind
	svc.Name
}

// Compare orders routes by kind, namespace and name.
func (r Route) Compare(o Route) int {
	return cmp.Or(cmp.Compare(r.Kind, o.Kind), r.Name.Compare(o.Name))
}

// Object names the route or Ingress that a rule is of. Age and name decide between rules that are alike.
type Object struct {
	Kind    string
	Created time.Time
	svc.Name
}

// Compare puts the older one first, and then the one whose name comes first.
func (o Object) Compare(p Object) int {
	return cmp.Or(o.Created.Compare(p.Created), o.Name.Compare(p.Name), cmp.Compare(o.Kind, p.Kind))
}

// Stream is a TLSRoute, a TCPRoute or a UDPRoute: whole connections, or the datagrams of a client, go to one backend.
type Stream struct {
	Kind    gwv1.Kind
	Object  metav1.Object // as it was read, with its status
	Parents []gwv1.ParentReference
	// Hostnames are of a TLSRoute.
	Hostnames []gwv1.Hostname
	Backends  []gwv1.BackendRef
	// Status is what the object has.
	Status []gwv1.RouteParentStatus
}

// Route names the route.
func (s *Stream) Route() Route { return Route{s.Kind, svc.NameOf(s.Object)} }

// StreamOfTLS returns what a TLSRoute asks for. The definitions of the kinds allow one rule.
func StreamOfTLS(r *gwv1.TLSRoute) *Stream {
	s := &Stream{Kind: TLSRoute, Object: r, Parents: r.Spec.ParentRefs, Hostnames: r.Spec.Hostnames, Status: r.Status.Parents}
	if len(r.Spec.Rules) > 0 {
		s.Backends = r.Spec.Rules[0].BackendRefs
	}
	return s
}

// StreamOfTCP returns what a TCPRoute asks for.
func StreamOfTCP(r *gwv1.TCPRoute) *Stream {
	s := &Stream{Kind: TCPRoute, Object: r, Parents: r.Spec.ParentRefs, Status: r.Status.Parents}
	if len(r.Spec.Rules) > 0 {
		s.Backends = r.Spec.Rules[0].BackendRefs
	}
	return s
}

// StreamOfUDP returns what a UDPRoute asks for.
func StreamOfUDP(r *gwv1.UDPRoute) *Stream {
	s := &Stream{Kind: UDPRoute, Object: r, Parents: r.Spec.ParentRefs, Status: r.Status.Parents}
	if len(r.Spec.Rules) > 0 {
		s.Backends = r.Spec.Rules[0].BackendRefs
	}
	return s
}

// RulesOfGRPC returns the rules of a GRPCRoute as an HTTPRoute has them, without their matches: filters and backends have the same
// fields.
func RulesOfGRPC(r *gwv1.GRPCRoute) []gwv1.HTTPRouteRule {
	out := make([]gwv1.HTTPRouteRule, len(r.Spec.Rules))
	for i := range out {
		from := &r.Spec.Rules[i]
		out[i] = gwv1.HTTPRouteRule{Name: from.Name, Filters: httpFilters(from.Filters), SessionPersistence: from.SessionPersistence}
		for _, b := range from.BackendRefs {
			out[i].BackendRefs = append(out[i].BackendRefs, gwv1.HTTPBackendRef{BackendRef: b.BackendRef, Filters: httpFilters(b.Filters)})
		}
	}
	return out
}

func httpFilters(from []gwv1.GRPCRouteFilter) (out []gwv1.HTTPRouteFilter) {
	for i := range from {
		f := &from[i]
		out = append(out, gwv1.HTTPRouteFilter{
			Type: gwv1.HTTPRouteFilterType(f.Type), RequestHeaderModifier: f.RequestHeaderModifier,
			ResponseHeaderModifier: f.ResponseHeaderModifier, RequestMirror: f.RequestMirror, ExtensionRef: f.ExtensionRef,
		})
	}
	return out
}

// From returns the entry of a ReferenceGrant's from for a kind and a namespace.
func From(kind gwv1.Kind, namespace string) gwv1.ReferenceGrantFrom {
	return gwv1.ReferenceGrantFrom{Group: gwv1.GroupName, Kind: kind, Namespace: gwv1.Namespace(namespace)}
}
