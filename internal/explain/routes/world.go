// Package routes compares what fronts of Ingresses and Gateways serve before and after a change of objects: for each host and path by
// the code that decides about requests. It is pure.
package routes

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// World has the objects that decide what fronts serve, of every class.
type World struct {
	Ingresses      map[svc.Name]*networkingv1.Ingress
	IngressClasses map[string]*networkingv1.IngressClass
	Gateways       map[svc.Name]*gwv1.Gateway
	GatewayClasses map[string]*gwv1.GatewayClass
	Sets           map[svc.Name]*gwv1.ListenerSet
	Routes         map[svc.Name]*gwv1.HTTPRoute
	Calls          map[svc.Name]*gwv1.GRPCRoute
	Streams        map[kinds.Route]*kinds.Stream
	Grants         map[svc.Name]*gwv1.ReferenceGrant
	Policies       map[svc.Name]*gwv1.BackendTLSPolicy
	Namespaces     map[string]map[string]string // labels
	Services       map[svc.Name]*services.Service
	// Secrets are the ones that were read, nil for one that does not exist. Others count as if they could be used.
	Secrets map[svc.Name]*gateway.Secret
	// Authorities are the objects with certificates of authorities that were read, as Secrets has its objects.
	Authorities map[trust.Ref]*Authority
	// AnyIngressClass and AnyGatewayClass are set if the classes could not be read: then each object counts as one of fairlead.
	AnyIngressClass, AnyGatewayClass bool
	// Partly is set if Ingresses of other namespaces may be at the shared front, too: then it stays whatever becomes of the known ones.
	Partly bool
	// Unread reports whether the Gateways of a namespace could not be read, and Hidden whether its Services or its ReferenceGrants could
	// not: then it has the Services that routes name, and permits what names them. nil is for no namespace.
	Unread, Hidden func(namespace string) bool
	// Unowned reports whether the Services of a namespace could not be read. nil is for no namespace.
	Unowned func(namespace string) bool
	// owners has whose front each of Services is.
	owners map[svc.Name]owner
}

// Authority is what an object has of certificates of authorities.
type Authority struct {
	// Problem is why it cannot be used, "" if it can.
	Problem string
	// Certificates are in DER.
	Certificates []string
}

// NewWorld returns a World without objects.
func NewWorld() *World {
	return &World{
		Ingresses: map[svc.Name]*networkingv1.Ingress{}, IngressClasses: map[string]*networkingv1.IngressClass{},
		Gateways: map[svc.Name]*gwv1.Gateway{}, GatewayClasses: map[string]*gwv1.GatewayClass{}, Sets: map[svc.Name]*gwv1.ListenerSet{},
		Routes: map[svc.Name]*gwv1.HTTPRoute{}, Calls: map[svc.Name]*gwv1.GRPCRoute{}, Streams: map[kinds.Route]*kinds.Stream{},
		Grants: map[svc.Name]*gwv1.ReferenceGrant{}, Policies: map[svc.Name]*gwv1.BackendTLSPolicy{},
		Namespaces: map[string]map[string]string{}, Services: map[svc.Name]*services.Service{}, Secrets: map[svc.Name]*gateway.Secret{},
		Authorities: map[trust.Ref]*Authority{}, owners: map[svc.Name]owner{},
	}
}

// clone returns a World of the same objects.
func (w *World) clone() *World {
	out := *w
	out.Ingresses, out.IngressClasses = maps.Clone(w.Ingresses), maps.Clone(w.IngressClasses)
	out.Gateways, out.GatewayClasses, out.Sets = maps.Clone(w.Gateways), maps.Clone(w.GatewayClasses), maps.Clone(w.Sets)
	out.Routes, out.Calls, out.Streams = maps.Clone(w.Routes), maps.Clone(w.Calls), maps.Clone(w.Streams)
	out.Grants, out.Policies, out.Namespaces = maps.Clone(w.Grants), maps.Clone(w.Policies), maps.Clone(w.Namespaces)
	out.Services, out.Secrets, out.Authorities = maps.Clone(w.Services), maps.Clone(w.Secrets), maps.Clone(w.Authorities)
	out.owners = maps.Clone(w.owners)
	return &out
}

