package lbview

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/svc"
)

// lbFront is what a Service that is a front leads to. It is part of the JSON of Report.
type lbFront struct {
	// Kind is Gateway or Ingress, and Name that of the Gateway, or of the Ingress that has the front for itself.
	Kind string `json:"kind"`
	Name string `json:"name,omitempty"`
	// Problem is why it is not served, or why it is not known what it leads to.
	Problem   string       `json:"problem,omitempty"`
	Listeners []lbListener `json:"listeners"`
	Routes    []lbRoute    `json:"routes"`
}

// lbListener is a listener of a Gateway, or of a ListenerSet.
type lbListener struct {
	Set      string `json:"listenerSet,omitempty"`
	Name     string `json:"name"`
	Port     int32  `json:"port"`
	Protocol string `json:"protocol"`
	Host     string `json:"host,omitempty"`
	Routes   int32  `json:"routes"`
	Problem  string `json:"problem,omitempty"`

	kinds   []string // of routes
	allowed func(namespace string) bool
	in      string // namespace
}

// lbRoute is a route, or an Ingress, of a front.
type lbRoute struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Listeners are where it attaches, none for an Ingress.
	Listeners []string `json:"listeners,omitempty"`
	Hosts     []string `json:"hosts,omitempty"`
	Leads     []lbLead `json:"leads"`
	// Problem is why it is not served, or not wholly.
	Problem string `json:"problem,omitempty"`
}

// lbLead is where the requests go that a match of a route takes.
type lbLead struct {
	Match string `json:"match,omitempty"`
	To    string `json:"to"`
}

const kindIngress = "Ingress"

// frontObjects are the objects of the Gateway API and Ingresses, read once for all fronts.
type frontObjects struct {
	client     kubernetes.Interface
	api        *api.Client
	gateways   map[svc.Name]*gwv1.Gateway
	sets       map[svc.Name]*gwv1.ListenerSet
	routes     []lbRouteObject
	namespaces map[string]labels.Set
	unread     []string // kinds that the user may not list
	failed     error    // why they are not known
	ingresses  *ingressView
	// ingressesFailed is why Ingresses are not known.
	ingressesFailed error
	in              string // the namespace of the routes that are read, empty for all
}

// lbRouteObject is a route of any kind.
type lbRouteObject struct {
	shown   lbRoute         // without Leads
	leads   func() []lbLead // of many routes few are shown
	parents []gwv1.ParentReference
	status  []gwv1.RouteParentStatus
}

// fronts adds what the Services of a report that are fronts lead to.
func (r *Report) fronts(ctx context.Context, client kubernetes.Interface, gateways *api.Client, all []corev1.Service) {
	o := &frontObjects{client: client, api: gateways}
	for i := range r.Services {
		r.Services[i].Front = o.frontOf(ctx, &all[i])
	}
}

// frontOf returns what a Service leads to, nil unless it is a front.
func (o *frontObjects) frontOf(ctx context.Context, s *corev1.Service) *lbFront {
	owner := metav1.GetControllerOf(s)
	switch {
	case s.Labels[names.FrontLabel] == names.FrontIngress:
		f, front := &lbFront{Kind: kindIngress, Listeners: []lbListener{}, Routes: []lbRoute{}}, names.SharedFront()
		if svc.NameOf(s) != names.IngressService() {
			if owner == nil || owner.Kind != kindIngress {
				return nil
			}
			f.Name, front = owner.Name, svc.Name{Namespace: s.Namespace, Name: owner.Name}
		}
		if all, err := o.readIngresses(ctx); err != nil {
			f.Problem = "its Ingresses are not known: " + base.PlainLine(err.Error())
		} else {
			all.at(f, front)
		}
		return f
	case s.Labels[names.FrontLabel] == names.FrontGateway && owner != nil && owner.Kind == "Gateway":
		f := &lbFront{Kind: owner.Kind, Name: owner.Name, Listeners: []lbListener{}, Routes: []lbRoute{}}
		if err := o.read(ctx); err != nil {
			f.Problem = "its routes are not known: " + base.PlainLine(err.Error())
			return f
		}
		o.gateway(f, svc.Name{Namespace: s.Namespace, Name: owner.Name})
		return f
	}
	return nil
}

// read reads the objects of the Gateway API. Kinds that are not defined have none.
func (o *frontObjects) read(ctx context.Context) error {
	if o.gateways == nil {
		o.failed = o.readAll(ctx)
	}
	return o.failed
}

