package parents

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// route is a route of a kind.
type route struct {
	kind int
	svc.Name
}

func (r route) compare(o route) int {
	return cmp.Or(cmp.Compare(r.kind, o.kind), r.Name.Compare(o.Name))
}

// After any changes an index has the same as a look at all objects finds.
func TestIndex(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // repeatable
	name := func() svc.Name {
		return svc.Name{Namespace: fmt.Sprint("ns", random.IntN(2)), Name: fmt.Sprint("n", random.IntN(3))}
	}
	refs := func() (out []gwv1.ParentReference) {
		for range random.IntN(4) {
			n := name()
			p := gwv1.ParentReference{Name: gwv1.ObjectName(n.Name)}
			if random.IntN(2) == 0 {
				p.Namespace = new(gwv1.Namespace(n.Namespace))
			}
			if kind := gwv1.Kind([]string{"", "Gateway", "ListenerSet", "Service"}[random.IntN(4)]); kind != "" {
				p.Kind = &kind
			}
			out = append(out, p)
		}
		return out
	}
	x := NewIndex[route]()
	routes, sets := map[route][]gwv1.ParentReference{}, map[svc.Name]*gwv1.ListenerSet{}
	for range 2000 {
		if random.IntN(3) == 0 {
			n := name()
			var next *gwv1.ListenerSet
			if random.IntN(3) > 0 {
				next = &gwv1.ListenerSet{}
				next.Namespace, next.Name = n.Namespace, n.Name
				next.Spec.ParentRef.Name = gwv1.ObjectName(name().Name)
			}
			x.SetListenerSet(sets[n], next)
			if delete(sets, n); next != nil {
				sets[n] = next
			}
		} else {
			key := route{random.IntN(2), name()}
			next := refs()
			x.SetRoute(key, key.Namespace, routes[key], next)
			routes[key] = next
		}
		g := name()
		var want []route
		for key, named := range routes {
			if slices.Contains(Gateways(sets, key.Namespace, named), g) {
				want = append(want, key)
			}
		}
		var of []svc.Name
		for n, s := range sets {
			if OfSet(s) == g {
				of = append(of, n)
			}
		}
		slices.SortFunc(want, route.compare)
		slices.SortFunc(of, svc.Name.Compare)
		if got := slices.SortedFunc(x.Routes(g), route.compare); !slices.Equal(got, want) {
			t.Fatalf("Gateway %s has %v, want %v", g, got, want)
		}
		if got := slices.SortedFunc(maps.Keys(x.Sets(g)), svc.Name.Compare); !slices.Equal(got, of) {
			t.Fatalf("Gateway %s has the sets %v, want %v", g, got, of)
		}
	}
	for key, named := range routes {
		x.SetRoute(key, key.Namespace, named, nil)
	}
	for _, s := range sets {
		x.SetListenerSet(s, nil)
	}
	if len(x.byGateway)+len(x.bySet)+len(x.sets) > 0 {
		t.Errorf("%v is left of nothing", *x)
	}
}