// Put takes an object over. Objects of kinds that no front depends on change nothing.
func (w *World) Put(o any) { w.slot(o).put() }

// remove takes an object out.
func (w *World) remove(o any) { w.slot(o).remove() }

// slot is the place of an object in a World.
type slot struct{ put, remove func() }

// in returns the slot of a value in a map.
func in[K comparable, V any](all map[K]V, key K, value V) slot {
	return slot{func() { all[key] = value }, func() { delete(all, key) }}
}

// slot returns the place of an object. It is the one table of the kinds that fronts depend on.
func (w *World) slot(o any) slot {
	switch o := o.(type) {
	case *networkingv1.Ingress:
		return in(w.Ingresses, svc.NameOf(o), o)
	case *networkingv1.IngressClass:
		return in(w.IngressClasses, o.Name, o)
	case *gwv1.Gateway:
		return in(w.Gateways, svc.NameOf(o), o)
	case *gwv1.GatewayClass:
		return in(w.GatewayClasses, o.Name, o)
	case *gwv1.ListenerSet:
		return in(w.Sets, svc.NameOf(o), o)
	case *gwv1.HTTPRoute:
		return in(w.Routes, svc.NameOf(o), o)
	case *gwv1.GRPCRoute:
		return in(w.Calls, svc.NameOf(o), o)
	case *gwv1.TLSRoute, *gwv1.TCPRoute, *gwv1.UDPRoute:
		s := streamOf(o)
		return in(w.Streams, s.Route(), s)
	case *gwv1.ReferenceGrant:
		return in(w.Grants, svc.NameOf(o), o)
	case *gwv1.BackendTLSPolicy:
		return in(w.Policies, svc.NameOf(o), o)
	case *corev1.Namespace:
		return in(w.Namespaces, o.Name, o.Labels)
	case *corev1.Service:
		service, of := in(w.Services, svc.NameOf(o), services.Of(o)), in(w.owners, svc.NameOf(o), ownerOf(o))
		return slot{func() { service.put(); of.put() }, func() { service.remove(); of.remove() }}
	}
	return slot{func() {}, func() {}}
}

func streamOf(o any) *kinds.Stream {
	switch o := o.(type) {
	case *gwv1.TLSRoute:
		return kinds.StreamOfTLS(o)
	case *gwv1.TCPRoute:
		return kinds.StreamOfTCP(o)
	case *gwv1.UDPRoute:
		return kinds.StreamOfUDP(o)
	}
	return nil
}

// ours returns the Ingresses of a class of fairlead, and the ones of ingress-nginx among them.
func (w *World) ours() (out map[svc.Name]*networkingv1.Ingress, secured map[svc.Name]bool) {
	out, secured = map[svc.Name]*networkingv1.Ingress{}, map[svc.Name]bool{}
	byDefault := names.DefaultClass(maps.Values(w.IngressClasses))
	for n, in := range w.Ingresses {
		if w.AnyIngressClass {
			out[n] = in
			continue
		}
		c := w.IngressClasses[names.ClassOf(in, byDefault)]
		if c == nil {
			continue
		}
		if ours, nginx := names.OurIngressClass(c); ours {
			out[n] = in
			if nginx {
				secured[n] = true
			}
		}
	}
	return out, secured
}

// oursGateway returns a Gateway that exists and has a class of fairlead, else nil.
func (w *World) oursGateway(n svc.Name) *gwv1.Gateway {
	g := w.Gateways[n]
	if g == nil || w.AnyGatewayClass {
		return g
	}
	if c := w.GatewayClasses[string(g.Spec.GatewayClassName)]; c == nil || !names.OurClass(c) {
		return nil
	}
	return g
}

// objects returns what fronts are built from, without Gateways and Ingresses.
func (w *World) objects() *gateway.Objects {
	o := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{}, Routes: w.Routes, Calls: w.Calls, Streams: w.Streams, Sets: w.Sets, Grants: w.Grants,
		Namespaces: w.Namespaces, Services: w.Services, Secrets: map[svc.Name]gateway.Secret{}, Policies: trust.NewPolicies(),
		Authorities: map[trust.Ref]string{},
	}
	for n, p := range w.Policies {
		o.Policies.Set(n, p)
	}
	for n, s := range w.Secrets {
		if s != nil {
			o.Secrets[n] = *s
		}
	}
	for r, a := range w.Authorities {
		if a != nil {
			o.Authorities[r] = a.Problem
		}
	}
	if w.Hidden != nil {
		w.reveal(o)
	}
	o.Named = o.Index()
	return o
}

