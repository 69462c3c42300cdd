package routes

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// Front is what changes at a front.
type Front struct {
	// Front names it, as "Gateway infra/web", and Service is the Service with its addresses.
	Front   string   `json:"front"`
	Service string   `json:"service"`
	Changes []Change `json:"changes"`
}

// Plan collects changes of objects, and compares what their fronts serve.
type Plan struct {
	before, after *World
	now           time.Time
	// What may be served otherwise: objects of the plan, by their texts, and the ones that fronts are looked for by.
	touched    map[string]bool
	ingresses  map[svc.Name]bool
	gateways   map[svc.Name]bool
	routes     map[kinds.Route][]gwv1.ParentReference
	services   map[svc.Name]bool
	secrets    map[svc.Name]bool
	trusted    map[trust.Ref]bool
	grants     map[string]bool // namespaces
	namespaces bool
	deleted    []string // namespaces
	notes      []string
	work       *budget
}

// NewPlan returns a plan for a World. The caller may go on to put objects into the World until the first Add. Objects that are made
// without a time are made now.
func NewPlan(w *World, now time.Time) *Plan {
	return &Plan{
		before: w, now: now, touched: map[string]bool{}, ingresses: map[svc.Name]bool{}, gateways: map[svc.Name]bool{},
		services: map[svc.Name]bool{}, secrets: map[svc.Name]bool{}, grants: map[string]bool{}, trusted: map[trust.Ref]bool{},
		routes: map[kinds.Route][]gwv1.ParentReference{},
	}
}

// Concerns reports whether fronts may depend on an object, and which: of Ingresses, of Gateways. The spec of a Service counts that routes
// look at.
func Concerns(before, after any) (ingresses, gateways bool) {
	for _, o := range []any{before, after} {
		switch o.(type) {
		case *networkingv1.Ingress, *networkingv1.IngressClass:
			ingresses = true
		case *gwv1.Gateway, *gwv1.GatewayClass, *gwv1.ListenerSet, *gwv1.HTTPRoute, *gwv1.GRPCRoute, *gwv1.TLSRoute, *gwv1.TCPRoute,
			*gwv1.UDPRoute, *gwv1.BackendTLSPolicy, *corev1.Namespace:
			gateways = true
		case *gwv1.ReferenceGrant:
			ingresses, gateways = true, true
		}
	}
	a, wasService := before.(*corev1.Service)
	b, isService := after.(*corev1.Service)
	if wasService != isService || wasService && !services.Of(a).Equal(services.Of(b)) {
		return true, true
	}
	return ingresses, gateways
}

