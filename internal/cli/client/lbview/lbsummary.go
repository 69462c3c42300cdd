package lbview

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Summary is what the page shows of load balancers: of many Services and routes the ones that need a look, and without what a Service
// leads to. Its JSON form is meant for programs: fields are only ever added.
type Summary struct {
	*Report
	// Routes are the routes of Gateways and of Services, and the Ingresses.
	Routes []Route `json:"routes"`
	// ServicesLeft and RoutesLeft are how many more there are.
	ServicesLeft int `json:"servicesLeft,omitempty"`
	RoutesLeft   int `json:"routesLeft,omitempty"`
}

// Bounds of a Summary.
const (
	maxSummary = 200 // Services, and routes
	maxOwners  = 8   // nodes of an address
)

// Route is a route of Gateways or of Services, or an Ingress.
type Route struct {
	Kind      string   `json:"kind"`
	Namespace string   `json:"namespace"`
	Name      string   `json:"name"`
	Hosts     []string `json:"hosts,omitempty"`
	// Parents are the Gateways, ListenerSets and Services that it names, or the class of an Ingress and the Services of its
	// fronts.
	Parents []string `json:"parents,omitempty"`
	explain.Judgement
}

// SummaryOf reports on the load balancers and routes of a namespace, all with "", with the rights of cfg. What the user may not read is
// in the Problems.
func SummaryOf(ctx context.Context, client kubernetes.Interface, cfg *rest.Config, namespace string) (*Summary, error) {
	own, err := v1.NewClient(cfg)
	if err != nil {
		return nil, err
	}
	gateways, err := api.NewClient(cfg)
	if err != nil {
		return nil, err
	}
	out := &Summary{Routes: []Route{}}
	if out.Report, _, err = collectLB(ctx, client, own, namespace, "", maxSummary); err != nil {
		return nil, err
	}
	out.ServicesLeft = out.left
	for i := range out.Services {
		for k := range out.Services[i].Addresses {
			out.Services[i].Addresses[k].cut()
		}
	}
	o := &frontObjects{client: client, api: gateways, in: namespace}
	if err := o.read(ctx); err != nil {
		return nil, err
	}
	for _, kind := range o.unread {
		out.Problems = append(out.Problems, "you may not list "+kind)
	}
	classes, err := o.classesOf(ctx)
	if err != nil {
		return nil, err
	}
	all := o.routesJudged(classes)
	ingresses, err := out.ingresses(ctx, o, namespace)
	if err != nil {
		return nil, err
	}
	all = append(all, ingresses...)
	slices.SortFunc(all, func(a, b judged) int {
		return cmp.Or(cmp.Compare(a.Status.Worst(), b.Status.Worst()), a.name.Compare(b.name), cmp.Compare(a.kind, b.kind))
	})
	out.RoutesLeft = max(len(all)-maxSummary, 0)
	for _, r := range all[:len(all)-out.RoutesLeft] {
		hosts, parents := r.more()
		r.Reason = base.PlainLine(r.Reason)
		out.Routes = append(out.Routes, Route{r.kind, r.name.Namespace, r.name.Name, hosts, parents, r.Judgement})
	}
	return out, nil
}

// cut leaves out owners: first the stale ones.
func (a *lbAddress) cut() {
	slices.SortStableFunc(a.Owners, func(x, y lbOwner) int {
		switch {
		case x.Stale == y.Stale:
			return 0
		case y.Stale:
			return -1
		}
		return 1
	})
	a.OwnersLeft = max(len(a.Owners)-maxOwners, 0)
	a.Owners = a.Owners[:len(a.Owners)-a.OwnersLeft]
}

// judged is a route or an Ingress with its judgement. more returns its hosts and parents.
type judged struct {
	explain.Judgement
	kind string
	name svc.Name
	more func() (hosts, parents []string)
}

// classesOf returns the controllers of GatewayClasses by their names, nil if the user may not list them.
func (o *frontObjects) classesOf(ctx context.Context) (map[string]string, error) {
	list, err := o.api.Classes().List(ctx, metav1.ListOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return nil, nil
	case err != nil && !apierrors.IsNotFound(err):
		return nil, err
	}
	out := map[string]string{}
	for _, c := range listed(list, err).Items {
		out[c.Name] = string(c.Spec.ControllerName)
	}
	return out, nil
}

