package controller

import (
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/loops"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// part is how many statuses of a route are of a front.
type part struct {
	front *gateway.Front
	n     int
}

// withLoops appends names.ConditionLoop to the statuses of an HTTPRoute for the fronts at which its redirects send clients back. It
// looks at a route when the route or its fronts change, and not when only another route of the chain does.
func withLoops(all []gwv1.RouteParentStatus, o metav1.Object, parts []part) {
	r, is := o.(*gwv1.HTTPRoute)
	if !is {
		return
	}
	for _, p := range parts {
		of := all[:p.n]
		all = all[p.n:]
		why := loops.OfRoute(p.front.Table, r)
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
		for key := range in.Annotations {
			if strings.Contains(key, "redirect") || strings.HasSuffix(key, "/app-root") {
				if why := loops.OfIngress(t, in); why != "" {
					l.why[n] = why
				}
				break
			}
		}
	}
}