// Named returns the Secrets that objects of the plan name, as they are before or after it.
func (p *Plan) Named() (out []svc.Name) {
	add := func(namespace string, refs ...gwv1.SecretObjectReference) {
		for i := range refs {
			n := svc.Name{Namespace: namespace, Name: string(refs[i].Name)}
			if refs[i].Namespace != nil {
				n.Namespace = string(*refs[i].Namespace)
			}
			if n.Name != "" && !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}
	for _, w := range []*World{p.before, p.after} {
		for n := range p.ingresses {
			if in := w.Ingresses[n]; in != nil {
				for i := range in.Spec.TLS {
					add(n.Namespace, gwv1.SecretObjectReference{Name: gwv1.ObjectName(in.Spec.TLS[i].SecretName)})
				}
				if b := nginx.Read(in.Annotations).Basic; b != nil {
					add(n.Namespace, gwv1.SecretObjectReference{Name: gwv1.ObjectName(b.Secret)})
				}
			}
		}
		for n, g := range w.Gateways {
			if p.touched["Gateway "+n.String()] {
				add(n.Namespace, certificatesOf(g.Spec.Listeners)...)
				if t := g.Spec.TLS; t != nil && t.Backend != nil && t.Backend.ClientCertificateRef != nil {
					add(n.Namespace, *t.Backend.ClientCertificateRef)
				}
			}
		}
		for n, s := range w.Sets {
			if p.touched["ListenerSet "+n.String()] {
				add(n.Namespace, certificatesOfSet(s)...)
			}
		}
	}
	slices.SortFunc(out, svc.Name.Compare)
	return out
}

// Secret notes what becomes of a Secret. nil is for one that does not exist.
func (p *Plan) Secret(n svc.Name, before, after *gateway.Secret) {
	p.before.Secrets[n] = before
	p.change()
	p.after.Secrets[n] = after
	if !reflect.DeepEqual(before, after) {
		p.secrets[n] = true
	}
}

// Authority notes what becomes of an object with certificates of authorities. nil is for one that does not exist.
func (p *Plan) Authority(r trust.Ref, before, after *Authority) {
	p.before.Authorities[r] = before
	p.change()
	p.after.Authorities[r] = after
	if !reflect.DeepEqual(before, after) {
		p.trusted[r] = true
	}
}

// NamedAuthorities returns the objects with certificates of authorities that objects of the plan name, as they are before or after it.
func (p *Plan) NamedAuthorities() (out []trust.Ref) {
	p.change()
	add := func(r trust.Ref, ok bool) {
		if ok && !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	for _, w := range []*World{p.before, p.after} {
		for n, o := range w.Policies {
			if !p.touched["BackendTLSPolicy "+n.String()] {
				continue
			}
			for _, c := range o.Spec.Validation.CACertificateRefs {
				add(trust.RefOf(string(c.Group), string(c.Kind), svc.Name{Namespace: n.Namespace, Name: string(c.Name)}))
			}
		}
		for n, g := range w.Gateways {
			if !p.touched["Gateway "+n.String()] {
				continue
			}
			for _, c := range clientAuthorities(g) {
				to := svc.Name{Namespace: n.Namespace, Name: string(c.Name)}
				if c.Namespace != nil {
					to.Namespace = string(*c.Namespace)
				}
				add(trust.RefOf(string(c.Group), string(c.Kind), to))
			}
		}
	}
	slices.SortFunc(out, func(a, b trust.Ref) int { return cmp.Compare(a.String(), b.String()) })
	return out
}

// clientAuthorities returns what a Gateway names to verify clients by.
func clientAuthorities(g *gwv1.Gateway) (out []gwv1.ObjectReference) {
	if g.Spec.TLS == nil || g.Spec.TLS.Frontend == nil {
		return nil
	}
	add := func(v *gwv1.FrontendTLSValidation) {
		if v != nil {
			out = append(out, v.CACertificateRefs...)
		}
	}
	add(g.Spec.TLS.Frontend.Default.Validation)
	for i := range g.Spec.TLS.Frontend.PerPort {
		add(g.Spec.TLS.Frontend.PerPort[i].TLS.Validation)
	}
	return out
}

func (p *Plan) change() {
	if p.after == nil {
		p.after = p.before.clone()
	}
}

// isNil reports whether there is no object, also as a nil pointer.
func isNil(o any) bool { return o == nil || reflect.ValueOf(o).IsNil() }

// Add notes what becomes of an object. nil is for one that does not exist.
func (p *Plan) Add(before, after any) {
	p.change()
	if isNil(before) && isNil(after) {
		return
	}
	if isNil(after) {
		p.after.remove(before)
		if n, ok := before.(*corev1.Namespace); ok {
			p.note("Namespace %s: its objects go with it, which the plan does not have", n.Name)
			p.deleted = append(p.deleted, n.Name)
		}
	} else {
		if o, ok := after.(metav1.Object); ok && isNil(before) {
			created := o.GetCreationTimestamp()
			if created.IsZero() {
				created = metav1.NewTime(p.now)
			}
			// Of the dry run: once it is applied it is newer than what exists by now, also than what was made in the same second.
			o.SetCreationTimestamp(metav1.NewTime(created.Add(time.Second)))
		}
		p.after.Put(after)
	}
	was, _ := before.(*gwv1.BackendTLSPolicy)
	if is, _ := after.(*gwv1.BackendTLSPolicy); was != nil && is != nil && !reflect.DeepEqual(was.Spec.Validation, is.Spec.Validation) {
		p.note("BackendTLSPolicy %s: what it changes of the certificates that backends must have is not in the plan", svc.NameOf(is))
	}
	for _, o := range []any{before, after} {
		if !isNil(o) {
			p.touch(o)
		}
	}
}

// touch notes what an object of the plan may change.
func (p *Plan) touch(o any) {
	switch o := o.(type) {
	case *networkingv1.Ingress:
		p.ingresses[svc.NameOf(o)] = true
		p.touched["Ingress "+svc.NameOf(o).String()] = true
	case *gwv1.Gateway:
		p.gateways[svc.NameOf(o)] = true
		p.touched["Gateway "+svc.NameOf(o).String()] = true
	case *gwv1.GatewayClass:
		for _, w := range []*World{p.before, p.after} {
			for n, g := range w.Gateways {
				p.gateways[n] = p.gateways[n] || string(g.Spec.GatewayClassName) == o.Name
			}
		}
	case *gwv1.ListenerSet:
		p.gateways[parents.OfSet(o)] = true
		p.touched["ListenerSet "+svc.NameOf(o).String()] = true
	case *gwv1.HTTPRoute:
		p.route(kinds.Route{Kind: kinds.HTTPRoute, Name: svc.NameOf(o)}, o.Spec.ParentRefs)
	case *gwv1.GRPCRoute:
		p.route(kinds.Route{Kind: kinds.GRPCRoute, Name: svc.NameOf(o)}, o.Spec.ParentRefs)
	case *gwv1.TLSRoute, *gwv1.TCPRoute, *gwv1.UDPRoute:
		s := streamOf(o)
		p.route(s.Route(), s.Parents)
	case *gwv1.ReferenceGrant:
		p.grants[o.Namespace] = true
	case *gwv1.BackendTLSPolicy:
		for _, t := range o.Spec.TargetRefs {
			p.services[svc.Name{Namespace: o.Namespace, Name: string(t.Name)}] = true
		}
		p.touched["BackendTLSPolicy "+svc.NameOf(o).String()] = true
	case *corev1.Service:
		p.services[svc.NameOf(o)] = true
	case *corev1.Namespace:
		p.namespaces = true
	}
}

// route notes a route of the plan, with what it names as its parents before or after it.
func (p *Plan) route(r kinds.Route, refs []gwv1.ParentReference) {
	p.touched[routeText(r)] = true
	p.routes[r] = append(p.routes[r], refs...)
}

// reachByRoutes adds the Gateways that routes of the plan name, or the ListenerSets that they name.
func (p *Plan) reachByRoutes() {
	for _, r := range slices.SortedFunc(maps.Keys(p.routes), kinds.Route.Compare) {
		refs := p.routes[r]
		for _, w := range []*World{p.before, p.after} {
			for _, g := range parents.Gateways(w.Sets, r.Namespace, refs) {
				p.gateways[g] = true
			}
		}
		for i := range refs {
			if set := parents.Set(r.Namespace, &refs[i]); set != (svc.Name{}) && p.before.Sets[set] == nil && p.after.Sets[set] == nil {
				p.note("%s: ListenerSet %s does not exist, or may not be read: what the route changes there is not in the plan", routeText(r), set)
			}
		}
		for _, s := range parents.Services(r.Namespace, refs) {
			p.note("%s: what it changes for clients in the cluster, at Service %s, is not in the plan", routeText(r), s)
		}
	}
}

func (p *Plan) note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(p.notes, text) {
		p.notes = append(p.notes, text)
	}
}

// Fronts returns what changes at each front, and what the plan does not know. It is of no use if ctx is over by then.
func (p *Plan) Fronts(ctx context.Context) (out []Front, notes []string) {
	p.change()
	p.work = &budget{left: mostWork, over: func() bool { return ctx.Err() != nil }}
	out = append(p.ofIngresses(), p.ofGateways()...)
	for _, n := range p.deleted {
		out = append(out, Front{Front: "Namespace " + n, Changes: []Change{{Where: "Namespace " + n, Text: "goes with all of its objects",
			Cuts: "its Services, Ingresses, Gateways and routes are no longer served"}}})
	}
	for i := range out {
		out[i].Changes = merged(out[i].Changes)
	}
	out = slices.DeleteFunc(out, func(f Front) bool { return len(f.Changes) == 0 })
	slices.SortStableFunc(out, func(a, b Front) int { return cmp.Compare(a.Front, b.Front) })
	return out, p.notes
}

// merged joins changes that HTTP and HTTPS have alike, and puts the ones that cut first.
func merged(all []Change) (out []Change) {
	plain := map[Change]bool{}
	secure := map[Change]bool{}
	for _, c := range all {
		if rest, ok := strings.CutPrefix(c.Where, "http://"); ok {
			plain[Change{rest, c.Text, c.Cuts}] = true
		} else if rest, ok := strings.CutPrefix(c.Where, "https://"); ok {
			secure[Change{rest, c.Text, c.Cuts}] = true
		}
	}
	for _, c := range all {
		if rest, ok := strings.CutPrefix(c.Where, "http://"); ok && secure[Change{rest, c.Text, c.Cuts}] {
			continue
		}
		if rest, ok := strings.CutPrefix(c.Where, "https://"); ok && plain[Change{rest, c.Text, c.Cuts}] {
			c.Where = "http and https://" + rest
		}
		out = append(out, c)
	}
	order := func(c *Change) int {
		if c.Cuts != "" {
			return 0
		}
		return 1
	}
	place := func(c *Change) string { return strings.TrimPrefix(c.Where, "http and ") }
	slices.SortStableFunc(out, func(a, b Change) int {
		return cmp.Or(cmp.Compare(order(&a), order(&b)), cmp.Compare(place(&a), place(&b)), cmp.Compare(a.Text, b.Text))
	})
	return slices.Compact(out)
}

// class is what an Ingress's class makes of it.
type class struct{ ours, secured bool }

// touchedIngresses returns the Ingresses that may be at another front or be served otherwise.
func (p *Plan) touchedIngresses(before, after map[svc.Name]class) map[svc.Name]bool {
	out := maps.Clone(p.ingresses)
	for n := range p.after.Ingresses {
		out[n] = out[n] || before[n] != after[n]
	}
	maps.DeleteFunc(out, func(_ svc.Name, is bool) bool { return !is })
	return out
}

func classesOf(ours map[svc.Name]*networkingv1.Ingress, secured map[svc.Name]bool) map[svc.Name]class {
	out := make(map[svc.Name]class, len(ours))
	for n := range ours {
		out[n] = class{true, secured[n]}
	}
	return out
}

func (p *Plan) ofIngresses() (out []Front) {
	was, wasSecured := p.before.ours()
	is, isSecured := p.after.ours()
	if len(was)+len(is) == 0 {
		p.foreign(is)
		return nil
	}
	before, after := fronts.Of(was), fronts.Of(is)
	touched := after.Changed(before, p.touchedIngresses(classesOf(was, wasSecured), classesOf(is, isSecured)))
	o, now := p.before.objects(), p.after.objects()
	built := map[svc.Name]*gateway.IngressFront{}
	for f := range before.Fronts() {
		if touched[f] || len(p.services)+len(p.grants)+len(p.secrets) == 0 {
			continue
		}
		built[f] = p.before.ingressFront(o, before.Ingresses(f), wasSecured)
		refers := slices.ContainsFunc(slices.Collect(maps.Keys(p.services)), built[f].Refers)
		names := slices.ContainsFunc(built[f].Named, func(n svc.Name) bool { return p.secrets[n] })
		if refers || names || len(p.grants) > 0 && built[f].Granted() {
			touched[f] = true
		}
	}
	for f := range touched {
		if p.work.over() {
			return nil
		}
		front := Front{Front: "Ingresses at the shared front", Service: names.ServiceOfFront(f).String()}
		if f != names.SharedFront() {
			front.Front = "Ingress " + f.String() + " at its front"
		}
		a := built[f]
		if a == nil {
			a = p.before.ingressFront(o, before.Ingresses(f), wasSecured)
		}
		b := p.after.ingressFront(now, after.Ingresses(f), isSecured)
		c := comparison{was: newIngressSide(a, o), is: newIngressSide(b, now), ingress: true, why: func(string) string { return "" },
			work: p.work, walks: map[string]*walked{}}
		if c.partly = p.before.Partly && f == names.SharedFront(); !c.partly {
			c.address(front.Service, a != nil, b != nil)
		}
		c.run()
		front.Changes = append(c.out, compareTrouble(ingressTrouble(a), ingressTrouble(b), p.isTouched)...)
		out = append(out, front)
	}
	if problems := compareTrouble(splitTrouble(before, was), splitTrouble(after, is), p.isTouched); len(problems) > 0 {
		out = append(out, Front{Front: "Ingresses at no front", Changes: problems})
	}
	p.foreign(is)
	return out
}

// foreign notes the Ingresses of the plan that are of no class of fairlead.
func (p *Plan) foreign(ours map[svc.Name]*networkingv1.Ingress) {
	for _, n := range slices.SortedFunc(maps.Keys(p.ingresses), svc.Name.Compare) {
		in := p.after.Ingresses[n]
		if in == nil || ours[n] != nil {
			continue
		}
		name := names.ClassOf(in, names.DefaultClass(maps.Values(p.after.IngressClasses)))
		switch {
		case name == "":
			p.note("Ingress %s names no class, and no IngressClass is the default: nothing serves it", n)
		case p.after.IngressClasses[name] == nil:
			p.note("Ingress %s: there is no IngressClass %s: nothing serves it", n, name)
		default:
			p.note("Ingress %s: IngressClass %s is not of fairlead, which does not serve it", n, name)
		}
	}
}

// address is for the addresses of a front that comes or goes.
func (c *comparison) address(service string, was, is bool) {
	switch {
	case was && !is:
		c.add("Service "+service, "goes, and gives its addresses back", "nothing answers at them any more")
	case !was && is:
		c.add("Service "+service, "is made, and asks for an address", "")
	}
}

func newIngressSide(f *gateway.IngressFront, o *gateway.Objects) *side {
	if f == nil {
		return newSide(nil, nil, nil, true)
	}
	return newSide(f.Table, f.Targets, o.Secrets, true)
}

func ingressTrouble(f *gateway.IngressFront) trouble {
	t := trouble{}
	if f == nil {
		return t
	}
	for n, text := range f.Problems {
		t["Ingress "+n.String()] = text
	}
	for n, text := range f.Ignored {
		t["Ingress "+n.String()+", without effect"] = text
	}
	return t
}

func splitTrouble(s *fronts.Split, all map[svc.Name]*networkingv1.Ingress) trouble {
	t := trouble{}
	for n := range all {
		if text := s.Problem(n); text != "" {
			t["Ingress "+n.String()] = text
		}
		if text := s.Ignored(n); text != "" {
			t["Ingress "+n.String()+", without effect"] = text
		}
	}
	return t
}

// isTouched reports whether a text is about an object of the plan.
func (p *Plan) isTouched(where string) bool {
	if i := strings.Index(where, " of "); i >= 0 && strings.HasPrefix(where, "listener ") {
		where = where[i+len(" of "):]
	}
	where, _, _ = strings.Cut(where, " at ")
	where, _, _ = strings.Cut(where, ",")
	return p.touched[where]
}
