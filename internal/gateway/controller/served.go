package controller

import (
	"cmp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
)

// The reasons of Events on Gateways and routes.
const (
	gatewayNotServed = "GatewayNotServed"
	gatewayServed    = "GatewayServed"
	setNotServed     = "ListenerSetNotServed"
	setServed        = "ListenerSetServed"
	routeNotServed   = "RouteNotServed"
	routeServed      = "RouteServed"
)

// Bounds of these Events: a Gateway that is deleted may have thousands of routes. The conditions cover all of them. Good news do not take
// the places of warnings.
const (
	maxAnnounced   = 100
	maxServed      = maxAnnounced / 2
	announcePeriod = 10 * time.Second
)

// announcer records Events of Gateways, ListenerSets and routes when a new status was written. It compares with the status before, so that
// another process, or a resync, records nothing twice.
type announcer struct {
	to    Recorder // nil for none
	since time.Time
	// warned and served are how many there were since then.
	warned, served int
}

// allows reports whether there may be one more of a type.
func (a *announcer) allows(now time.Time, eventType string) bool {
	if now.Sub(a.since) >= announcePeriod {
		a.since, a.warned, a.served = now, 0, 0
	}
	if eventType == corev1.EventTypeNormal {
		a.served++
		return a.served <= maxServed
	}
	a.warned++
	return a.warned <= maxAnnounced
}

// record records an Event.
func (a *announcer) record(o metav1.Object, kind gwv1.Kind, eventType, reason, text string) {
	if a.to == nil || !a.allows(time.Now(), eventType) {
		return
	}
	a.to.Event(&corev1.ObjectReference{
		APIVersion: gwv1.GroupVersion.String(), Kind: string(kind), Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID(),
		ResourceVersion: o.GetResourceVersion(),
	}, eventType, reason, text)
}

// badOfRoutes are the conditions of a route that should not be True.
//
//nolint:gochecknoglobals // constant
var badOfRoutes = []string{ConditionUnserved, names.ConditionLoop, string(gwv1.RouteConditionPartiallyInvalid)}

// problemsOfRoute returns what is wrong with a route at its parents, "" if all is well. Parents of other controllers do not count.
func problemsOfRoute(r *routed, all []gwv1.RouteParentStatus) string {
	var out []string
	for i := range all {
		p := &all[i]
		if p.ControllerName != names.ControllerName {
			continue
		}
		if wrong := problemOfConditions(p.Conditions, badOfRoutes...); wrong != "" {
			out = append(out, parentOf(r.key.Namespace, &p.ParentRef)+": "+wrong)
		}
	}
	return strings.Join(out, "; ")
}

// lostParents returns the parents that took a route, that it still names, and that are not among its next ones.
func lostParents(r *routed, next []gwv1.RouteParentStatus) string {
	var out []string
	for i := range r.have {
		p := &r.have[i]
		same := func(o *gwv1.ParentReference) bool { return equality.Semantic.DeepEqual(o, &p.ParentRef) }
		named := slices.ContainsFunc(r.refs, func(o gwv1.ParentReference) bool { return same(&o) })
		stays := slices.ContainsFunc(next, func(o gwv1.RouteParentStatus) bool {
			return o.ControllerName == names.ControllerName && same(&o.ParentRef)
		})
		accepted := meta.IsStatusConditionTrue(p.Conditions, string(gwv1.RouteConditionAccepted))
		if p.ControllerName == names.ControllerName && named && !stays && accepted {
			out = append(out, parentOf(r.key.Namespace, &p.ParentRef)+": it is no longer there, or no longer of a class of this controller")
		}
	}
	return strings.Join(out, "; ")
}

// parentOf names a parent of a route, with what of it the route names.
func parentOf(namespace string, p *gwv1.ParentReference) string {
	out := "Gateway "
	if p.Kind != nil {
		out = string(*p.Kind) + " "
	}
	if p.Namespace != nil {
		namespace = string(*p.Namespace)
	}
	if out += namespace + "/" + string(p.Name); p.SectionName != nil {
		out += ", " + string(*p.SectionName)
	}
	return out
}

