package routes

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// trouble is what is wrong with an object, by what it is about, as conditions have it. An entry "" is for an object without trouble.
type trouble map[string]string

// take adds what conditions have against an object.
func (t trouble) take(where string, conditions []metav1.Condition) {
	var out []string
	for _, c := range conditions {
		bad := metav1.ConditionFalse
		switch c.Type {
		case string(gwv1.ListenerConditionConflicted), string(gwv1.RouteConditionPartiallyInvalid):
			bad = metav1.ConditionTrue
		case names.ConditionMaintenance:
			continue // it is compared with what is served
		case string(gwv1.GatewayConditionProgrammed):
			continue // of the addresses, which a plan does not know
		}
		if text := c.Reason + ": " + c.Message; c.Status == bad && c.Message != "" && !slices.Contains(out, text) {
			out = append(out, text)
		}
	}
	t[where] = strings.Join(out, "; ")
}

// troubleOf returns what is wrong with a Gateway, its listeners, its ListenerSets, and the routes and policies that are there for it.
func troubleOf(w *World, f *gateway.Front, n svc.Name) trouble {
	t := trouble{}
	if f == nil {
		return t
	}
	s := f.Status(nil, "")
	t.take("Gateway "+n.String(), s.Conditions)
	for _, l := range s.Listeners {
		t.take(fmt.Sprintf("listener %s of Gateway %s", l.Name, n), l.Conditions)
	}
	for _, set := range f.Sets() {
		s := f.SetStatus(set, "")
		t.take("ListenerSet "+set.String(), s.Conditions)
		for _, l := range s.Listeners {
			t.take(fmt.Sprintf("listener %s of ListenerSet %s", l.Name, set), l.Conditions)
		}
	}
	for route := range w.routes() {
		for _, p := range f.Parents(route) {
			t.take(routeText(route)+" at "+parentText(&p.ParentRef, route.Namespace), p.Conditions)
		}
	}
	for policy, conditions := range f.PolicyStatuses() {
		t.take("BackendTLSPolicy "+policy.String(), conditions)
	}
	return t
}

func routeText(r kinds.Route) string { return string(r.Kind) + " " + r.Name.String() }

func parentText(p *gwv1.ParentReference, namespace string) string {
	kind := "Gateway"
	if p.Kind != nil {
		kind = string(*p.Kind)
	}
	if p.Namespace != nil {
		namespace = string(*p.Namespace)
	}
	out := kind + " " + namespace + "/" + string(p.Name)
	if p.SectionName != nil {
		out += ", listener " + string(*p.SectionName)
	}
	if p.Port != nil {
		out += fmt.Sprintf(", port %d", *p.Port)
	}
	return out
}

// listenerTrouble returns why a listener of a front is not served, "" if that is not known: the name is as the table has it.
func (t trouble) listener(name string, gatewayName svc.Name) string {
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return t[fmt.Sprintf("listener %s of ListenerSet %s", name[i+1:], name[:i])]
	}
	return cmp.Or(t[fmt.Sprintf("listener %s of Gateway %s", name, gatewayName)], t["Gateway "+gatewayName.String()])
}

// compareTrouble returns what gets wrong, and what gets right. touched reports whether an object is one of the plan: then the
// plan also has what stays wrong.
func compareTrouble(was, is trouble, touched func(where string) bool) (out []Change) {
	for _, where := range slices.Sorted(maps.Keys(is)) {
		before, known := was[where]
		now := is[where]
		switch {
		case now == before && now != "" && touched(where):
			out = append(out, Change{Where: where, Text: "is still not served as it asks: " + now})
		case now == before:
		case now == "" && known:
			out = append(out, Change{Where: where, Text: "is accepted now; before: " + before})
		case now != "":
			out = append(out, Change{Where: where, Text: "is not served as it asks: " + now})
		}
	}
	return out
}

// routes returns the routes of all kinds.
func (w *World) routes() map[kinds.Route][]gwv1.ParentReference {
	out := make(map[kinds.Route][]gwv1.ParentReference, len(w.Routes)+len(w.Calls)+len(w.Streams))
	for n, r := range w.Routes {
		out[kinds.Route{Kind: kinds.HTTPRoute, Name: n}] = r.Spec.ParentRefs
	}
	for n, r := range w.Calls {
		out[kinds.Route{Kind: kinds.GRPCRoute, Name: n}] = r.Spec.ParentRefs
	}
	for n, s := range w.Streams {
		out[n] = s.Parents
	}
	return out
}
