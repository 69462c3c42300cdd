package gateway

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// Front is what becomes of the objects of one front.
type Front struct {
	Table *Table
	// Secrets are the ones that nodes need, and Named all that the listeners name, and may name, each once.
	Secrets, Named []svc.Name
	// Targets are where rules lead to, each once.
	Targets []Target
	// Revoked are the Services that routes of connections name and must not reach.
	Revoked map[Revocation]bool
	// accepted is why the Gateway is not served, "" if it is.
	accepted gwv1.GatewayConditionReason
	refused  string
	// asked are the addresses that the Gateway asks for, by their places in its spec.
	asked []askedAddress
	// Policies are the BackendTLSPolicies of Targets.
	Policies map[svc.Name]*trust.Policy
	frontTLS
	policyStatus map[svc.Name][]metav1.Condition
	authorities  *trust.Authorities

	generation int64
	listeners  []*listener // of the Gateway, then of its ListenerSets
	sets       map[svc.Name]*listenerSet
	// parents are the statuses of the routes that name the Gateway or one of its ListenerSets, one for each reference.
	parents map[StreamKey][]gwv1.RouteParentStatus
	cache   map[StreamKey]*cachedRoute
	refers  map[svc.Name]bool // Services that routes name
}

// cachedRoute is a compiled route with what it was made from beside its object.
type cachedRoute struct {
	*compiled
	refs []reference
}

// BuildGateway returns the front of a Gateway. before is that of an earlier state, or nil: what has not changed is taken
// over from it.
func BuildGateway(o *Objects, name svc.Name, before *Front) *Front {
	g := o.Gateways[name]
	secrets := newSecretSet(o, maxGatewaySecrets)
	f := &Front{
		accepted: gwv1.GatewayReasonAccepted, generation: g.Generation,
		frontTLS: frontTLS{gateway: name, resolved: gwv1.GatewayReasonResolvedRefs},
		parents:  map[StreamKey][]gwv1.RouteParentStatus{}, cache: map[StreamKey]*cachedRoute{},
		refers: map[svc.Name]bool{}, sets: map[svc.Name]*listenerSet{},
		Revoked: map[Revocation]bool{}, authorities: trust.NewAuthorities(o.Authorities),
	}
	clients := f.readValidations(o, g, f.authorities)
	f.listeners = newListeners(o, g, secrets, clients)
	f.readClientCertificate(o, g, secrets)
	f.addSets(o, g, secrets, clients)
	if before == nil {
		before = &Front{}
	}
	seen := map[Target]bool{}
	target := func(t Target) {
		if !seen[t] {
			seen[t] = true
			f.Targets = append(f.Targets, t)
		}
	}
	f.addRoutes(o, before, target)
	f.addStreams(o, target)
	f.addPolicies(o, f.authorities)
	f.accept(g)
	f.Secrets, f.Named = secrets.usable, secrets.named
	f.Table = &Table{Ports: map[uint16]*Port{}}
	if f.refused == "" {
		f.Table = listenersOf(f.listeners, before.Table)
	}
	f.Table.Subjects = clients.ask()
	return f
}

// addRoutes adds the HTTPRoutes and GRPCRoutes that name the Gateway.
func (f *Front) addRoutes(o *Objects, before *Front, target func(Target)) {
	for _, route := range f.requests(o) {
		n := route.name()
		admitted := slices.ContainsFunc(f.listeners, func(l *listener) bool {
			return l.takes(route.kind()) && l.takesFrom(o, n.Namespace) &&
				slices.ContainsFunc(route.parents(), func(p gwv1.ParentReference) bool { return l.isOf(&p, n.Namespace, f.gateway) })
		})
		key := StreamKey{route.kind(), n}
		c := before.cache[key].or(o, route, admitted, false)
		f.cache[key] = c
		for _, r := range c.refs {
			f.refers[r.to] = true
		}
		f.attach(o, c.compiled)
		if !admitted {
			continue
		}
		for _, t := range c.targets {
			target(t)
		}
	}
}