// routesJudged judges the routes.
func (o *frontObjects) routesJudged(classes map[string]string) (out []judged) {
	for i := range o.routes {
		r := &o.routes[i]
		out = append(out, judged{o.judge(r, classes), r.shown.Kind, svc.Name{Namespace: r.shown.Namespace, Name: r.shown.Name},
			func() (hosts, parents []string) {
				for k := range r.parents {
					if p := parentText(r.shown.Namespace, &r.parents[k]); !slices.Contains(parents, p) {
						parents = append(parents, p)
					}
				}
				return r.shown.Hosts, parents
			}})
	}
	return out
}

// judge is the worst judgement of a route at its parents, with the reasons of all that have it.
func (o *frontObjects) judge(r *lbRouteObject, classes map[string]string) explain.Judgement {
	out := explain.Judgement{Status: explain.Foreign}
	var reasons []string
	for i := range r.parents {
		j := o.judgeAt(r, &r.parents[i], classes)
		if j.Status.Worst() < out.Status.Worst() {
			out.Status, reasons = j.Status, nil
		}
		if j.Status == out.Status && j.Reason != "" && !slices.Contains(reasons, j.Reason) {
			reasons = append(reasons, j.Reason)
		}
	}
	if out.Reason = strings.Join(reasons, "; "); len(r.parents) == 0 {
		out.Reason = "it names no parent"
	}
	return out
}

// judgeAt judges a route at one of its parents: by what its controller has written, or if none has, by the class.
func (o *frontObjects) judgeAt(r *lbRouteObject, p *gwv1.ParentReference, classes map[string]string) explain.Judgement {
	other := ""
	for i := range r.status {
		if s := &r.status[i]; equality.Semantic.DeepEqual(&s.ParentRef, p) {
			if s.ControllerName != names.ControllerName {
				other = string(s.ControllerName)
				continue
			}
			if wrong, _ := r.at(p); wrong != "" {
				return explain.Judgement{Status: explain.HasProblem, Reason: wrong}
			}
			return explain.Judgement{Status: explain.Served}
		}
	}
	if other != "" {
		return explain.Judgement{Status: explain.Foreign, Reason: "controller " + other + " serves it"}
	}
	return o.unlooked(r.shown.Namespace, p, classes)
}

// unlooked judges a route at a parent for which no controller has written a status.
func (o *frontObjects) unlooked(namespace string, p *gwv1.ParentReference, classes map[string]string) explain.Judgement {
	unknown := func(why string) explain.Judgement { return explain.Judgement{Status: explain.NotKnown, Reason: why} }
	problem := func(why string) explain.Judgement { return explain.Judgement{Status: explain.HasProblem, Reason: why} }
	gateway := parents.Gateway(namespace, p)
	if set := parents.Set(namespace, p); set != (svc.Name{}) {
		s := o.sets[set]
		switch {
		case s == nil && slices.Contains(o.unread, "listenersets"):
			return unknown("you may not list listenersets")
		case s == nil:
			return problem("there is no ListenerSet " + set.String())
		}
		gateway = parents.OfSet(s)
	}
	if gateway == (svc.Name{}) && parents.Service(namespace, p) == (svc.Name{}) {
		return explain.Judgement{Status: explain.Foreign, Reason: "no controller has looked at it, and fairlead serves no such parent"}
	}
	class := ""
	if gateway != (svc.Name{}) {
		g := o.gateways[gateway]
		switch {
		case g == nil && slices.Contains(o.unread, "gateways"):
			return unknown("you may not list gateways")
		case g == nil:
			return problem("there is no Gateway " + gateway.String())
		}
		class = string(g.Spec.GatewayClassName)
	}
	controller, known := classes[class]
	switch {
	case classes == nil:
		return unknown("you may not list gatewayclasses, and no controller has looked at it")
	case class == "" && !slices.Contains(slices.Collect(maps.Values(classes)), names.ControllerName):
		return unknown("no controller has looked at it, and no GatewayClass is of fairlead")
	case class != "" && !known:
		return unknown("there is no GatewayClass " + class)
	case class != "" && controller != names.ControllerName:
		return explain.Judgement{Status: explain.Foreign, Reason: "GatewayClass " + class + " is of controller " + controller}
	}
	return problem(notLooked)
}

