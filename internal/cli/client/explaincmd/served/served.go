// Package served reads what decides about the hosts and paths of Ingresses and Gateways, as far as the user may, and compares these before
// and after a change.
package served

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/listing"
	"github.com/fairlead/fairlead/internal/explain/routes"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// All is what Fronts reads, in words.
const All = "Ingresses and Gateways with their classes, routes and Secrets"

// readNames is what Fronts reads one by one, in words.
const readNames = "Secrets and ConfigMaps that these name"

// kindsOf returns what Fronts reads, in its order.
func kindsOf(ingresses, gateways bool) (out []string) {
	out = append(out, "IngressClasses")
	if ingresses {
		out = append(out, "Ingresses")
	}
	out = append(out, "ReferenceGrants")
	if gateways {
		out = append(out, "GatewayClasses", "Gateways", "ListenerSets", "HTTPRoutes", "GRPCRoutes", "TLSRoutes", "TCPRoutes", "UDPRoutes",
			"BackendTLSPolicies", "Namespaces")
	}
	return append(out, readNames)
}

// Routes are the objects of a plan by which Ingresses and Gateways serve hosts and paths.
type Routes struct {
	Client kubernetes.Interface
	Config *rest.Config
	Reader *listing.Reader
	// Services are as they are before the change.
	Services []*corev1.Service
	// Problems are what the plan does not know.
	Problems []string

	changed             []change
	ingresses, gateways bool
	// direct is set if an object of the plan is for fronts: not only a Service, which any may lead to.
	direct bool
	// guesses are what the user may not read. They count for a Service only if a front may lead to it.
	guesses []string

	world *routes.World
	kinds []string // that were read, and have namespaces
}

// change is what becomes of an object. One that does not exist is nil.
type change struct{ before, after any }

// Add takes what becomes of an object over. changes is false if it stays as it is.
func (s *Routes) Add(before, after any, changes bool) {
	if before == nil && after == nil || !changes {
		return
	}
	s.changed = append(s.changed, change{before, after})
	ingresses, gateways := routes.Concerns(before, after)
	_, wasService := before.(*corev1.Service)
	_, isService := after.(*corev1.Service)
	s.direct = s.direct || (ingresses || gateways) && !wasService && !isService
	if trusted := authorityOf(before) != nil || authorityOf(after) != nil; trusted || isSecret(before) || isSecret(after) {
		gateways, s.direct = true, true
		ingresses = ingresses || isSecret(before) || isSecret(after) // names and passwords, and certificates
	}
	s.ingresses, s.gateways = s.ingresses || ingresses, s.gateways || gateways
}

func isSecret(o any) bool {
	c, ok := o.(*corev1.Secret)
	return ok && c != nil
}

// authorityOf returns the certificates of authorities that an object may have, nil if its kind or its entries have none.
func authorityOf(o any) []byte {
	switch o := o.(type) {
	case *corev1.ConfigMap:
		if o == nil {
			return nil
		}
		if text, has := o.Data[trust.Entry]; has {
			return []byte(text)
		}
	case *corev1.Secret:
		if o != nil {
			return o.Data[trust.Entry]
		}
	}
	return nil
}

// World returns the objects that were read, as they are before the change. It has none if nothing was read.
func (s *Routes) World() *routes.World {
	if s.world == nil {
		return routes.NewWorld()
	}
	return s.world
}

// Fronts returns what the objects change at the fronts of Ingresses and Gateways, and adds problems.
func (s *Routes) Fronts(ctx context.Context) ([]routes.Front, error) {
	if s.Reader.Begin(All); !s.ingresses && !s.gateways {
		s.Reader.End()
		return nil, nil
	}
	s.Reader.Expect(kindsOf(s.ingresses, s.gateways)...)
	s.world = routes.NewWorld()
	for _, o := range s.Services {
		s.world.Put(o)
	}
	if err := s.read(ctx); err != nil {
		return nil, err
	}
	p := routes.NewPlan(s.world, time.Now())
	known := map[trust.Ref]bool{}
	for _, d := range s.changed {
		was, isSecret := d.before.(*corev1.Secret)
		is, willBe := d.after.(*corev1.Secret)
		if isSecret || willBe {
			p.Secret(readSecret(was, is))
		}
		if s.authorities(p, d, known) || isSecret || willBe {
			continue
		}
		p.Add(d.before, d.after)
	}
	s.readNamed(ctx, p, known)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.Reader.Compare()
	fronts, notes := p.Fronts(ctx)
	if s.direct || len(fronts) > 0 || len(s.world.Grants) > 0 {
		s.Problems = append(s.Problems, s.guesses...)
	}
	s.Problems = append(s.Problems, notes...)
	return fronts, nil
}

// readSecret returns what fronts ask of a Secret, before and after a change.
func readSecret(was, is *corev1.Secret) (n svc.Name, before, after *gateway.Secret) {
	if was != nil {
		n, before = svc.NameOf(was), new(watch.ReadSecret(was))
	}
	if is != nil {
		n, after = svc.NameOf(is), new(watch.ReadSecret(is))
	}
	return n, before, after
}

