package controller

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
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
	of       map[svc.Name]*gateway.Table      // that were looked at, by front
	why      map[svc.Name]map[svc.Name]string // by front and Ingress
	recorded recorded
}

func newIngressLoops() ingressLoops {
	return ingressLoops{of: map[svc.Name]*gateway.Table{}, why: map[svc.Name]map[svc.Name]string{}, recorded: recorded{}}
}

// update looks at the Ingresses with redirects of the fronts that have another table than before.
func (l *ingressLoops) update(all map[svc.Name]*gateway.IngressFront, split *fronts.Split) {
	maps.DeleteFunc(l.of, func(n svc.Name, _ *gateway.Table) bool { return all[n] == nil })
	maps.DeleteFunc(l.why, func(n svc.Name, _ map[svc.Name]string) bool { return all[n] == nil })
	for front, f := range all {
		if l.of[front] == f.Table {
			continue
		}
		l.of[front], l.why[front] = f.Table, map[svc.Name]string{}
		for n, in := range split.Ingresses(front) {
			if nginx.Redirects(in.Annotations) {
				if why := loops.OfIngress(f.Table, in); why != "" {
					l.why[front][n] = why
				}
			}
		}
	}
}

// at returns why redirects of an Ingress send clients back at its fronts, "" if none does.
func (l *ingressLoops) at(n svc.Name, split *fronts.Split) (why string) {
	for _, front := range split.At(n) {
		why = joined(why, l.why[front][n])
	}
	return why
}