// accept decides whether the Gateway as a whole is served.
func (f *Front) accept(g *gwv1.Gateway) {
	usable, bad := 0, ""
	for _, l := range f.listeners {
		if l.set != nil {
			continue
		}
		if l.refused == "" {
			usable++
		} else if bad == "" {
			bad = fmt.Sprintf("listener %s: %s", l.spec.Name, l.refused)
		}
	}
	switch {
	case g.Spec.Infrastructure != nil && g.Spec.Infrastructure.ParametersRef != nil:
		f.accepted, f.refused = gwv1.GatewayReasonInvalidParameters, "infrastructure.parametersRef: there are no parameters of a Gateway"
	case usable == 0:
		f.accepted, f.refused = gwv1.GatewayReasonListenersNotValid, bad
	case bad != "":
		f.accepted = gwv1.GatewayReasonListenersNotValid
	}
	for i, a := range g.Spec.Addresses {
		if a.Value != "" {
			f.asked = append(f.asked, askedAddress{i, a.Value})
		}
		if valueOf(a.Type, gwv1.IPAddressType) != gwv1.IPAddressType && f.refused == "" {
			f.accepted = gwv1.GatewayReasonUnsupportedAddress
			f.refused = fmt.Sprintf("addresses[%d].type: want IPAddress", i)
		}
	}
}

// askedAddress is an address of a Gateway's spec.
type askedAddress struct {
	index int
	value string
}

// Unusable returns why the Gateway does not have an address that it asks for, "" if it has all of them. have are those of its Service.
func (f *Front) Unusable(have []string) string {
	families := map[bool]bool{}
	for _, a := range f.asked {
		asked, err := netip.ParseAddr(a.value)
		switch {
		case err != nil:
			return fmt.Sprintf("addresses[%d].value: want an IP address", a.index)
		case families[asked.Is4()]:
			return fmt.Sprintf("addresses[%d]: a Gateway has one address of each family", a.index)
		case !slices.ContainsFunc(have, func(h string) bool { had, err := netip.ParseAddr(h); return err == nil && had == asked }):
			return fmt.Sprintf("addresses[%d]: %s is of no pool for this Gateway, or in use, or not assigned yet: see the Events of Service %s",
				a.index, asked, ServiceOfGateway(f.gateway))
		}
		families[asked.Is4()] = true
	}
	return ""
}

// parentOf returns the Gateway that a reference names, the zero Name if it names something else.
func parentOf(namespace string, p *gwv1.ParentReference) svc.Name {
	if valueOf(p.Group, gwv1.GroupName) != gwv1.GroupName || valueOf(p.Kind, "Gateway") != "Gateway" {
		return svc.Name{}
	}
	return svc.Name{Namespace: string(valueOf(p.Namespace, gwv1.Namespace(namespace))), Name: string(p.Name)}
}

