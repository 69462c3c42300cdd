package gateway

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

const kindHTTPRoute = "HTTPRoute"

// listener is a listener of a Gateway while its front is built.
type listener struct {
	spec     *gwv1.Listener
	host     string
	conflict gwv1.ListenerConditionReason // "" without one
	// accepted and resolved are the reasons of the conditions, and refused and unresolved what is wrong, "" if nothing is.
	accepted, resolved  gwv1.ListenerConditionReason
	refused, unresolved string
	http                bool // takes routes of HTTP
	secrets             []svc.Name
	attached            int32
	rules               map[string][]*match // by host
}

// serves reports whether the listener has a part in the table.
func (l *listener) serves() bool {
	return l.refused == "" && l.http && (l.unresolved == "" || !l.tls())
}

func (l *listener) tls() bool { return l.spec.Protocol == gwv1.HTTPSProtocolType }

// newListeners reads the listeners of a Gateway.
func newListeners(o *Objects, g *gwv1.Gateway, secrets *secretSet) []*listener {
	var out []*listener
	for i := range g.Spec.Listeners {
		spec := &g.Spec.Listeners[i]
		l := &listener{
			spec: spec, host: strings.ToLower(string(valueOf(spec.Hostname, ""))), accepted: gwv1.ListenerReasonAccepted,
			resolved: gwv1.ListenerReasonResolvedRefs, rules: map[string][]*match{},
		}
		l.readProtocol()
		l.readKinds()
		l.readCertificates(o, svc.NameOf(g), secrets)
		out = append(out, l)
	}
	for _, a := range out {
		for _, b := range out {
			if a != b {
				a.compare(b)
			}
		}
	}
	for _, l := range out {
		if l.conflict != "" {
			l.refuse(gwv1.ListenerConditionReason(l.conflict), "another listener has the same port, and the same hostname or another protocol")
		}
	}
	return out
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
	default:
		l.refuse(gwv1.ListenerReasonUnsupportedProtocol, "protocol %s is not served; want HTTP or HTTPS", l.spec.Protocol)
	}
}

// readKinds finds out whether the listener takes HTTPRoutes.
func (l *listener) readKinds() {
	if l.refused != "" {
		return
	}
	if l.spec.AllowedRoutes == nil || len(l.spec.AllowedRoutes.Kinds) == 0 {
		l.http = true
		return
	}
	for _, k := range l.spec.AllowedRoutes.Kinds {
		if valueOf(k.Group, gwv1.GroupName) == gwv1.GroupName && k.Kind == kindHTTPRoute {
			l.http = true
		} else {
			l.miss(gwv1.ListenerReasonInvalidRouteKinds, "allowedRoutes.kinds: routes of kind %s are not served; want %s", k.Kind, kindHTTPRoute)
		}
	}
}

