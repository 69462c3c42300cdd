package gateway

import (
	"cmp"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	kindGateway     gwv1.Kind = "Gateway"
	kindListenerSet gwv1.Kind = "ListenerSet"
	// maxListeners bounds the listeners of a Gateway and its ListenerSets: each port is a socket on each node.
	maxListeners = 1024
)

// listenerSet is a ListenerSet of a Gateway while its front is built.
type listenerSet struct {
	object    *gwv1.ListenerSet
	listeners []*listener
	// accepted is the reason of the condition, and refused why it is not accepted, "" if it is.
	accepted gwv1.ListenerSetConditionReason
	refused  string
}

// selects reports whether a reference of a route names the Gateway, or one of its ListenerSets.
func (f *Front) selects(p *gwv1.ParentReference, namespace string) bool {
	return parents.Gateway(namespace, p) == f.gateway || f.sets[parents.Set(namespace, p)] != nil
}

// isNamed reports whether one of the references of a route names the Gateway, or one of its ListenerSets.
func (f *Front) isNamed(refs []gwv1.ParentReference, namespace string) bool {
	return slices.ContainsFunc(refs, func(p gwv1.ParentReference) bool { return f.selects(&p, namespace) })
}

// isOf reports whether a listener belongs to the object that a reference names: a route that names a Gateway does not attach to
// the listeners of its ListenerSets.
func (l *listener) isOf(p *gwv1.ParentReference, namespace string, gateway svc.Name) bool {
	if l.set != nil {
		return parents.Set(namespace, p) == svc.NameOf(l.set)
	}
	return parents.Gateway(namespace, p) == gateway
}

// addSets adds the listeners of the ListenerSets that name the Gateway, the older ones first.
func (f *Front) addSets(o *Objects, g *gwv1.Gateway, secrets *trust.SecretSet, clients trust.Validations) {
	var sets []*gwv1.ListenerSet
	for n := range o.Index().Sets(f.gateway) {
		sets = append(sets, o.Sets[n])
	}
	slices.SortFunc(sets, func(a, b *gwv1.ListenerSet) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), svc.NameOf(a).Compare(svc.NameOf(b)))
	})
	for _, s := range sets {
		out := &listenerSet{object: s, accepted: gwv1.ListenerSetReasonAccepted}
		f.sets[svc.NameOf(s)] = out
		if !takesSet(o, g, s.Namespace) {
			out.accepted = gwv1.ListenerSetReasonNotAllowed
			out.refused = "the Gateway's allowedListeners do not allow ListenerSets of this namespace"
			continue
		}
		for i := range s.Spec.Listeners {
			e := &s.Spec.Listeners[i]
			l := newListener(o, g, s, &gwv1.Listener{
				Name: e.Name, Hostname: e.Hostname, Port: e.Port, Protocol: e.Protocol, TLS: e.TLS, AllowedRoutes: e.AllowedRoutes,
			}, secrets)
			l.verifyClients(clients)
			out.listeners = append(out.listeners, l)
		}
		if len(f.listeners)+len(out.listeners) > maxListeners { // not compared either: the bound is of work, too
			for _, l := range out.listeners {
				l.refuse(gwv1.ListenerConditionReason(gwv1.ListenerEntryReasonTooManyListeners), "the Gateway has too many listeners")
			}
			out.accept()
			continue
		}
		for _, l := range out.listeners {
			l.giveWay(f.listeners)
		}
		compareAll(out.listeners)
		f.listeners = append(f.listeners, out.listeners...)
		out.accept()
	}
}

// giveWay refuses a listener that cannot be told from one that takes precedence. A listener of another ListenerSet that was
// refused itself keeps nothing free.
func (l *listener) giveWay(earlier []*listener) {
	for _, e := range earlier {
		if e.set == nil || e.refused == "" {
			l.compare(e)
		}
	}
	l.refuseConflict()
}

// accept decides whether the ListenerSet has a listener that is served.
func (s *listenerSet) accept() {
	usable, bad := 0, ""
	for _, l := range s.listeners {
		if l.refused == "" {
			usable++
		} else if bad == "" {
			bad = "listener " + string(l.spec.Name) + ": " + l.refused
		}
	}
	if bad != "" {
		s.accepted = gwv1.ListenerSetReasonListenersNotValid
	}
	if usable == 0 {
		s.refused = bad
	}
}

// takesSet reports whether ListenerSets of a namespace may add listeners to a Gateway: by default of none.
func takesSet(o *Objects, g *gwv1.Gateway, namespace string) bool {
	a := g.Spec.AllowedListeners
	if a == nil || a.Namespaces == nil {
		return false
	}
	have, known := o.Namespaces[namespace]
	return parents.Admits(valueOf(a.Namespaces.From, gwv1.NamespacesFromNone), a.Namespaces.Selector, g.Namespace, namespace, have, known)
}

// Sets returns the names of the ListenerSets that name the Gateway.
func (f *Front) Sets() []svc.Name { return slices.SortedFunc(maps.Keys(f.sets), svc.Name.Compare) }

// SetStatus returns the status of a ListenerSet of Sets. unprogrammed is why the Gateway is not served at its addresses, "" if it is.
func (f *Front) SetStatus(name svc.Name, unprogrammed string) gwv1.ListenerSetStatus {
	s := f.sets[name]
	generation := s.object.Generation
	accepted, refused := s.accepted, s.refused
	if refused == "" && f.refused != "" {
		accepted, refused = gwv1.ListenerSetReasonParentNotAccepted, "the Gateway is not accepted"
	}
	out := gwv1.ListenerSetStatus{}
	served := false
	for _, l := range s.listeners {
		pending := unprogrammed
		if f.refused != "" {
			pending = "the Gateway is not accepted"
		}
		of := l.status(generation, pending)
		served = served || l.serves()
		out.Listeners = append(out.Listeners, gwv1.ListenerEntryStatus(of))
	}
	if refused == "" && !served {
		accepted, refused = gwv1.ListenerSetReasonListenersNotValid, "no listener can be served"
	}
	programmed, why := gwv1.ListenerSetReasonProgrammed, ""
	switch {
	case refused != "":
		programmed, why = accepted, refused
	case unprogrammed != "":
		programmed, why = names.ParentNotProgrammed, unprogrammed
	}
	out.Conditions = []metav1.Condition{
		condition(gwv1.ListenerSetConditionAccepted, refused == "", accepted, generation, refused),
		condition(gwv1.ListenerSetConditionProgrammed, why == "", programmed, generation, why),
	}
	return out
}

// SetSecrets returns the usable Secrets of the ListenerSet's own namespace that its listeners name, if that is not the Gateway's.
func (f *Front) SetSecrets(name svc.Name) (out []svc.Name) {
	if name.Namespace == f.gateway.Namespace {
		return nil
	}
	for _, l := range f.sets[name].listeners {
		for _, n := range l.secrets {
			if n.Namespace == name.Namespace && !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}
	return out
}

// attachedSets returns how many ListenerSets are accepted.
func (f *Front) attachedSets() (n int32) {
	for _, s := range f.sets {
		if s.refused == "" && f.refused == "" {
			n++
		}
	}
	return n
}