// attach adds a route to the listeners that take it, and keeps its status.
func (f *Front) attach(o *Objects, c *compiled) {
	key := StreamKey{c.from.kind(), c.from.name()}
	attached := map[*listener]map[string]bool{}
	for _, p := range c.from.parents() {
		if !f.selects(&p, key.Namespace) {
			continue
		}
		reason, message := f.attachBy(o, &p, subject{key.Kind, key.Namespace, c.hosts}, attached)
		if message == "" && c.wholly {
			reason, message = gwv1.RouteReasonUnsupportedValue, c.invalid
		}
		f.parents[key] = append(f.parents[key], c.status(&p, reason, message))
	}
	for l, hosts := range attached {
		l.attached++
		for h := range hosts {
			l.rules[h] = append(l.rules[h], c.matches...)
			if len(o.Calls) > 0 { // otherwise nothing asks
				l.take(key.Kind, h)
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

// status returns the status of a route for one of its parents.
func (c *compiled) status(p *gwv1.ParentReference, reason gwv1.RouteConditionReason, message string) gwv1.RouteParentStatus {
	generation := c.from.object().GetGeneration()
	s := gwv1.RouteParentStatus{
		ParentRef: *p, ControllerName: ControllerName,
		Conditions: []metav1.Condition{
			condition(gwv1.RouteConditionAccepted, message == "", reason, generation, message),
			condition(gwv1.RouteConditionResolvedRefs, c.unresolved == "", c.reason, generation, c.unresolved),
		},
	}
	if c.invalid != "" && !c.wholly {
		s.Conditions = append(s.Conditions, condition(gwv1.RouteConditionPartiallyInvalid, true, gwv1.RouteReasonUnsupportedValue, generation,
			c.invalid+"; requests of such a rule are answered with "+strconv.Itoa(refusal(c.from.kind()))))
	}
	return s
}

// reference is the Service that a route names, with the result.
type reference struct {
	to        svc.Name
	found     *Service
	policies  *trust.Targeting
	permitted bool
}

// or returns the compiled route if it would be the same today, else it compiles the route.
func (c *cachedRoute) or(o *Objects, r requests, admitted, inside bool) *cachedRoute {
	if c != nil && c.skipped == !admitted && c.from.sameSpec(r) && c.current(o) {
		return c
	}
	next := &cachedRoute{compiled: compileRoute(o, r, admitted, inside)}
	for _, to := range r.services() {
		next.refs = append(next.refs, reference{to, o.Services[to], o.Policies.At(to), o.permitted(r.grant(), "Service", to)})
	}
	return next
}

func grantFrom(kind gwv1.Kind, namespace string) gwv1.ReferenceGrantFrom {
	return gwv1.ReferenceGrantFrom{Group: gwv1.GroupName, Kind: kind, Namespace: gwv1.Namespace(namespace)}
}

// current reports whether the references of a route lead where they did.
func (c *cachedRoute) current(o *Objects) bool {
	for _, ref := range c.refs {
		if o.Services[ref.to] != ref.found || o.Policies.At(ref.to) != ref.policies {
			return false
		}
		if o.permitted(c.from.grant(), "Service", ref.to) != ref.permitted {
			return false
		}
	}
	return true
}

// Refers reports whether a route of the front names a Service.
func (f *Front) Refers(service svc.Name) bool { return f.refers[service] }

// Parents returns the statuses of a route of any kind for the references that name the Gateway or one of its ListenerSets.
func (f *Front) Parents(route StreamKey) []gwv1.RouteParentStatus { return f.parents[route] }

// Routes returns the routes that name the Gateway or one of its ListenerSets.
func (f *Front) Routes() []StreamKey {
	return slices.SortedFunc(maps.Keys(f.parents), StreamKey.compare)
}

// Status returns the status of the Gateway. unprogrammed is why it is not served at its addresses, "" if it is.
func (f *Front) Status(addresses []string, unprogrammed string) gwv1.GatewayStatus {
	programmed, unusable := gwv1.GatewayReasonProgrammed, f.Unusable(addresses)
	switch {
	case f.refused != "":
		programmed, unprogrammed = gwv1.GatewayReasonInvalid, f.refused
	case unusable != "":
		programmed, unprogrammed = gwv1.GatewayReasonAddressNotUsable, cmp.Or(unprogrammed, unusable)
	case unprogrammed != "" && len(addresses) == 0:
		programmed = gwv1.GatewayReasonAddressNotAssigned
	case unprogrammed != "":
		programmed = gwv1.GatewayReasonNoResources
	}
	s := gwv1.GatewayStatus{Conditions: []metav1.Condition{
		condition(gwv1.GatewayConditionAccepted, f.refused == "", f.accepted, f.generation, f.refused),
		condition(gwv1.GatewayConditionProgrammed, unprogrammed == "", programmed, f.generation, unprogrammed),
		f.references(),
	}}
	if f.insecure {
		s.Conditions = append(s.Conditions, condition(gwv1.GatewayConditionInsecureFrontendValidationMode, true,
			gwv1.GatewayReasonConfigurationChanged, f.generation, "clients get in without a certificate that is verified: AllowInsecureFallback"))
	}
	for _, a := range addresses {
		s.Addresses = append(s.Addresses, gwv1.GatewayStatusAddress{Type: new(gwv1.IPAddressType), Value: a})
	}
	for _, l := range f.listeners {
		if l.set == nil {
			s.Listeners = append(s.Listeners, l.status(f.generation, unprogrammed))
		}
	}
	if n := f.attachedSets(); n > 0 || len(f.sets) > 0 {
		s.AttachedListenerSets = &n
	}
	return s
}

// references returns the condition ResolvedRefs of the Gateway, which also sums up the ones of its listeners.
func (f *Front) references() metav1.Condition {
	reason, wrong := f.resolved, f.unresolved
	for _, l := range f.listeners {
		if wrong == "" && l.set == nil && l.unresolved != "" {
			reason, wrong = gwv1.GatewayReasonListenersNotResolved, fmt.Sprintf("listener %s: %s", l.spec.Name, l.unresolved)
		}
	}
	return condition(gwv1.GatewayConditionResolvedRefs, wrong == "", reason, f.generation, wrong)
}

// PortKey is a number and a transport.
type PortKey struct {
	Number uint16
	UDP    bool
}

// Ports returns the ports of the front with the names of their protocols: http, https, tls, tcp or udp.
func (f *Front) Ports() map[PortKey]string {
	out := map[PortKey]string{}
	for n, p := range f.Table.Ports {
		name := "http"
		switch {
		case p.TLS && p.Streams:
			name = "tls"
		case p.TLS:
			name = "https"
		case p.Streams:
			name = "tcp"
		}
		out[PortKey{Number: n}] = name
	}
	for n := range f.Table.Datagrams {
		out[PortKey{n, true}] = "udp"
	}
	return out
}
