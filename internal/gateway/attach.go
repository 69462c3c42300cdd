package gateway

import (
	"maps"
	"reflect"
	"slices"
	"sync"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// cachedRoute is a compiled route with what it was made from beside its object.
type cachedRoute struct {
	*compiled
	refs []reference
}

// reference is the Service that a route names, with the result.
type reference struct {
	to        svc.Name
	found     *services.Service
	policies  *trust.Targeting
	permitted bool
}

// annotatedAs reports whether a route has the annotation that counts for its rules as the compiled one has it.
func (c *compiled) annotatedAs(r requests) bool {
	return c.from.Object().GetAnnotations()[svc.MaintenanceAnnotation] == r.Object().GetAnnotations()[svc.MaintenanceAnnotation]
}

// or returns the compiled route if it would be the same today, else it compiles the route.
func (c *cachedRoute) or(o *Objects, r requests, admitted, inside bool) *cachedRoute {
	if c != nil && c.skipped == !admitted && c.from.SameSpec(r) && c.annotatedAs(r) && c.current(o) {
		return c
	}
	next := &cachedRoute{compiled: compileRoute(o, r, admitted, inside)}
	for _, to := range r.Services() {
		next.refs = append(next.refs, reference{to, o.Services[to], o.Policies.At(to), o.Grants.Permit(r.Grant(), "Service", to)})
	}
	return next
}

// current reports whether the references of a route lead where they did.
func (c *cachedRoute) current(o *Objects) bool {
	for _, ref := range c.refs {
		if o.Services[ref.to] != ref.found || o.Policies.At(ref.to) != ref.policies {
			return false
		}
		if o.Grants.Permit(c.from.Grant(), "Service", ref.to) != ref.permitted {
			return false
		}
	}
	return true
}

// attached is a route in a front, with the listeners that it attaches to. It does not change.
type attached struct {
	*cachedRoute
	key     kinds.Route
	results []attachResult
	at      map[int]map[string]bool // hosts, by the place of the listener in the front
	parents func() []gwv1.RouteParentStatus
}

// attachResult is what becomes of a reference of a route to the front.
type attachResult struct {
	ref     *gwv1.ParentReference
	reason  gwv1.RouteConditionReason
	message string // "" if the route is accepted
}

// addRoutes adds the HTTPRoutes and GRPCRoutes that name the Gateway. If only a few of them may have changed, the others are taken over
// as they are.
func (f *Front) addRoutes(o *Objects, before *Front, changed map[kinds.Route]bool) {
	const few = 16
	if changed != nil && len(changed) <= few && sameListeners(o, f, before) {
		if changes := changesOf(o, f, before, changed); !disputed(before, changes) {
			f.takeOver(before)
			f.Changed = changed
			for _, c := range changes {
				if c.was != nil {
					f.remove(c.was)
				}
				if c.now != (requests{}) {
					f.add(o, f.attach(o, c.now, c.was))
				}
			}
			return
		}
	}
	f.routes = map[kinds.Route]*attached{}
	for _, route := range f.requests(o) {
		f.add(o, f.attach(o, route, before.routes[route.Key()]))
	}
}

// sameListeners reports whether a route attaches to the listeners as to the ones of an earlier front.
func sameListeners(o *Objects, f, before *Front) bool {
	same := func(a, b *listener) bool {
		if a.spec != b.spec && !reflect.DeepEqual(a.spec, b.spec) || a.in != b.in || !slices.Equal(a.kinds, b.kinds) {
			return false
		}
		if (a.set == nil) != (b.set == nil) || a.set != nil && svc.NameOf(a.set) != svc.NameOf(b.set) {
			return false
		}
		for namespace, allowed := range b.allowed {
			if a.takesFrom(o, namespace) != allowed {
				return false
			}
		}
		return true
	}
	return before.routes != nil && slices.EqualFunc(f.listeners, before.listeners, same) &&
		maps.EqualFunc(f.sets, before.sets, func(_, _ *listenerSet) bool { return true })
}

// change is a route that is not as in an earlier front.
type change struct {
	was *attached // nil if the front did not have it
	now requests  // zero if it has gone
}

// changesOf returns the routes of keys that are not as in an earlier front.
func changesOf(o *Objects, f, before *Front, keys map[kinds.Route]bool) (out []change) {
	for key := range keys {
		c := change{was: before.routes[key], now: o.route(key)}
		if c.now != (requests{}) && !f.isNamed(c.now.Parents(), key.Namespace) {
			c.now = requests{}
		}
		if c != (change{}) {
			out = append(out, c)
		}
	}
	return out
}

// route returns an HTTPRoute or a GRPCRoute, zero if it does not exist or is of another kind.
func (o *Objects) route(key kinds.Route) (r requests) {
	switch key.Kind {
	case kinds.GRPCRoute:
		r.GRPC = o.Calls[key.Name]
	case kinds.HTTPRoute:
		r.HTTP = o.Routes[key.Name]
	}
	return r
}

// disputed reports whether changed routes have a hostname that a route of the other kind has, too: then their age decides.
func disputed(before *Front, changes []change) bool {
	meets := func(a, b []string) bool {
		return slices.ContainsFunc(a, func(x string) bool {
			return slices.ContainsFunc(b, func(y string) bool { _, ok := hostpath.Intersect(x, y); return ok })
		})
	}
	for i, c := range changes {
		var hosts []string
		kind := c.now.Kind()
		if c.now != (requests{}) {
			hosts = hostpath.All(c.now.Hostnames())
		}
		if c.was != nil {
			kind, hosts = c.was.key.Kind, append(hosts, c.was.hosts...)
		}
		for key, other := range before.routes {
			if key.Kind != kind && meets(hosts, other.hosts) {
				return true
			}
		}
		for _, other := range changes[:i] {
			if other.now != (requests{}) && other.now.Kind() != kind && meets(hosts, hostpath.All(other.now.Hostnames())) {
				return true
			}
		}
	}
	return false
}

// takeOver takes the routes of an earlier front over, whose listeners are the same.
func (f *Front) takeOver(before *Front) {
	f.routes, f.targets, f.Users = maps.Clone(before.routes), before.targets.Clone(), before.Users.Clone()
	for i, l := range f.listeners {
		l.rules, l.attached, l.changed = maps.Clone(before.listeners[i].rules), before.listeners[i].attached, map[string]bool{}
	}
}

// attach finds the listeners that take a route. was is what an earlier front had of it, or nil.
func (f *Front) attach(o *Objects, route requests, was *attached) *attached {
	var cached *cachedRoute
	if was != nil {
		cached = was.cachedRoute
	}
	key := route.Key()
	admitted := slices.ContainsFunc(f.listeners, func(l *listener) bool {
		return l.takes(key.Kind) && l.takesFrom(o, key.Namespace) &&
			slices.ContainsFunc(route.Parents(), func(p gwv1.ParentReference) bool { return l.isOf(&p, key.Namespace, f.gateway) })
	})
	a := &attached{cachedRoute: cached.or(o, route, admitted, false), key: key, at: map[int]map[string]bool{}}
	refs := a.from.Parents()
	to := map[*listener]map[string]bool{}
	for i := range refs {
		if !f.selects(&refs[i], key.Namespace) {
			continue
		}
		reason, message := f.attachBy(o, &refs[i], subject{key.Kind, key.Namespace, a.hosts}, to)
		if message == "" && a.wholly {
			reason, message = gwv1.RouteReasonUnsupportedValue, a.invalid
		}
		a.results = append(a.results, attachResult{&refs[i], reason, message})
	}
	for i, l := range f.listeners {
		if hosts := to[l]; hosts != nil {
			a.at[i] = hosts
		}
	}
	a.parents = sync.OnceValue(func() (out []gwv1.RouteParentStatus) {
		for _, r := range a.results {
			out = append(out, a.status(r.ref, r.reason, r.message))
		}
		return out
	})
	return a
}

// add gives the rules of a route to the listeners that it attaches to.
func (f *Front) add(o *Objects, a *attached) {
	f.routes[a.key] = a
	for _, r := range a.refs {
		f.Users.Add(r.to, a.key)
	}
	if !a.skipped {
		f.targets.Add(a.targets...)
	}
	for i, hosts := range a.at {
		l := f.listeners[i]
		l.attached++
		for h := range hosts {
			have := l.rules[h]
			if l.changed != nil {
				have, l.changed[h] = slices.Clip(have), true // an earlier front has this list
			}
			l.rules[h] = append(have, a.matches...)
			if len(o.Calls) > 0 { // otherwise nothing asks
				l.take(a.key.Kind, h)
			}
		}
	}
}

// remove takes the rules of a route away from its listeners.
func (f *Front) remove(a *attached) {
	delete(f.routes, a.key)
	for _, r := range a.refs {
		f.Users.Remove(r.to, a.key)
	}
	if !a.skipped {
		f.targets.Remove(a.targets...)
	}
	of := a.from.Age()
	for i, hosts := range a.at {
		l := f.listeners[i]
		l.attached--
		for h := range hosts {
			l.changed[h] = true
			var rest []*match
			for _, m := range l.rules[h] {
				if m.Rule.Route.Compare(of) != 0 {
					rest = append(rest, m)
				}
			}
			if l.rules[h] = rest; len(rest) == 0 {
				delete(l.rules, h)
			}
		}
	}
}

// subject is what listeners ask of a route.
type subject struct {
	kind      gwv1.Kind
	namespace string
	hosts     []string
}

// attachBy finds the listeners, with the hosts, that a route attaches to by one reference.
func (f *Front) attachBy(o *Objects, p *gwv1.ParentReference, r subject, to map[*listener]map[string]bool) (
	reason gwv1.RouteConditionReason, message string,
) {
	named, allowed, matched := false, false, false
	found := map[*listener][]string{}
	for _, l := range f.listeners {
		elsewhere := p.SectionName != nil && *p.SectionName != l.spec.Name || p.Port != nil && *p.Port != l.spec.Port
		if elsewhere || !l.isOf(p, r.namespace, f.gateway) {
			continue
		}
		named = true
		if !l.takes(r.kind) || !l.takesFrom(o, r.namespace) {
			continue
		}
		allowed = true
		for _, h := range r.hosts {
			host, ok := hostpath.Intersect(l.host, h)
			if !ok {
				continue
			}
			if matched = true; l.isTaken(r.kind, host) {
				return routeReasonHostnameConflict, "an older route of the other kind, of HTTPRoute and GRPCRoute, has a hostname of the route"
			}
			found[l] = append(found[l], host)
		}
	}
	switch {
	case !named:
		return gwv1.RouteReasonNoMatchingParent, "it has no listener of this sectionName and port"
	case !allowed:
		return gwv1.RouteReasonNotAllowedByListeners, "no listener lets a route of this kind and namespace attach"
	case !matched:
		return gwv1.RouteReasonNoMatchingListenerHostname, "no listener has a hostname of the route"
	}
	for l, hosts := range found {
		if to[l] == nil {
			to[l] = map[string]bool{}
		}
		for _, h := range hosts {
			to[l][h] = true
		}
	}
	return gwv1.RouteReasonAccepted, ""
}

// routeReasonHostnameConflict is why a route is not accepted beside an older one of the other kind. The specification asks for
// the condition and names no reason.
const routeReasonHostnameConflict gwv1.RouteConditionReason = "HostnameConflict"

// requests is an HTTPRoute or a GRPCRoute.
type requests = kinds.Requests

// protocolOf returns the one of backends whose port names none.
func protocolOf(r requests) BackendProtocol {
	if r.GRPC != nil {
		return H2C
	}
	return HTTP1
}

// requests returns the HTTPRoutes and GRPCRoutes that name the Gateway: the older ones first, which decides if both kinds want
// a hostname.
func (f *Front) requests(o *Objects) (out []requests) {
	for key := range o.Index().Routes(f.gateway) {
		if r := o.route(key); r != (requests{}) {
			out = append(out, r)
		}
	}
	kinds.SortByAge(out)
	return out
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
