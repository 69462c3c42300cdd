package gateway

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// listener is a listener of a Gateway while its front is built.
type listener struct {
	spec     *gwv1.Listener
	set      *gwv1.ListenerSet // of which it is, nil for one of the Gateway
	in       string            // namespace of the Gateway or of the ListenerSet
	host     string
	conflict gwv1.ListenerConditionReason // "" without one
	// accepted and resolved are the reasons of the conditions, and refused and unresolved what is wrong, "" if nothing is.
	accepted, resolved  gwv1.ListenerConditionReason
	refused, unresolved string
	kinds               []gwv1.Kind      // of routes that it takes
	streams             map[string]*Rule // by host
	secrets             []svc.Name
	granted             []grantedObject     // the secrets that nodes may read by Services of ReferenceGrants
	attached            int32               // HTTPRoutes and GRPCRoutes
	connected           int32               // other routes
	rules               map[string][]*match // by host
	changed             map[string]bool     // hosts whose rules are not as in the front before; nil if any may have changed
	allowed             map[string]bool     // namespaces that were asked for: whether their routes may attach
	taken               map[gwv1.Kind]*hostpath.Patterns
	clients             *Clients // nil if no certificate of clients is asked for
	ordered             Ordered
}

// serves reports whether the listener has a part in the table.
func (l *listener) serves() bool {
	return l.refused == "" && len(l.kinds) > 0 && (l.unresolved == "" || !l.tls())
}

// tls reports whether the listener has to have a certificate.
func (l *listener) tls() bool {
	return l.spec.Protocol == gwv1.HTTPSProtocolType || l.mode() == Terminated
}

// mode returns what happens to the connections of the listener.
func (l *listener) mode() ListenerMode {
	switch l.spec.Protocol {
	case gwv1.TLSProtocolType:
		if l.spec.TLS != nil && valueOf(l.spec.TLS.Mode, gwv1.TLSModeTerminate) == gwv1.TLSModePassthrough {
			return Passthrough
		}
		return Terminated
	case gwv1.TCPProtocolType, gwv1.UDPProtocolType:
		return Passthrough
	}
	return Requests
}

// takes reports whether routes of a kind attach to the listener.
func (l *listener) takes(kind gwv1.Kind) bool { return slices.Contains(l.kinds, kind) }

// newListeners reads the listeners of a Gateway.
func newListeners(o *Objects, g *gwv1.Gateway, secrets *trust.SecretSet, clients trust.Validations) (out []*listener) {
	for i := range g.Spec.Listeners {
		l := newListener(o, g, nil, &g.Spec.Listeners[i], secrets)
		l.verifyClients(clients)
		out = append(out, l)
	}
	compareAll(out)
	return out
}

// newListener reads a listener of a Gateway, or of one of its ListenerSets.
func newListener(o *Objects, g *gwv1.Gateway, set *gwv1.ListenerSet, spec *gwv1.Listener, secrets *trust.SecretSet) *listener {
	l := &listener{
		spec: spec, set: set, in: g.Namespace, host: strings.ToLower(string(valueOf(spec.Hostname, ""))), accepted: gwv1.ListenerReasonAccepted,
		resolved: gwv1.ListenerReasonResolvedRefs, rules: map[string][]*match{}, streams: map[string]*Rule{},
		taken: map[gwv1.Kind]*hostpath.Patterns{},
	}
	if set != nil {
		l.in = set.Namespace
	}
	l.readProtocol()
	l.readKinds()
	l.readCertificates(o, g.Namespace, secrets)
	return l
}

// compareAll refuses all of the listeners of an object that cannot be told from each other.
func compareAll(all []*listener) {
	for _, a := range all {
		for _, b := range all {
			if a != b && (a.set == nil || a.refused == "" && b.refused == "") {
				a.compare(b)
			}
		}
	}
	for _, l := range all {
		l.refuseConflict()
	}
}

func (l *listener) refuseConflict() {
	if l.conflict != "" {
		l.refuse(l.conflict, "another listener has the same port, and the same hostname or another protocol")
	}
}

func (l *listener) refuse(why gwv1.ListenerConditionReason, format string, args ...any) {
	if l.refused == "" {
		l.accepted, l.refused = why, fmt.Sprintf(format, args...)
	}
}

func (l *listener) miss(why gwv1.ListenerConditionReason, format string, args ...any) {
	if l.unresolved == "" {
		l.resolved, l.unresolved = why, fmt.Sprintf(format, args...)
	}
}

func (l *listener) readProtocol() {
	switch l.spec.Protocol {
	case gwv1.HTTPProtocolType, gwv1.HTTPSProtocolType:
	case gwv1.TLSProtocolType:
		modes := []gwv1.TLSModeType{gwv1.TLSModePassthrough, gwv1.TLSModeTerminate}
		if l.spec.TLS == nil || !slices.Contains(modes, valueOf(l.spec.TLS.Mode, "")) {
			l.refuse(gwv1.ListenerReasonInvalid, "tls.mode: want Passthrough or Terminate")
		}
	case gwv1.TCPProtocolType, gwv1.UDPProtocolType:
		l.host = "" // it has no meaning
	default:
		l.refuse(gwv1.ListenerReasonUnsupportedProtocol, "protocol %s is not served; want HTTP, HTTPS, TLS, TCP or UDP", l.spec.Protocol)
	}
}