func (o *frontObjects) readAll(ctx context.Context) error {
	all := metav1.ListOptions{}
	gateways, sets := map[svc.Name]*gwv1.Gateway{}, map[svc.Name]*gwv1.ListenerSet{}
	var routes []lbRouteObject
	o.gateways = gateways // also after an error: it is not tried again for each front
	for _, read := range []func() error{
		func() error {
			list, err := o.api.Gateways("").List(ctx, all)
			for i := range listed(list, err).Items {
				gateways[svc.NameOf(&list.Items[i])] = &list.Items[i]
			}
			return err
		},
		func() error {
			list, err := o.api.Sets("").List(ctx, all)
			for i := range listed(list, err).Items {
				sets[svc.NameOf(&list.Items[i])] = &list.Items[i]
			}
			return err
		},
		func() error {
			list, err := o.api.Routes(o.in).List(ctx, all)
			for i := range listed(list, err).Items {
				routes = append(routes, requestsOf(&list.Items[i]))
			}
			return err
		},
		func() error {
			list, err := o.api.Calls(o.in).List(ctx, all)
			for i := range listed(list, err).Items {
				routes = append(routes, callsOf(&list.Items[i]))
			}
			return err
		},
		func() error {
			list, err := o.api.TLSRoutes(o.in).List(ctx, all)
			for i := range listed(list, err).Items {
				routes = append(routes, streamOf(kinds.StreamOfTLS(&list.Items[i])))
			}
			return err
		},
		func() error {
			list, err := o.api.TCPRoutes(o.in).List(ctx, all)
			for i := range listed(list, err).Items {
				routes = append(routes, streamOf(kinds.StreamOfTCP(&list.Items[i])))
			}
			return err
		},
		func() error {
			list, err := o.api.UDPRoutes(o.in).List(ctx, all)
			for i := range listed(list, err).Items {
				routes = append(routes, streamOf(kinds.StreamOfUDP(&list.Items[i])))
			}
			return err
		},
	} {
		var refused apierrors.APIStatus
		switch err := read(); {
		case err == nil, apierrors.IsNotFound(err):
		case apierrors.IsForbidden(err) && errors.As(err, &refused) && refused.Status().Details != nil:
			o.unread = append(o.unread, refused.Status().Details.Kind)
		default:
			return err
		}
	}
	namespaces := map[string]labels.Set{}
	if list, err := o.client.CoreV1().Namespaces().List(ctx, all); err == nil { // only selectors need them
		for i := range list.Items {
			namespaces[list.Items[i].Name] = list.Items[i].Labels
		}
	}
	o.gateways, o.sets, o.routes, o.namespaces = gateways, sets, routes, namespaces
	return nil
}

// listed returns a list, an empty one after an error.
func listed[L any](list *L, err error) *L {
	if err != nil || list == nil {
		return new(L)
	}
	return list
}

// gateway fills in the listeners and routes of a Gateway, by its status and the statuses of its routes.
func (o *frontObjects) gateway(f *lbFront, n svc.Name) {
	unread := ""
	if len(o.unread) > 0 {
		unread = "you may not list " + strings.Join(o.unread, ", ") + ": what they lead to is not known"
	}
	g := o.gateways[n]
	if g == nil {
		if f.Problem = "the Gateway does not exist"; slices.Contains(o.unread, "gateways") {
			f.Problem = unread
		}
		return
	}
	f.Problem = cmp.Or(wrongOf(g.Status.Conditions), unread)
	for i := range g.Spec.Listeners {
		f.Listeners = append(f.Listeners, o.listener(n.Namespace, "", &g.Spec.Listeners[i], g.Status.Listeners))
	}
	for _, at := range slices.SortedFunc(maps.Keys(o.sets), svc.Name.Compare) {
		set := o.sets[at]
		if parents.OfSet(set) != n {
			continue
		}
		var have []gwv1.ListenerStatus
		for _, l := range set.Status.Listeners {
			have = append(have, gwv1.ListenerStatus(l))
		}
		for _, l := range set.Spec.Listeners {
			shown := o.listener(at.Namespace, at.String(), new(gwv1.Listener(l)), have)
			shown.Problem = cmp.Or(shown.Problem, wrongOf(set.Status.Conditions))
			f.Listeners = append(f.Listeners, shown)
		}
	}
	for i := range o.routes {
		if r, is := o.attached(&o.routes[i], n, f.Listeners); is {
			f.Routes = append(f.Routes, r)
		}
	}
	f.sort()
}

func (f *lbFront) sort() {
	slices.SortFunc(f.Routes, func(a, b lbRoute) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
	})
}