// reveal adds the Services that routes name in hidden namespaces, and the ReferenceGrants for them.
func (w *World) reveal(o *gateway.Objects) {
	o.Services, o.Grants = maps.Clone(w.Services), maps.Clone(w.Grants)
	add := func(kind gwv1.Kind, namespace string, refs ...gwv1.BackendObjectReference) {
		for i := range refs {
			if refs[i].Namespace == nil || refs[i].Port == nil || string(*refs[i].Namespace) == namespace || !w.Hidden(string(*refs[i].Namespace)) {
				continue
			}
			to := svc.Name{Namespace: string(*refs[i].Namespace), Name: string(refs[i].Name)}
			if o.Services[to] == nil {
				o.Services[to] = &services.Service{}
			}
			udp := kind == kinds.UDPRoute
			if s := o.Services[to]; w.Services[to] == nil && s.Find(*refs[i].Port, udp) == nil {
				s.Ports = append(s.Ports, services.Port{Number: uint16(*refs[i].Port), UDP: udp}) //nolint:gosec // the kind's definition bounds it
			}
			grant := svc.Name{Namespace: to.Namespace, Name: standInClass + string(kind) + namespace}
			o.Grants[grant] = &gwv1.ReferenceGrant{Spec: gwv1.ReferenceGrantSpec{
				From: []gwv1.ReferenceGrantFrom{kinds.From(kind, namespace)}, To: []gwv1.ReferenceGrantTo{{Kind: "Service"}}}}
		}
	}
	for n, r := range w.Routes {
		for i := range r.Spec.Rules {
			for _, b := range r.Spec.Rules[i].BackendRefs {
				add(kinds.HTTPRoute, n.Namespace, b.BackendObjectReference)
			}
		}
	}
	for n, r := range w.Calls {
		for i := range r.Spec.Rules {
			for _, b := range r.Spec.Rules[i].BackendRefs {
				add(kinds.GRPCRoute, n.Namespace, b.BackendObjectReference)
			}
		}
	}
	for n, s := range w.Streams {
		for _, b := range s.Backends {
			add(n.Kind, n.Namespace, b.BackendObjectReference)
		}
	}
}

// mostBuilds bounds how often a front is built: once it is known which Secrets and authorities it names, and again with these.
const mostBuilds = 3

// ingressFront builds a front of Ingresses.
func (w *World) ingressFront(o *gateway.Objects, at map[svc.Name]*networkingv1.Ingress, secured map[svc.Name]bool) *gateway.IngressFront {
	if len(at) == 0 {
		return nil
	}
	with := *o
	with.Ingresses, with.Secured = at, secured
	var f *gateway.IngressFront
	for range mostBuilds {
		f = gateway.BuildIngress(&with, f)
		if !w.assume(&with, f.Named) {
			break
		}
	}
	return f
}

// gatewayFront builds the front of a Gateway. before is that of another World, or nil.
func (w *World) gatewayFront(o *gateway.Objects, n svc.Name, before *gateway.Front) *gateway.Front {
	g := w.oursGateway(n)
	if g == nil {
		return nil
	}
	o.Gateways[n] = g
	f := before
	for range mostBuilds {
		f = gateway.BuildGateway(o, n, f)
		again := w.assume(o, f.Named)
		for _, r := range f.NamedAuthorities() {
			_, read := w.Authorities[r]
			if _, known := o.Authorities[r]; !known && !read {
				o.Authorities[r], again = "", true
			}
		}
		if !again {
			break
		}
	}
	return f
}

// assume has Secrets count that were not read. It reports whether there are any.
func (w *World) assume(o *gateway.Objects, named []svc.Name) (some bool) {
	for _, n := range named {
		if _, read := w.Secrets[n]; read {
			continue
		}
		if _, assumed := o.Secrets[n]; !assumed {
			o.Secrets[n], some = gateway.Secret{}, true
		}
	}
	return some
}