// authorities notes what becomes of an object with certificates of authorities. It reports whether it is a ConfigMap.
func (s *Routes) authorities(p *routes.Plan, d change, known map[trust.Ref]bool) (isMap bool) {
	of := func(o any) (r trust.Ref, a *routes.Authority) {
		switch o := o.(type) {
		case *corev1.ConfigMap:
			if o != nil {
				isMap = true
				return trust.Ref{Kind: trust.ConfigMap, Name: svc.NameOf(o)}, readAuthority(authorityOf(o))
			}
		case *corev1.Secret:
			if o != nil {
				return trust.Ref{Kind: trust.Secret, Name: svc.NameOf(o)}, readAuthority(authorityOf(o))
			}
		}
		return r, nil
	}
	r, before := of(d.before)
	next, after := of(d.after)
	if r == (trust.Ref{}) {
		r = next
	}
	if r != (trust.Ref{}) {
		known[r] = true
		p.Authority(r, before, after)
	}
	return isMap
}

func readAuthority(text []byte) *routes.Authority {
	certs, problem := watch.ReadAuthorities(text)
	a := &routes.Authority{Problem: problem}
	for _, c := range certs {
		a.Certificates = append(a.Certificates, string(c.Raw))
	}
	return a
}

// read reads the objects that decide about routes.
func (s *Routes) read(ctx context.Context) error {
	gateways, err := api.NewClient(s.Config)
	if err != nil {
		return err
	}
	net := s.Client.NetworkingV1()
	s.world.AnyIngressClass = whole(ctx, s, "IngressClasses", net.IngressClasses().List, func(o *networkingv1.IngressClass) { s.world.Put(o) })
	if s.ingresses {
		list(ctx, s, "Ingresses", func(n string) listing.Func[*networkingv1.IngressList] { return net.Ingresses(n).List },
			func(o *networkingv1.Ingress) { s.world.Put(o) })
		if s.world.AnyIngressClass && len(s.world.Ingresses) > 0 {
			s.guess("you may not list IngressClasses: the plan is as if each Ingress had a class of fairlead")
		}
	}
	list(ctx, s, "ReferenceGrants", func(n string) listing.Func[*gwv1.ReferenceGrantList] { return gateways.Grants(n).List },
		func(o *gwv1.ReferenceGrant) { s.world.Put(o) })
	if s.gateways {
		s.readGateways(ctx, gateways)
	}
	if err := s.Reader.Failed(); err != nil {
		return err
	}
	partly := s.Reader.Beyond("Ingresses") != nil
	s.world.Hidden, s.world.Unowned, s.world.Partly = s.Reader.Beyond("ReferenceGrants"), s.Reader.Beyond("Services"), partly
	if what, has, lacks := s.Reader.Partly(s.kinds...); what != "" {
		text := fmt.Sprintf("you may not list %s of all namespaces: the plan has the ones of %s, and does not know which hosts others have",
			what, has)
		if lacks != "" {
			text += " (" + lacks + ")"
		}
		s.guess(text)
	}
	return nil
}

func (s *Routes) readGateways(ctx context.Context, from *api.Client) {
	s.world.AnyGatewayClass = whole(ctx, s, "GatewayClasses", from.Classes().List,
		func(o *gwv1.GatewayClass) { s.world.Put(o) })
	list(ctx, s, "Gateways", func(n string) listing.Func[*gwv1.GatewayList] { return from.Gateways(n).List },
		func(o *gwv1.Gateway) { s.world.Put(o) })
	if s.world.AnyGatewayClass {
		s.guess("you may not list GatewayClasses: the plan is as if each Gateway had a class of fairlead")
	}
	s.world.Unread = s.Reader.Beyond("Gateways")
	list(ctx, s, "ListenerSets", func(n string) listing.Func[*gwv1.ListenerSetList] { return from.Sets(n).List },
		func(o *gwv1.ListenerSet) { s.world.Put(o) })
	list(ctx, s, "HTTPRoutes", func(n string) listing.Func[*gwv1.HTTPRouteList] { return from.Routes(n).List },
		func(o *gwv1.HTTPRoute) { s.world.Put(o) })
	list(ctx, s, "GRPCRoutes", func(n string) listing.Func[*gwv1.GRPCRouteList] { return from.Calls(n).List },
		func(o *gwv1.GRPCRoute) { s.world.Put(o) })
	list(ctx, s, "TLSRoutes", func(n string) listing.Func[*gwv1.TLSRouteList] { return from.TLSRoutes(n).List },
		func(o *gwv1.TLSRoute) { s.world.Put(o) })
	list(ctx, s, "TCPRoutes", func(n string) listing.Func[*gwv1.TCPRouteList] { return from.TCPRoutes(n).List },
		func(o *gwv1.TCPRoute) { s.world.Put(o) })
	list(ctx, s, "UDPRoutes", func(n string) listing.Func[*gwv1.UDPRouteList] { return from.UDPRoutes(n).List },
		func(o *gwv1.UDPRoute) { s.world.Put(o) })
	list(ctx, s, "BackendTLSPolicies", func(n string) listing.Func[*gwv1.BackendTLSPolicyList] { return from.Policies(n).List },
		func(o *gwv1.BackendTLSPolicy) { s.world.Put(o) })
	if whole(ctx, s, "Namespaces", s.Client.CoreV1().Namespaces().List,
		func(o *corev1.Namespace) { s.world.Put(o) }) {
		s.guess("you may not list Namespaces: a listener that asks for labels of namespaces takes no routes in the plan")
	}
}