func (l *listener) readCertificates(o *Objects, gateway svc.Name, secrets *secretSet) {
	if !l.tls() {
		return
	}
	if l.spec.TLS == nil || len(l.spec.TLS.CertificateRefs) == 0 {
		l.miss(gwv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs: HTTPS has to have a certificate")
		return
	}
	from := gwv1.ReferenceGrantFrom{Group: gwv1.GroupName, Kind: "Gateway", Namespace: gwv1.Namespace(gateway.Namespace)}
	for i, ref := range l.spec.TLS.CertificateRefs {
		name := svc.Name{Namespace: string(valueOf(ref.Namespace, gwv1.Namespace(gateway.Namespace))), Name: string(ref.Name)}
		switch {
		case valueOf(ref.Group, "") != "" || valueOf(ref.Kind, "Secret") != "Secret":
			l.miss(gwv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs[%d]: want a Secret", i)
		case !o.permitted(from, "Secret", name):
			l.miss(gwv1.ListenerReasonRefNotPermitted, "tls.certificateRefs[%d]: no ReferenceGrant of namespace %s permits it", i, name.Namespace)
		case name.Namespace != gateway.Namespace: // docs/design/020-gateway.md
			l.miss(gwv1.ListenerReasonRefNotPermitted, "tls.certificateRefs[%d]: nodes do not read Secrets of another namespace for a Gateway", i)
		default:
			if wrong := secrets.add(name); wrong != "" {
				l.miss(gwv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs[%d]: Secret %s: %s", i, name, wrong)
				continue
			}
			l.secrets = append(l.secrets, name)
		}
	}
}

// compare finds out whether a listener cannot be told from another one.
func (l *listener) compare(o *listener) {
	switch {
	case l.spec.Port != o.spec.Port:
	case l.spec.Protocol != o.spec.Protocol:
		l.conflict = gwv1.ListenerReasonProtocolConflict
	case l.host == o.host && l.conflict == "":
		l.conflict = gwv1.ListenerReasonHostnameConflict
	}
}

// takesFrom reports whether routes of a namespace may attach to the listener.
func (l *listener) takesFrom(o *Objects, gateway, namespace string) bool {
	from, selector := gwv1.NamespacesFromSame, (*metav1.LabelSelector)(nil)
	if a := l.spec.AllowedRoutes; a != nil && a.Namespaces != nil {
		from, selector = valueOf(a.Namespaces.From, from), a.Namespaces.Selector
	}
	switch from {
	case gwv1.NamespacesFromAll:
		return true
	case gwv1.NamespacesFromSame:
		return namespace == gateway
	case gwv1.NamespacesFromSelector:
		s, err := metav1.LabelSelectorAsSelector(selector)
		have, known := o.Namespaces[namespace]
		return err == nil && known && selector != nil && s.Matches(labels.Set(have))
	}
	return false
}

// status returns the status of the listener. programmed is why the Gateway has no address, "" if it has one.
func (l *listener) status(generation int64, unprogrammed string) gwv1.ListenerStatus {
	kinds := []gwv1.RouteGroupKind{}
	if l.http {
		kinds = append(kinds, gwv1.RouteGroupKind{Group: new(gwv1.Group(gwv1.GroupName)), Kind: kindHTTPRoute})
	}
	conflict := gwv1.ListenerReasonNoConflicts
	if l.conflict != "" {
		conflict = l.conflict
	}
	programmed, why := gwv1.ListenerReasonProgrammed, ""
	switch {
	case l.refused != "":
		programmed, why = gwv1.ListenerReasonInvalid, l.refused
	case l.unresolved != "":
		programmed, why = gwv1.ListenerReasonInvalid, l.unresolved
	case unprogrammed != "":
		programmed, why = gwv1.ListenerReasonPending, unprogrammed
	}
	return gwv1.ListenerStatus{
		Name: l.spec.Name, SupportedKinds: kinds, AttachedRoutes: l.attached,
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
	t := &Table{Ports: map[uint16]*Port{}}
	for _, l := range all {
		if !l.serves() {
			continue
		}
		number := uint16(l.spec.Port) //nolint:gosec // the definition of the kind has validated it
		p := t.Ports[number]
		if p == nil {
			p = &Port{Number: number, TLS: l.tls(), hosts: newHostIndex[*Listener](false)}
			t.Ports[number] = p
		}
		out := &Listener{Name: string(l.spec.Name), Host: l.host, Certificates: l.secrets, hosts: newHostIndex[*paths](false)}
		fill(out, l.rules, before.listener(number, out.Name))
		p.Listeners = append(p.Listeners, out)
		p.hosts.set(out.Host, out)
	}
	return t
}

// fill gives a listener its rules by host. A host with the same matches as in the table before keeps its part of that.
func fill(l *Listener, rules map[string][]*match, before *Listener) {
	for host, matches := range rules {
		var p *paths
		if before != nil {
			if was := before.hosts.get(host); was != nil && slices.EqualFunc(was.from, matches, alike) {
				p = was
			}
		}
		if p == nil {
			p = newPaths(matches)
		}
		l.hosts.set(host, p)
	}
}

// alike reports whether two matches are the same. The matches of routes are kept while the route stays; the ones of Ingresses, which
// have only paths, are read again at each change.
func alike(a, b *match) bool {
	if a == b {
		return true
	}
	plain := func(m *match) bool { return m.Rule.Route.Kind == kindIngress }
	return plain(a) && plain(b) && a.kind == b.kind && a.path == b.path && a.order == b.order && reflect.DeepEqual(a.Rule, b.Rule)
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
