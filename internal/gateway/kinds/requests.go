package kinds

import (
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Requests is an HTTPRoute or a GRPCRoute: one of them is set.
type Requests struct {
	HTTP *gwv1.HTTPRoute
	GRPC *gwv1.GRPCRoute
}

// Object is the route.
func (r Requests) Object() metav1.Object {
	if r.GRPC != nil {
		return r.GRPC
	}
	return r.HTTP
}

// Kind is that of the route.
func (r Requests) Kind() gwv1.Kind {
	if r.GRPC != nil {
		return GRPCRoute
	}
	return HTTPRoute
}

// Name is that of the route.
func (r Requests) Name() svc.Name { return svc.NameOf(r.Object()) }

// Key names the route, with its kind.
func (r Requests) Key() Route { return Route{Kind: r.Kind(), Name: r.Name()} }

// Age is what decides between routes that are alike.
func (r Requests) Age() Object {
	return Object{Kind: string(r.Kind()), Created: r.Object().GetCreationTimestamp().Time, Name: r.Name()}
}

// Parents are what the route names as its parents.
func (r Requests) Parents() []gwv1.ParentReference {
	if r.GRPC != nil {
		return r.GRPC.Spec.ParentRefs
	}
	return r.HTTP.Spec.ParentRefs
}

// Hostnames are the ones of the route.
func (r Requests) Hostnames() []gwv1.Hostname {
	if r.GRPC != nil {
		return r.GRPC.Spec.Hostnames
	}
	return r.HTTP.Spec.Hostnames
}

// SameSpec reports whether two of a kind are the same but for status and metadata. Read by another definition of its kind, an object of
// the same generation has other fields.
func (r Requests) SameSpec(o Requests) bool {
	a, b := r.Object(), o.Object()
	if r == o || a.GetUID() != b.GetUID() || a.GetGeneration() != b.GetGeneration() {
		return r == o
	}
	return r.HTTP != nil && reflect.DeepEqual(&r.HTTP.Spec, &o.HTTP.Spec) || r.GRPC != nil && reflect.DeepEqual(&r.GRPC.Spec, &o.GRPC.Spec)
}

// Grant returns what a ReferenceGrant has to name for the route.
func (r Requests) Grant() gwv1.ReferenceGrantFrom { return From(r.Kind(), r.Name().Namespace) }

// Services returns the Services that the rules name.
func (r Requests) Services() (out []svc.Name) {
	namespace := gwv1.Namespace(r.Name().Namespace)
	add := func(ref *gwv1.BackendObjectReference) {
		out = append(out, svc.Name{Namespace: string(namespaceOf(ref, namespace)), Name: string(ref.Name)})
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
	rules := r.Rules()
	for i := range rules {
		asked(rules[i].Filters)
		for j := range rules[i].BackendRefs {
			add(&rules[i].BackendRefs[j].BackendObjectReference)
			asked(rules[i].BackendRefs[j].Filters)
		}
	}
	return out
}

// Rules returns the rules, of a GRPCRoute without their matches: filters and backends have the same form, and the same fields.
func (r Requests) Rules() []gwv1.HTTPRouteRule {
	if r.GRPC == nil {
		return r.HTTP.Spec.Rules
	}
	return RulesOfGRPC(r.GRPC)
}

func namespaceOf(ref *gwv1.BackendObjectReference, own gwv1.Namespace) gwv1.Namespace {
	if ref.Namespace != nil {
		return *ref.Namespace
	}
	return own
}

// SortByAge puts the older routes first.
func SortByAge(routes []Requests) {
	ages := make(map[Requests]Object, len(routes))
	for _, r := range routes {
		ages[r] = r.Age()
	}
	slices.SortFunc(routes, func(a, b Requests) int { return ages[a].Compare(ages[b]) })
}