func (s *Routes) guess(text string) { s.guesses = append(s.guesses, text) }

// list reads the objects of a kind. What a namespace of the plan itself refuses is a problem.
func list[L runtime.Object, T any](ctx context.Context, s *Routes, kind string, of func(string) listing.Func[L], put func(*T)) {
	for _, o := range listing.List[L, T](ctx, s.Reader, kind, of) {
		put(o)
	}
	s.kinds = append(s.kinds, kind)
	if refused := s.Reader.Own(kind); len(refused) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("which %s there are is not known of namespace %s: you may not list them", kind,
			strings.Join(refused, ", ")))
	}
}

// whole reads the objects of a kind without namespaces. It reports whether the user may not list them.
func whole[L runtime.Object, T any](ctx context.Context, s *Routes, kind string, of listing.Func[L], put func(*T)) bool {
	all, may := listing.Whole[L, T](ctx, s.Reader, kind, of)
	for _, o := range all {
		put(o)
	}
	return !may
}

// mostNamed bounds the Secrets and the ConfigMaps that are read, one by one.
const mostNamed = 100

// readNamed reads the Secrets that objects of the plan name, and the objects with authorities that they name. known are the ones of the
// plan, of which the Secrets are all known.
func (s *Routes) readNamed(ctx context.Context, p *routes.Plan, known map[trust.Ref]bool) {
	s.Reader.Begin(readNames)
	var unread []string
	count := 0
	read := func(r trust.Ref, put func(cm *corev1.ConfigMap, secret *corev1.Secret)) {
		if known[r] {
			return
		}
		var cm *corev1.ConfigMap
		var secret *corev1.Secret
		err := fmt.Errorf("there are more than %d", mostNamed)
		if count++; count <= mostNamed {
			ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
			defer cancel()
			s.Reader.Count(1)
			if r.Kind == trust.ConfigMap {
				cm, err = s.Client.CoreV1().ConfigMaps(r.Namespace).Get(ctx, r.Name.Name, metav1.GetOptions{})
			} else {
				secret, err = s.Client.CoreV1().Secrets(r.Namespace).Get(ctx, r.Name.Name, metav1.GetOptions{})
			}
		}
		switch {
		case err == nil:
			put(cm, secret)
		case apierrors.IsNotFound(err):
			put(nil, nil)
		default:
			unread = append(unread, r.String())
		}
	}
	for _, n := range p.Named() {
		read(trust.Ref{Kind: trust.Secret, Name: n}, func(_ *corev1.ConfigMap, o *corev1.Secret) {
			_, have, _ := readSecret(o, nil)
			p.Secret(n, have, have)
		})
	}
	for _, r := range p.NamedAuthorities() {
		read(r, func(cm *corev1.ConfigMap, secret *corev1.Secret) {
			var have *routes.Authority
			switch {
			case cm != nil:
				have = readAuthority(authorityOf(cm))
			case secret != nil:
				have = readAuthority(authorityOf(secret))
			}
			p.Authority(r, have, have)
		})
	}
	const named = 5
	if more := len(unread) - named; more > 0 {
		unread = append(unread[:named], fmt.Sprintf("%d more", more))
	}
	if len(unread) > 0 {
		s.guess("not read, and taken as usable: " + strings.Join(unread, ", "))
	}
}

// Bounds of what is printed: of the changes of a front, and of fronts.
const (
	mostPrinted = 50
	mostFronts  = 20
)

// Print writes what changes at fronts.
func Print(out io.Writer, fronts []routes.Front) {
	cutting := func(changes []routes.Change) (n int) {
		for _, c := range changes {
			if c.Cuts != "" {
				n++
			}
		}
		return n
	}
	for k, f := range fronts {
		if k == mostFronts {
			cuts := 0
			for _, f := range fronts[k:] {
				cuts += min(cutting(f.Changes), 1)
			}
			fmt.Fprintf(out, "\n... and %d more fronts, of which %d cut requests or connections: -o json has all\n", len(fronts)-k, cuts)
			break
		}
		fmt.Fprintf(out, "\n%s\n", base.PlainLine(f.Front))
		for i, c := range f.Changes {
			if i == mostPrinted {
				break
			}
			fmt.Fprintf(out, "  %s: %s\n", base.PlainLine(c.Where), base.PlainLine(c.Text))
			if c.Cuts != "" {
				fmt.Fprintf(out, "  ! CUT: %s\n", base.PlainLine(c.Cuts))
			}
		}
		if rest := f.Changes[min(len(f.Changes), mostPrinted):]; len(rest) > 0 {
			fmt.Fprintf(out, "  ... and %d more, of which %d cut requests or connections: -o json has all\n", len(rest), cutting(rest))
		}
	}
}