// served returns the kinds of routes for the protocol of the listener.
func (l *listener) served() []gwv1.Kind {
	switch l.spec.Protocol {
	case gwv1.TLSProtocolType:
		return []gwv1.Kind{kinds.TLSRoute}
	case gwv1.TCPProtocolType:
		return []gwv1.Kind{kinds.TCPRoute}
	case gwv1.UDPProtocolType:
		return []gwv1.Kind{kinds.UDPRoute}
	}
	return []gwv1.Kind{kinds.HTTPRoute, kinds.GRPCRoute}
}

// readKinds finds out which routes the listener takes.
func (l *listener) readKinds() {
	if l.refused != "" {
		return
	}
	kinds := l.served()
	if l.spec.AllowedRoutes == nil || len(l.spec.AllowedRoutes.Kinds) == 0 {
		l.kinds = kinds
		return
	}
	for _, k := range l.spec.AllowedRoutes.Kinds {
		switch {
		case valueOf(k.Group, gwv1.GroupName) != gwv1.GroupName || !slices.Contains(kinds, k.Kind):
			l.miss(gwv1.ListenerReasonInvalidRouteKinds, "allowedRoutes.kinds: routes of kind %s are not served for %s; want %s",
				k.Kind, l.spec.Protocol, parents.Either(kinds))
		case !l.takes(k.Kind):
			l.kinds = append(l.kinds, k.Kind)
		}
	}
}