// parentText names what a reference of a route leads to.
func parentText(namespace string, p *gwv1.ParentReference) string {
	for _, as := range []struct {
		kind string
		name svc.Name
	}{
		{"Gateway", parents.Gateway(namespace, p)}, {"ListenerSet", parents.Set(namespace, p)}, {"Service", parents.Service(namespace, p)},
	} {
		if as.name != (svc.Name{}) {
			return as.kind + " " + as.name.String()
		}
	}
	return string(p.Name)
}

// ingresses judges the Ingresses of a namespace, or all. What they lead to is found by the front of all of them, which takes the right to
// read all; a user without it gets what the Events of the namespace say.
func (s *Summary) ingresses(ctx context.Context, o *frontObjects, namespace string) (out []judged, err error) {
	missing, noClasses := "", ""
	v, err := o.readIngresses(ctx)
	if apierrors.IsForbidden(err) {
		missing = base.OneLine(err)
		v = &ingressView{}
		list, err := o.client.NetworkingV1().Ingresses(namespace).List(ctx, metav1.ListOptions{})
		if apierrors.IsForbidden(err) {
			s.Problems = append(s.Problems, "you may not list Ingresses: "+base.OneLine(err))
			return nil, nil
		} else if err != nil {
			return nil, err
		}
		classes, err := o.client.NetworkingV1().IngressClasses().List(ctx, metav1.ListOptions{})
		switch {
		case apierrors.IsForbidden(err):
			noClasses = "you may not list ingressclasses"
		case err != nil:
			return nil, err
		default:
			v.classes = classes.Items
		}
		v.list = list.Items
		v.events, v.silent = ingressEvents(ctx, o.client, namespace)
	} else if err != nil {
		return nil, err
	}
	classes := map[string]*networkingv1.IngressClass{}
	for i := range v.classes {
		classes[v.classes[i].Name] = &v.classes[i]
	}
	byDefault := names.DefaultClass(maps.Values(classes))
	for i := range v.list {
		in := &v.list[i]
		if namespace != "" && in.Namespace != namespace {
			continue
		}
		class := names.ClassOf(in, byDefault)
		j := v.judge(in, class, classes[class], noClasses, missing)
		out = append(out, judged{j, "Ingress", svc.NameOf(in), func() (hosts, parents []string) {
			if class != "" {
				parents = append(parents, "IngressClass "+class)
			}
			if v.ours != nil {
				for _, at := range v.split.At(svc.NameOf(in)) {
					parents = append(parents, "Service "+names.ServiceOfFront(at).String())
				}
			}
			return ingressHosts(in), parents
		}})
	}
	return out, nil
}

// judge judges an Ingress. noClasses is why no class is known, and missing why not all is known that it may lead to.
func (v *ingressView) judge(
	in *networkingv1.Ingress, class string, c *networkingv1.IngressClass, noClasses, missing string,
) explain.Judgement {
	unknown := func(why string) explain.Judgement { return explain.Judgement{Status: explain.NotKnown, Reason: why} }
	if c != nil {
		if ours, _ := names.OurIngressClass(c); !ours {
			return explain.Judgement{Status: explain.Foreign, Reason: "IngressClass " + class + " is of controller " + c.Spec.Controller}
		}
	}
	why := v.problem(in)
	switch {
	case why != "":
		return explain.Judgement{Status: explain.HasProblem, Reason: why}
	case noClasses != "":
		return unknown(noClasses)
	case class == "":
		return unknown("it names no class, and no IngressClass is the default")
	case c == nil:
		return unknown("there is no IngressClass " + class)
	case missing != "":
		return unknown("not all that it leads to may be read: " + missing)
	case len(in.Status.LoadBalancer.Ingress) == 0:
		return explain.Judgement{Status: explain.HasProblem, Reason: "its controller has written no address"}
	case v.silent && len(in.Spec.TLS) > 0:
		return unknown("you may not list Events, which name what is wrong with its Secrets")
	}
	return explain.Judgement{Status: explain.Served}
}

// ingressHosts are the hosts of the rules of an Ingress.
func ingressHosts(in *networkingv1.Ingress) (out []string) {
	for i := range in.Spec.Rules {
		if h := in.Spec.Rules[i].Host; h != "" && !slices.Contains(out, h) {
			out = append(out, h)
		}
	}
	return out
}