// problemOfConditions returns the first condition that is not as it should be, "" if all are: bad are the types that should not be True.
// One that is Unknown is not decided yet.
func problemOfConditions(all []metav1.Condition, bad ...string) string {
	for i := range all {
		k, wrong := &all[i], metav1.ConditionFalse
		if k.Type == names.ConditionMaintenance {
			continue // it is as asked, or a word that counts as false
		}
		if slices.Contains(bad, k.Type) {
			wrong = metav1.ConditionTrue
		}
		if k.Status == wrong {
			return k.Type + " is " + string(k.Status) + ", " + k.Reason + ": " + k.Message
		}
	}
	return ""
}

// problemOfGateway returns what is wrong with a Gateway or a ListenerSet, "" if nothing is. That nodes have not taken a change over yet is
// not wrong, nor that the Gateway has no address yet: lost is true if it had one. What its Gateway lacks is not said of a ListenerSet.
func problemOfGateway(s *gwv1.GatewayStatus, lost bool) string {
	conditions := slices.DeleteFunc(slices.Clone(s.Conditions), func(k metav1.Condition) bool {
		return k.Type == programmed && (k.Reason == string(gwv1.GatewayReasonPending) || k.Reason == names.ParentNotProgrammed ||
			k.Reason == string(gwv1.GatewayReasonAddressNotAssigned) && !lost)
	})
	out := problemOfConditions(conditions)
	for i := range s.Listeners {
		l := &s.Listeners[i]
		listener := slices.DeleteFunc(slices.Clone(l.Conditions), func(k metav1.Condition) bool { return k.Type == programmed })
		if wrong := problemOfConditions(listener, string(gwv1.ListenerConditionConflicted)); wrong != "" {
			out = cmp.Or(out, "listener "+string(l.Name)+": "+wrong)
		}
	}
	return out
}

// gateway records what has become of a Gateway.
func (a *announcer) gateway(g *gwv1.Gateway, next *gwv1.GatewayStatus) {
	a.listeners(g, kindGateway, &g.Status, next, gatewayServed, gatewayNotServed)
}

// set records what has become of a ListenerSet.
func (a *announcer) set(s *gwv1.ListenerSet, next *gwv1.ListenerSetStatus) {
	a.listeners(s, kindSet, ofSet(&s.Status), ofSet(next), setServed, setNotServed)
}

// ofSet returns the status of a ListenerSet as the one of a Gateway.
func ofSet(s *gwv1.ListenerSetStatus) *gwv1.GatewayStatus {
	out := &gwv1.GatewayStatus{Conditions: s.Conditions}
	for _, l := range s.Listeners {
		out.Listeners = append(out.Listeners, gwv1.ListenerStatus(l))
	}
	return out
}

// listeners records what has become of an object with listeners.
func (a *announcer) listeners(o metav1.Object, kind gwv1.Kind, have, next *gwv1.GatewayStatus, served, notServed string) {
	was, is := meta.IsStatusConditionTrue(have.Conditions, programmed), meta.IsStatusConditionTrue(next.Conditions, programmed)
	before, now := problemOfGateway(have, false), problemOfGateway(next, was)
	if now == "" && (before != "" || !was) && is {
		a.record(o, kind, corev1.EventTypeNormal, served, "nodes serve it, and all of its listeners")
	} else if now != "" && now != before {
		a.record(o, kind, corev1.EventTypeWarning, notServed, now)
	}
}

// route records what has become of a route.
func (a *announcer) route(r *routed, next []gwv1.RouteParentStatus) {
	now := problemsOfRoute(r, next)
	if lost := lostParents(r, next); lost != "" {
		now = strings.TrimSuffix(lost+"; "+now, "; ")
	}
	is, had := slices.ContainsFunc(next, isOurs), slices.ContainsFunc(r.have, isOurs)
	switch before := problemsOfRoute(r, r.have); {
	case now == before && (had || !is):
	case now != "":
		a.record(r.object, r.key.Kind, corev1.EventTypeWarning, routeNotServed, now)
	case is: // not if it no longer has one of our parents
		a.record(r.object, r.key.Kind, corev1.EventTypeNormal, routeServed, "all of its parents serve it")
	}
}

// isOurs reports whether a status of a route is of a parent of this controller.
func isOurs(p gwv1.RouteParentStatus) bool { return p.ControllerName == names.ControllerName }