// listener returns a listener with its status.
func (o *frontObjects) listener(namespace, set string, l *gwv1.Listener, have []gwv1.ListenerStatus) lbListener {
	out := lbListener{Set: set, Name: string(l.Name), Port: l.Port, Protocol: string(l.Protocol), in: namespace}
	if l.Hostname != nil {
		out.Host = strings.ToLower(string(*l.Hostname))
	}
	out.allowed = o.allowed(namespace, l.AllowedRoutes)
	at := slices.IndexFunc(have, func(h gwv1.ListenerStatus) bool { return h.Name == l.Name })
	if at < 0 {
		out.Problem = "it has no status yet"
		return out
	}
	out.Routes = have[at].AttachedRoutes
	for _, k := range have[at].SupportedKinds {
		out.kinds = append(out.kinds, string(k.Kind))
	}
	out.Problem = wrongOf(have[at].Conditions, string(gwv1.ListenerConditionConflicted))
	return out
}

// allowed returns which namespaces may attach routes to a listener.
func (o *frontObjects) allowed(namespace string, a *gwv1.AllowedRoutes) func(string) bool {
	from, selector := gwv1.NamespacesFromSame, labels.Nothing()
	if a != nil && a.Namespaces != nil && a.Namespaces.From != nil {
		from = *a.Namespaces.From
		if s, err := metav1.LabelSelectorAsSelector(a.Namespaces.Selector); err == nil {
			selector = s
		}
	}
	return func(of string) bool {
		switch from {
		case gwv1.NamespacesFromAll:
			return true
		case gwv1.NamespacesFromSelector:
			return selector.Matches(o.namespaces[of])
		default:
			return of == namespace
		}
	}
}

// attached returns a route as a Gateway has it, and whether the route names the Gateway or one of its ListenerSets.
func (o *frontObjects) attached(r *lbRouteObject, g svc.Name, listeners []lbListener) (out lbRoute, is bool) {
	out = r.shown
	var problems []string
	for i := range r.parents {
		p := &r.parents[i]
		set := parents.Set(out.Namespace, p)
		ofSet := o.sets[set] != nil && parents.OfSet(o.sets[set]) == g
		if parents.Gateway(out.Namespace, p) != g && !ofSet {
			continue
		}
		is = true
		wrong, accepted := r.at(p)
		if wrong != "" && !slices.Contains(problems, wrong) {
			problems = append(problems, wrong)
		}
		for k := range listeners {
			if l := &listeners[k]; accepted && (l.Set == "") != ofSet && (!ofSet || l.Set == set.String()) && l.takes(&out, p) {
				out.Listeners = append(out.Listeners, l.name())
			}
		}
	}
	if is {
		out.Leads = append(out.Leads, r.leads()...)
	}
	slices.Sort(out.Listeners)
	out.Listeners, out.Problem = slices.Compact(out.Listeners), strings.Join(problems, "; ")
	return out, is
}

// at returns what is wrong with a route at one of its parents, and whether it is accepted there.
func (r *lbRouteObject) at(p *gwv1.ParentReference) (wrong string, accepted bool) {
	wrong = notLooked
	for _, s := range r.status {
		if s.ControllerName == names.ControllerName && equality.Semantic.DeepEqual(&s.ParentRef, p) {
			wrong = wrongOf(s.Conditions, string(gwv1.RouteConditionPartiallyInvalid))
			accepted = meta.IsStatusConditionTrue(s.Conditions, string(gwv1.RouteConditionAccepted))
		}
	}
	return wrong, accepted
}

// notLooked is what is wrong with an object without a status of its controller.
const notLooked = "its controller has not looked at it yet"

func (l *lbListener) name() string {
	if l.Set != "" {
		return l.Set + "/" + l.Name
	}
	return l.Name
}

// takes reports whether a route that is accepted by a reference attaches to the listener.
func (l *lbListener) takes(r *lbRoute, p *gwv1.ParentReference) bool {
	if p.SectionName != nil && string(*p.SectionName) != l.Name || p.Port != nil && *p.Port != l.Port {
		return false
	}
	if !slices.Contains(l.kinds, r.Kind) || !l.allowed(r.Namespace) {
		return false
	}
	return len(r.Hosts) == 0 || slices.ContainsFunc(r.Hosts, func(h string) bool {
		_, ok := hostpath.Intersect(l.Host, strings.ToLower(h))
		return ok
	})
}

// wrongOf returns the first condition that is not as it should be, "" if all are. bad are the types that should not be True, beside
// fairlead's own, of which only names.ConditionCertificate should be.
func wrongOf(all []metav1.Condition, bad ...string) string {
	for _, k := range all {
		wrong := k.Status != metav1.ConditionTrue
		ownBad := strings.HasPrefix(k.Type, svc.Domain+"/") && k.Type != names.ConditionCertificate
		if slices.Contains(bad, k.Type) || ownBad {
			wrong = k.Status == metav1.ConditionTrue
		}
		if wrong && k.Type != string(gwv1.GatewayConditionInsecureFrontendValidationMode) {
			return base.PlainLine(fmt.Sprintf("%s is %s, %s: %s", k.Type, k.Status, k.Reason, k.Message))
		}
	}
	return ""
}