func (l *listener) readCertificates(o *Objects, gateway string, secrets *trust.SecretSet) {
	if l.refused != "" || !l.tls() {
		return
	}
	if l.spec.TLS == nil || len(l.spec.TLS.CertificateRefs) == 0 {
		l.miss(gwv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs: %s has to have a certificate", l.spec.Protocol)
		return
	}
	from := kinds.From(kindGateway, l.in)
	if l.set != nil {
		from.Kind = kindListenerSet
	}
	for i, ref := range l.spec.TLS.CertificateRefs {
		name := svc.Name{Namespace: string(valueOf(ref.Namespace, gwv1.Namespace(l.in))), Name: string(ref.Name)}
		switch {
		case valueOf(ref.Group, "") != "" || valueOf(ref.Kind, "Secret") != "Secret":
			l.miss(gwv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs[%d]: want a Secret", i)
		case !o.Grants.Permit(from, "Secret", name):
			l.miss(gwv1.ListenerReasonRefNotPermitted, "tls.certificateRefs[%d]: no ReferenceGrant of namespace %s permits it", i, name.Namespace)
		default:
			if wrong := secrets.Add(name); wrong != "" {
				l.miss(gwv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs[%d]: Secret %s: %s", i, name, wrong)
				continue
			}
			l.secrets = append(l.secrets, name)
			if name.Namespace != gateway && name.Namespace != l.in { // docs/design/020-gateway.md
				l.granted = append(l.granted, grantedObject{o.Grants.For(from, "Secret", name), trust.Ref{Kind: trust.Secret, Name: name}})
			}
		}
	}
}

// compare finds out whether a listener cannot be told from another one. HTTPS and TLS can share a port, by the names that
// clients send, and so can UDP and any other protocol.
func (l *listener) compare(o *listener) {
	a, b := l.spec.Protocol, o.spec.Protocol
	named := func(p gwv1.ProtocolType) bool { return p == gwv1.HTTPSProtocolType || p == gwv1.TLSProtocolType }
	switch {
	case l.spec.Port != o.spec.Port, (a == gwv1.UDPProtocolType) != (b == gwv1.UDPProtocolType):
	case a != b && !(named(a) && named(b)), a == b && (a == gwv1.TCPProtocolType || a == gwv1.UDPProtocolType):
		l.conflict = gwv1.ListenerReasonProtocolConflict
	case l.host == o.host && l.conflict == "":
		l.conflict = gwv1.ListenerReasonHostnameConflict
	}
}

// takesFrom reports whether routes of a namespace may attach to the listener.
func (l *listener) takesFrom(o *Objects, namespace string) bool {
	allowed, known := l.allowed[namespace]
	if !known {
		if l.allowed == nil {
			l.allowed = map[string]bool{}
		}
		allowed = l.allows(o, namespace)
		l.allowed[namespace] = allowed
	}
	return allowed
}

// allows is takesFrom for a namespace that was not asked for yet.
func (l *listener) allows(o *Objects, namespace string) bool {
	from, selector := gwv1.NamespacesFromSame, (*metav1.LabelSelector)(nil)
	if a := l.spec.AllowedRoutes; a != nil && a.Namespaces != nil {
		from, selector = valueOf(a.Namespaces.From, from), a.Namespaces.Selector
	}
	have, known := o.Namespaces[namespace]
	return parents.Admits(from, selector, l.in, namespace, have, known)
}

// status returns the status of the listener. programmed is why the Gateway has no address, "" if it has one.
func (l *listener) status(generation int64, unprogrammed string) gwv1.ListenerStatus {
	kinds := []gwv1.RouteGroupKind{}
	for _, k := range l.kinds {
		kinds = append(kinds, gwv1.RouteGroupKind{Group: new(gwv1.Group(gwv1.GroupName)), Kind: k})
	}
	conflict := gwv1.ListenerReasonNoConflicts
	if l.conflict != "" {
		conflict = l.conflict
	}
	programmed, why := gwv1.ListenerReasonProgrammed, ""
	switch {
	case l.conflict != "" && l.set != nil:
		programmed, why = l.conflict, l.refused
	case l.refused != "":
		programmed, why = gwv1.ListenerReasonInvalid, l.refused
	case l.unresolved != "":
		programmed, why = gwv1.ListenerReasonInvalid, l.unresolved
	case unprogrammed != "":
		programmed, why = gwv1.ListenerReasonPending, unprogrammed
	}
	return gwv1.ListenerStatus{
		Name: l.spec.Name, SupportedKinds: kinds, AttachedRoutes: l.attached + l.connected,
		Conditions: []metav1.Condition{
			condition(gwv1.ListenerConditionAccepted, l.refused == "", l.accepted, generation, l.refused),
			condition(gwv1.ListenerConditionConflicted, l.conflict != "", conflict, generation, ""),
			condition(gwv1.ListenerConditionProgrammed, why == "", programmed, generation, why),
			condition(gwv1.ListenerConditionResolvedRefs, l.unresolved == "", l.resolved, generation, l.unresolved),
		},
	}
}

// listenersOf returns the table of the listeners that serve, by port.
func listenersOf(all []*listener, before *Table) *Table {
	t := &Table{Ports: map[uint16]*Port{}, Datagrams: map[uint16]*Port{}}
	for _, l := range all {
		if !l.serves() {
			continue
		}
		number := uint16(l.spec.Port) //nolint:gosec // the definition of the kind has validated it
		ports := t.Ports
		if l.spec.Protocol == gwv1.UDPProtocolType {
			ports = t.Datagrams
		}
		p := ports[number]
		if p == nil {
			p = &Port{Number: number, hosts: hostpath.NewIndex[*Listener](false)}
			ports[number] = p
		}
		p.TLS = p.TLS || l.spec.Protocol == gwv1.HTTPSProtocolType || l.spec.Protocol == gwv1.TLSProtocolType
		p.Streams = p.Streams || l.mode() != Requests
		if l.clients != nil { // all of HTTPS at a port ask for the same
			p.Clients = l.clients
		}
		out := &Listener{
			Name: l.name(), Host: l.host, Mode: l.mode(), Certificates: l.secrets, hosts: hostpath.NewIndex[*paths](false),
			streams: hostpath.NewIndex[*Rule](false),
		}
		for host, rule := range l.streams {
			out.streams.Set(host, rule)
		}
		if out.Mode == Requests {
			fill(out, l.rules, before.listener(number, out.Name), l.changed)
		}
		p.Listeners = append(p.Listeners, out)
		p.hosts.Set(out.Host, out)
	}
	return t
}

// name returns the name of the listener, which no other one of the front has.
func (l *listener) name() string {
	if l.set == nil {
		return string(l.spec.Name)
	}
	return svc.NameOf(l.set).String() + "/" + string(l.spec.Name)
}

// fill gives a listener its rules by host. A host with the same matches as in the table before keeps its part of that. changed, unless it
// is nil, has the hosts with other ones.
func fill(l *Listener, rules map[string][]*match, before *Listener, changed map[string]bool) {
	if before != nil && changed != nil {
		l.hosts = before.hosts.Clone()
		for host := range changed {
			if matches := rules[host]; len(matches) > 0 {
				l.hosts.Set(host, newPaths(matches))
			} else {
				l.hosts.Delete(host)
			}
		}
		return
	}
	for host, matches := range rules {
		var p *paths
		if before != nil {
			if was := before.hosts.Get(host); was != nil && slices.EqualFunc(was.from, matches, alike) {
				p = was
			}
		}
		if p == nil {
			p = newPaths(matches)
		}
		l.hosts.Set(host, p)
	}
}

// alike reports whether two matches are the same. The matches of routes are kept while the route stays; the ones of Ingresses are
// read again at each change.
func alike(a, b *match) bool {
	if a == b {
		return true
	}
	plain := func(m *match) bool { return m.Rule.Route.Kind == kindIngress }
	return plain(a) && plain(b) && a.kind == b.kind && a.path == b.path && a.order == b.order && reflect.DeepEqual(a.headers, b.headers) &&
		reflect.DeepEqual(a.cookie, b.cookie) && reflect.DeepEqual(a.regex, b.regex) && reflect.DeepEqual(a.Rule, b.Rule)
}

func (t *Table) listener(port uint16, name string) *Listener {
	if t == nil || t.Ports[port] == nil {
		return nil
	}
	for _, l := range t.Ports[port].Listeners {
		if l.Name == name {
			return l
		}
	}
	return nil
}
