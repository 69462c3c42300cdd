package gateway

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/gateway/counted"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/static"
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
	asked static.Addresses
	// Changed are the routes whose Parents may not be as in the front before, nil for all.
	Changed map[kinds.Route]bool
	// Users are the HTTPRoutes and GRPCRoutes by the Services that they name.
	Users counted.Index[svc.Name, kinds.Route]
	// Orders are the certificates that listeners have ordered.
	Orders *certificates.Set
	// Policies are the BackendTLSPolicies of Targets.
	Policies map[svc.Name]*trust.Policy
	frontTLS
	policyStatus map[svc.Name][]metav1.Condition
	authorities  *trust.Authorities

	generation int64
	listeners  []*listener // of the Gateway, then of its ListenerSets
	sets       map[svc.Name]*listenerSet
	// routes are the HTTPRoutes and GRPCRoutes that name the Gateway or one of its ListenerSets, and streams the statuses of the other
	// routes that do, one for each reference.
	routes  map[kinds.Route]*attached
	streams map[kinds.Route][]gwv1.RouteParentStatus
	targets counted.Set[Target] // of routes
	// Connected are the Services that the other routes name.
	Connected map[svc.Name]bool
}

// BuildGateway returns the front of a Gateway. before is that of an earlier state, or nil: what has not changed is taken
// over from it.
func BuildGateway(o *Objects, name svc.Name, before *Front) *Front {
	return build(o, name, before, nil)
}

// ChangeGateway returns the front of a Gateway if since before only HTTPRoutes and GRPCRoutes of changed have changed. It costs what
// they cost, and a copy of some tables.
func ChangeGateway(o *Objects, name svc.Name, before *Front, changed map[kinds.Route]bool) *Front {
	return build(o, name, before, changed)
}

// build builds a front. changed is nil if anything may have changed.
func build(o *Objects, name svc.Name, before *Front, changed map[kinds.Route]bool) *Front {
	g := o.Gateways[name]
	secrets := newSecretSet(o, maxGatewaySecrets)
	f := &Front{
		accepted: gwv1.GatewayReasonAccepted, generation: g.Generation,
		frontTLS: frontTLS{gateway: name, resolved: gwv1.GatewayReasonResolvedRefs},
		streams:  map[kinds.Route][]gwv1.RouteParentStatus{}, Connected: map[svc.Name]bool{}, sets: map[svc.Name]*listenerSet{},
		Revoked: map[Revocation]bool{}, authorities: trust.NewAuthorities(o.Authorities),
	}
	clients := f.readValidations(o, g, f.authorities)
	f.listeners = newListeners(o, g, secrets, clients)
	f.readClientCertificate(o, g, secrets)
	f.addSets(o, g, secrets, clients)
	if before == nil {
		before = &Front{}
	}
	f.addRoutes(o, before, changed)
	f.Targets = slices.Clone(f.targets.List())
	f.addStreams(o)
	f.addPolicies(o, f.authorities)
	f.accept(g)
	order(f, g)
	f.Secrets, f.Named = secrets.Usable, secrets.Named
	f.Table = &Table{Ports: map[uint16]*Port{}}
	if f.refused == "" {
		f.Table = listenersOf(f.listeners, before.Table)
	}
	f.Table.Subjects = clients.Ask()
	return f
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
			f.asked = append(f.asked, static.Address{Index: i, Value: a.Value})
		}
		if valueOf(a.Type, gwv1.IPAddressType) != gwv1.IPAddressType && f.refused == "" {
			f.accepted = gwv1.GatewayReasonUnsupportedAddress
			f.refused = fmt.Sprintf("addresses[%d].type: want IPAddress", i)
		}
	}
}

// Unusable returns why the Gateway does not have an address that it asks for, "" if it has all of them. have are its Service's.
func (f *Front) Unusable(have []string) string {
	return f.asked.Unusable(have, names.ServiceOfGateway(f.gateway))
}

// Refers reports whether a route of the front names a Service.
func (f *Front) Refers(service svc.Name) bool { return f.Users.Has(service) || f.Connected[service] }

// Parents returns the statuses of a route of any kind for the references that name the Gateway or one of its ListenerSets. A front
// that ChangeGateway returns has the same slice while nothing of the route has changed.
func (f *Front) Parents(route kinds.Route) []gwv1.RouteParentStatus {
	if a := f.routes[route]; a != nil {
		return a.parents()
	}
	return f.streams[route]
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
	addAwaiting(f, out)
	return out
}
