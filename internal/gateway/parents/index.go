package parents

import (
	"iter"
	"maps"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Index has routes by the Gateways and the ListenerSets that they name, and ListenerSets by their Gateways: a front that is built looks
// at its own only. R tells routes apart.
type Index[R comparable] struct {
	byGateway, bySet map[svc.Name]map[R]bool
	sets             map[svc.Name]map[svc.Name]bool
}

// NewIndex returns an empty index.
func NewIndex[R comparable]() *Index[R] {
	return &Index[R]{map[svc.Name]map[R]bool{}, map[svc.Name]map[R]bool{}, map[svc.Name]map[svc.Name]bool{}}
}

// SetRoute notes that a route of a namespace names other parents than before.
func (x *Index[R]) SetRoute(key R, namespace string, before, now []gwv1.ParentReference) {
	each := func(refs []gwv1.ParentReference, do func(map[svc.Name]map[R]bool, svc.Name, R)) {
		for i := range refs {
			if n := Gateway(namespace, &refs[i]); n != (svc.Name{}) {
				do(x.byGateway, n, key)
			} else if n := Set(namespace, &refs[i]); n != (svc.Name{}) {
				do(x.bySet, n, key)
			}
		}
	}
	each(before, remove)
	each(now, add)
}

// SetListenerSet notes that a ListenerSet is now another one. nil is none.
func (x *Index[R]) SetListenerSet(before, now *gwv1.ListenerSet) {
	if before != nil {
		remove(x.sets, OfSet(before), svc.NameOf(before))
	}
	if now != nil {
		add(x.sets, OfSet(now), svc.NameOf(now))
	}
}

// Sets returns the ListenerSets that name a Gateway. They belong to the index.
func (x *Index[R]) Sets(gateway svc.Name) map[svc.Name]bool { return x.sets[gateway] }

// Routes yields the routes of all kinds that name a Gateway, or a ListenerSet that names it, each once.
func (x *Index[R]) Routes(gateway svc.Name) iter.Seq[R] {
	all := x.byGateway[gateway]
	if sets := x.sets[gateway]; len(sets) > 0 {
		all = maps.Clone(all)
		if all == nil {
			all = map[R]bool{}
		}
		for s := range sets {
			maps.Copy(all, x.bySet[s])
		}
	}
	return maps.Keys(all)
}

func add[K, V comparable](to map[K]map[V]bool, key K, v V) {
	if to[key] == nil {
		to[key] = map[V]bool{}
	}
	to[key][v] = true
}

func remove[K, V comparable](from map[K]map[V]bool, key K, v V) {
	if delete(from[key], v); len(from[key]) == 0 {
		delete(from, key)
	}
}
