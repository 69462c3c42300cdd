package gateway

import (
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// routeReasonHostnameConflict is why a route is not accepted beside an older one of the other kind. The specification asks for
// the condition and names no reason.
const routeReasonHostnameConflict gwv1.RouteConditionReason = "HostnameConflict"

// requests is an HTTPRoute or a GRPCRoute: one of them is set.
type requests struct {
	http *gwv1.HTTPRoute
	grpc *gwv1.GRPCRoute
}

func (r requests) object() metav1.Object {
	if r.grpc != nil {
		return r.grpc
	}
	return r.http
}

func (r requests) kind() gwv1.Kind {
	if r.grpc != nil {
		return kinds.GRPCRoute
	}
	return kinds.HTTPRoute
}

func (r requests) name() svc.Name { return svc.NameOf(r.object()) }

func (r requests) key() kinds.Route { return kinds.Route{Kind: r.kind(), Name: r.name()} }

// age is what decides between routes that are alike.
func (r requests) age() kinds.Object {
	return kinds.Object{Kind: string(r.kind()), Created: r.object().GetCreationTimestamp().Time, Name: r.name()}
}

func (r requests) parents() []gwv1.ParentReference {
	if r.grpc != nil {
		return r.grpc.Spec.ParentRefs
	}
	return r.http.Spec.ParentRefs
}

func (r requests) hostnames() []gwv1.Hostname {
	if r.grpc != nil {
		return r.grpc.Spec.Hostnames
	}
	return r.http.Spec.Hostnames
}

// protocol is the one of backends whose port names none.
func (r requests) protocol() BackendProtocol {
	if r.grpc != nil {
		return H2C
	}
	return HTTP1
}

// sameSpec reports whether two of a kind are the same but for status and metadata. Read by another definition of its kind, an object of
// the same generation has other fields.
func (r requests) sameSpec(o requests) bool {
	a, b := r.object(), o.object()
	if r == o || a.GetUID() != b.GetUID() || a.GetGeneration() != b.GetGeneration() {
		return r == o
	}
	return r.http != nil && reflect.DeepEqual(&r.http.Spec, &o.http.Spec) || r.grpc != nil && reflect.DeepEqual(&r.grpc.Spec, &o.grpc.Spec)
}

func (r requests) grant() gwv1.ReferenceGrantFrom { return kinds.From(r.kind(), r.name().Namespace) }

// services returns the Services that the rules name.
func (r requests) services() (out []svc.Name) {
	namespace := gwv1.Namespace(r.name().Namespace)
	add := func(ref *gwv1.BackendObjectReference) {
		out = append(out, svc.Name{Namespace: string(valueOf(ref.Namespace, namespace)), Name: string(ref.Name)})
	}
	asked := func(filters []gwv1.HTTPRouteFilter) {
		for i := range filters {
			if m := filters[i].RequestMirror; m != nil {
				add(&m.BackendRef)
			}
			if a := filters[i].ExternalAuth; a != nil {
				add(&a.BackendRef)
			}
		}
	}
	rules := r.rules()
	for i := range rules {
		asked(rules[i].Filters)
		for j := range rules[i].BackendRefs {
			add(&rules[i].BackendRefs[j].BackendObjectReference)
			asked(rules[i].BackendRefs[j].Filters)
		}
	}
	return out
}

// rules returns the rules, of a GRPCRoute without their matches: filters and backends have the same form, and the same fields.
func (r requests) rules() []gwv1.HTTPRouteRule {
	if r.grpc == nil {
		return r.http.Spec.Rules
	}
	return kinds.RulesOfGRPC(r.grpc)
}

// requests returns the HTTPRoutes and GRPCRoutes that name the Gateway: the older ones first, which decides if both kinds want
// a hostname.
func (f *Front) requests(o *Objects) (out []requests) {
	for n, r := range o.Routes {
		if f.isNamed(r.Spec.ParentRefs, n.Namespace) {
			out = append(out, requests{http: r})
		}
	}
	for n, r := range o.Calls {
		if f.isNamed(r.Spec.ParentRefs, n.Namespace) {
			out = append(out, requests{grpc: r})
		}
	}
	sortByAge(out)
	return out
}

// sortByAge puts the older routes first.
func sortByAge(routes []requests) {
	ages := make(map[requests]kinds.Object, len(routes))
	for _, r := range routes {
		ages[r] = r.age()
	}
	slices.SortFunc(routes, func(a, b requests) int { return ages[a].Compare(ages[b]) })
}

// take notes that a route of a kind has a host of the listener.
func (l *listener) take(kind gwv1.Kind, host string) {
	p := l.taken[kind]
	if p == nil {
		p = hostpath.NewPatterns()
		l.taken[kind] = p
	}
	p.Add(host)
}

// isTaken reports whether a route of the other kind, of HTTPRoute and GRPCRoute, has a host of the listener.
func (l *listener) isTaken(kind gwv1.Kind, host string) bool {
	for other, p := range l.taken {
		if other != kind && p.Meets(host) {
			return true
		}
	}
	return false
}
