package controller

import (
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/loops"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// part is how many statuses of a route are of a front.
type part struct {
	of    svc.Name
	front *gateway.Front
	n     int
}

// maxLooping bounds the routes that are looked at again when another route of a front changes.
const maxLooping = 100

// looping are the routes whose redirects send clients back, with the tables of fronts by which they did.
type looping map[kinds.Route]map[svc.Name]*gateway.Table

// changed calls f with each route of which a front has another table now: the other end of its loop may have been mended.
func (l looping) changed(fronts map[svc.Name]*gateway.Front, f func(kinds.Route)) {
	for key, tables := range l {
		for n, t := range tables {
			if now := fronts[n]; now == nil || now.Table != t {
				f(key)
				break
			}
		}
	}
}

// add appends names.ConditionLoop to the statuses of an HTTPRoute for the fronts at which its redirects send clients back. A loop that
// begins since another route of it changes shows at that one.
func (l looping) add(all []gwv1.RouteParentStatus, key kinds.Route, o metav1.Object, parts []part) {
	delete(l, key)
	r, is := o.(*gwv1.HTTPRoute)
	if !is {
		return
	}
	for _, p := range parts {
		of := all[:p.n]
		all = all[p.n:]
		why := loops.OfRoute(p.front.Table, r)
		if why != "" && (l[key] != nil || len(l) < maxLooping) {
			if l[key] == nil {
				l[key] = map[svc.Name]*gateway.Table{}
			}
			l[key][p.of] = p.front.Table
		}
		for i := range of {
			if why != "" {
				of[i].Conditions = append(slices.Clip(of[i].Conditions), metav1.Condition{
					Type: names.ConditionLoop, Status: metav1.ConditionTrue, Reason: "RedirectLoop", Message: why, ObservedGeneration: r.Generation,
				})
			}
		}
	}
}

// ingressLoops are the Ingresses whose redirects send clients back, and why.
type ingressLoops struct {
	of       *gateway.Table // that was looked at
	why      map[svc.Name]string
	recorded recorded
}

// update looks at the Ingresses with redirects if the table is another one.
func (l *ingressLoops) update(t *gateway.Table, all map[svc.Name]*networkingv1.Ingress) {
	if l.of == t {
		return
	}
	l.of, l.why = t, map[svc.Name]string{}
	for n, in := range all {
		if nginx.Redirects(in.Annotations) {
			if why := loops.OfIngress(t, in); why != "" {
				l.why[n] = why
			}
		}
	}
}
