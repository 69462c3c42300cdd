package lbview

import (
	"cmp"
	"context"
	"maps"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// ingressView has the Ingresses that a user may read, and builds their fronts.
type ingressView struct {
	classes []networkingv1.IngressClass
	list    []networkingv1.Ingress
	// ours are the ones of this controller, with all that they may lead to, nil if not all may be read; split has their fronts, and built
	// the fronts that were asked for.
	ours  *gateway.Objects
	split *fronts.Split
	built map[svc.Name]*gateway.IngressFront
	// events are why Ingresses were not served, by their UIDs. They are not known if silent is set.
	events map[string]string
	silent bool
}

// at fills in what the Ingresses at a front lead to.
func (v *ingressView) at(f *lbFront, front svc.Name) {
	ours := v.split.Ingresses(front)
	if len(ours) == 0 {
		f.Problem = cmp.Or(v.split.Problem(front), "no Ingress is served at it")
		return
	}
	for _, n := range slices.SortedFunc(maps.Keys(ours), svc.Name.Compare) {
		r := ingressOf(ours[n])
		r.Problem = base.PlainLine(cmp.Or(v.front(front).Problems[n], v.events[string(ours[n].UID)]))
		f.Routes = append(f.Routes, r)
	}
	for _, l := range []lbListener{
		{Name: "http", Port: gateway.IngressHTTP, Protocol: "HTTP"}, {Name: "https", Port: gateway.IngressHTTPS, Protocol: "HTTPS"},
	} {
		if v.front(front).Table.Ports[uint16(l.Port)] != nil { //nolint:gosec // a port
			l.Routes = int32(len(f.Routes)) //nolint:gosec // objects of the API
			f.Listeners = append(f.Listeners, l)
		}
	}
}

// front builds a front as nodes do, but for what is in Secrets, which are not read: Events of the last hour name what is wrong with these.
func (v *ingressView) front(at svc.Name) *gateway.IngressFront {
	if built := v.built[at]; built != nil {
		return built
	}
	objects := *v.ours
	objects.Ingresses, objects.Secrets = v.split.Ingresses(at), map[svc.Name]gateway.Secret{}
	for _, n := range gateway.BuildIngress(&objects, nil).Named {
		objects.Secrets[n] = gateway.Secret{}
	}
	v.built[at] = gateway.BuildIngress(&objects, nil)
	return v.built[at]
}

// problem is why an Ingress of this controller is not served.
func (v *ingressView) problem(in *networkingv1.Ingress) string {
	n, why := svc.NameOf(in), v.events[string(in.UID)]
	if v.ours != nil {
		for _, at := range v.split.At(n) {
			why = cmp.Or(v.front(at).Problems[n], why)
		}
		why = cmp.Or(v.split.Problem(n), why)
	}
	return base.PlainLine(why)
}

// readIngresses reads all Ingresses, once.
func (o *frontObjects) readIngresses(ctx context.Context) (*ingressView, error) {
	if o.ingresses == nil {
		o.ingresses = &ingressView{built: map[svc.Name]*gateway.IngressFront{}}
		o.ingressesFailed = o.ingresses.read(ctx, o)
	}
	return o.ingresses, o.ingressesFailed
}

func (v *ingressView) read(ctx context.Context, o *frontObjects) error {
	all := metav1.ListOptions{}
	classes, err := o.client.NetworkingV1().IngressClasses().List(ctx, all)
	if err != nil {
		return err
	}
	list, err := o.client.NetworkingV1().Ingresses("").List(ctx, all)
	if err != nil {
		return err
	}
	v.classes, v.list = classes.Items, list.Items
	ours := ingressesOf(classes.Items, list.Items)
	v.split = fronts.Of(ours.Ingresses)
	if v.ours = ours; len(ours.Ingresses) == 0 {
		return nil
	}
	have, err := o.client.CoreV1().Services("").List(ctx, all)
	if err != nil {
		v.ours = nil
		return err
	}
	for i := range have.Items {
		ours.Services[svc.NameOf(&have.Items[i])] = services.Of(&have.Items[i])
	}
	if grants, err := o.api.Grants("").List(ctx, all); err == nil {
		for i := range grants.Items {
			ours.Grants[svc.NameOf(&grants.Items[i])] = &grants.Items[i]
		}
	}
	v.events, v.silent = ingressEvents(ctx, o.client, "")
	return nil
}

// ingressEvents returns why Ingresses of a namespace, or of all, were not served, by their UIDs. silent is set if Events may not be read.
func ingressEvents(ctx context.Context, client kubernetes.Interface, namespace string) (out map[string]string, silent bool) {
	out, last := map[string]string{}, map[string]string{}
	for _, reason := range []string{names.IngressServed, names.IngressNotServed} {
		list, err := client.CoreV1().Events(namespace).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.kind=Ingress,reason=" + reason})
		if err != nil {
			return map[string]string{}, true
		}
		for _, e := range list.Items {
			uid := string(e.InvolvedObject.UID)
			// Times have whole seconds, in which both may come.
			newer, err := resourceversion.CompareResourceVersion(e.ResourceVersion, cmp.Or(last[uid], "1"))
			if err == nil && newer < 0 {
				continue
			}
			if out[uid], last[uid] = e.Message, e.ResourceVersion; reason == names.IngressServed {
				out[uid] = ""
			}
		}
	}
	return out, false
}

// ingressesOf returns the Ingresses that are of a class of this controller.
func ingressesOf(classes []networkingv1.IngressClass, all []networkingv1.Ingress) *gateway.Objects {
	o := &gateway.Objects{
		Grants: trust.Grants{}, Services: map[svc.Name]*services.Service{}, Secrets: map[svc.Name]gateway.Secret{},
		Ingresses: map[svc.Name]*networkingv1.Ingress{}, Secured: map[svc.Name]bool{}, Policies: trust.NewPolicies(),
	}
	known := map[string]*networkingv1.IngressClass{}
	for i := range classes {
		known[classes[i].Name] = &classes[i]
	}
	byDefault := names.DefaultClass(maps.Values(known))
	for i := range all {
		in := &all[i]
		c := known[names.ClassOf(in, byDefault)]
		if c == nil {
			continue
		}
		if ours, nginx := names.OurIngressClass(c); ours {
			o.Ingresses[svc.NameOf(in)] = in
			if nginx {
				o.Secured[svc.NameOf(in)] = true
			}
		}
	}
	return o
}
