package watch

import (
	"crypto/tls"
	"iter"
	"maps"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/svc"
)

// frontName names a front of either kind.
type frontName struct {
	ingresses bool // the front of Ingresses
	svc.Name
}

// users has what fronts name, with the fronts that do. The zero value is empty.
type users[V comparable] map[V]map[frontName]bool

// replace notes that a front names other values than before, and puts the ones that have got their first user or lost the last one into
// changed.
func (u users[V]) replace(by frontName, before, now []V, changed map[V]bool) {
	if slices.Equal(before, now) {
		return
	}
	still := map[V]bool{}
	for _, v := range now {
		still[v] = true
	}
	for _, v := range before {
		if u[v][by] && !still[v] {
			if delete(u[v], by); len(u[v]) == 0 {
				delete(u, v)
				changed[v] = true
			}
		}
	}
	for _, v := range now {
		if u[v] == nil {
			u[v] = map[frontName]bool{}
			changed[v] = true
		}
		u[v][by] = true
	}
}

// built records that a front of a Gateway is another one than before. Either may be nil. The caller holds mu.
func built(w *Watch, n svc.Name, before, now *gateway.Front) {
	by := frontName{Name: n}
	var secretsBefore, secrets []svc.Name
	var authoritiesBefore, authorities []trust.Ref
	if before != nil {
		secretsBefore, authoritiesBefore = before.Named, before.NamedAuthorities()
		for s := range servicesOf(before) {
			if now == nil || !now.Refers(s) {
				w.serviceUsers.remove(s, n)
			}
		}
	}
	if now != nil {
		secrets, authorities = now.Named, now.NamedAuthorities()
		for s := range servicesOf(now) {
			w.serviceUsers.add(s, n)
		}
	}
	w.secretUsers.replace(by, secretsBefore, secrets, w.changedSecrets)
	w.authorityUsers.replace(by, authoritiesBefore, authorities, w.changedAuthorities)
	w.rebuilt[n] = true
	w.copies.fronts = nil
}

// servicesOf yields the Services that a front names.
func servicesOf(f *gateway.Front) iter.Seq[svc.Name] {
	return func(yield func(svc.Name) bool) {
		for s := range f.Users.All() {
			if !yield(s) {
				return
			}
		}
		maps.Keys(f.Connected)(yield)
	}
}

// builtIngresses records that a front of Ingresses is another one than before. Either may be nil. The caller holds mu.
func builtIngresses(w *Watch, n svc.Name, before, now *gateway.IngressFront) {
	var secretsBefore, secrets []svc.Name
	if before != nil {
		secretsBefore = before.Named
	}
	if now != nil {
		secrets = now.Named
	}
	w.secretUsers.replace(frontName{true, n}, secretsBefore, secrets, w.changedSecrets)
	w.copies.ingressFronts = nil
}

// referrers has Services, with the Gateways whose fronts name them.
type referrers map[svc.Name]map[svc.Name]bool

func (r referrers) add(service, by svc.Name) {
	if r[service] == nil {
		r[service] = map[svc.Name]bool{}
	}
	r[service][by] = true
}

func (r referrers) remove(service, by svc.Name) {
	if delete(r[service], by); len(r[service]) == 0 {
		delete(r, service)
	}
}

// copies are the maps of the last State. One that is nil is made again: each change of what it is a copy of sets it to nil.
type copies struct {
	gateways      map[svc.Name]*gwv1.Gateway
	fronts        map[svc.Name]*gateway.Front
	routes        map[svc.Name]*gwv1.HTTPRoute
	calls         map[svc.Name]*gwv1.GRPCRoute
	streams       map[kinds.Route]*kinds.Stream
	sets          map[svc.Name]*gwv1.ListenerSet
	grants        map[svc.Name]*gwv1.ReferenceGrant
	ingresses     map[svc.Name]*networkingv1.Ingress
	ingressFronts map[svc.Name]*gateway.IngressFront
	meshes        map[svc.Name]*gateway.Mesh
	policies      map[svc.Name]*gwv1.BackendTLSPolicy
	versions      map[svc.Name]string
	// What Secrets had at a number of secretChanges.
	secrets      uint64
	certificates map[svc.Name]*tls.Certificate
	users        map[basic.Source]*basic.Users
	answers      map[svc.Name]acme.Answers
}

// copyOf returns the copy of a map that last has, which it makes if last is nil.
func copyOf[K comparable, V any](of map[K]V, last *map[K]V) map[K]V {
	if *last == nil {
		if *last = maps.Clone(of); *last == nil {
			*last = map[K]V{}
		}
	}
	return *last
}
