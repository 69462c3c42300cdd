package routes

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// reach adds the Gateways with something that depends on an object of the plan: a Service, a Secret, or a namespace with ReferenceGrants.
func (p *Plan) reach() {
	p.reachByRoutes()
	if len(p.services)+len(p.grants) > 0 {
		for _, w := range []*World{p.before, p.after} {
			w.reach(p)
		}
	}
	for _, w := range []*World{p.before, p.after} {
		for n, g := range w.Gateways {
			p.gateways[n] = p.gateways[n] || p.namespaces && selects(g) || p.names(certificatesOf(g.Spec.Listeners), g.Namespace) ||
				len(p.grants) > 0 && g.Spec.TLS != nil
		}
		for n, s := range w.Sets {
			of := parents.OfSet(s)
			p.gateways[of] = p.gateways[of] || p.names(certificatesOfSet(s), n.Namespace) || p.namespaces
		}
	}
	p.reachBuilt()
	p.reachNamed()
	maps.DeleteFunc(p.gateways, func(n svc.Name, is bool) bool { return !is || n == svc.Name{} })
}

// reachBuilt adds the Gateways whose front names a Secret, a Service or an object with authorities of the plan, by whichever field or
// annotation. The front knows that once it is built.
func (p *Plan) reachBuilt() {
	if len(p.secrets)+len(p.trusted)+len(p.services) == 0 {
		return
	}
	o := p.before.objects()
	for n := range p.before.Gateways {
		if p.gateways[n] {
			continue
		}
		f := p.before.gatewayFront(o, n, nil)
		if f == nil {
			continue
		}
		p.gateways[n] = slices.ContainsFunc(f.Named, func(s svc.Name) bool { return p.secrets[s] }) ||
			slices.ContainsFunc(f.NamedAuthorities(), func(r trust.Ref) bool { return p.trusted[r] }) ||
			slices.ContainsFunc(slices.Collect(maps.Keys(p.services)), f.Refers)
	}
}

// selects reports whether a Gateway asks for labels of namespaces.
func selects(g *gwv1.Gateway) bool {
	of := func(s *metav1.LabelSelector) bool { return s != nil }
	if a := g.Spec.AllowedListeners; a != nil && a.Namespaces != nil && of(a.Namespaces.Selector) {
		return true
	}
	return slices.ContainsFunc(g.Spec.Listeners, func(l gwv1.Listener) bool {
		return l.AllowedRoutes != nil && l.AllowedRoutes.Namespaces != nil && of(l.AllowedRoutes.Namespaces.Selector)
	})
}

func certificatesOf(listeners []gwv1.Listener) (out []gwv1.SecretObjectReference) {
	for i := range listeners {
		if t := listeners[i].TLS; t != nil {
			out = append(out, t.CertificateRefs...)
		}
	}
	return out
}

func certificatesOfSet(s *gwv1.ListenerSet) (out []gwv1.SecretObjectReference) {
	for i := range s.Spec.Listeners {
		if t := s.Spec.Listeners[i].TLS; t != nil {
			out = append(out, t.CertificateRefs...)
		}
	}
	return out
}

// names reports whether references of an object name a Secret of the plan, or one of a namespace whose ReferenceGrants change.
func (p *Plan) names(refs []gwv1.SecretObjectReference, namespace string) bool {
	return slices.ContainsFunc(refs, func(r gwv1.SecretObjectReference) bool {
		n := svc.Name{Namespace: namespace, Name: string(r.Name)}
		if r.Namespace != nil {
			n.Namespace = string(*r.Namespace)
		}
		return p.secrets[n] || n.Namespace != namespace && p.grants[n.Namespace]
	})
}

// reach adds the Gateways of the routes that name a Service of the plan, or one of a namespace whose ReferenceGrants change.
func (w *World) reach(p *Plan) {
	add := func(namespace string, services []svc.Name, refs []gwv1.ParentReference) {
		if slices.ContainsFunc(services, func(n svc.Name) bool { return p.services[n] || n.Namespace != namespace && p.grants[n.Namespace] }) {
			for _, g := range parents.Gateways(w.Sets, namespace, refs) {
				p.gateways[g] = true
			}
		}
	}
	for n, r := range w.Routes {
		add(n.Namespace, kinds.Requests{HTTP: r}.Services(), r.Spec.ParentRefs)
	}
	for n, r := range w.Calls {
		add(n.Namespace, kinds.Requests{GRPC: r}.Services(), r.Spec.ParentRefs)
	}
	for n, s := range w.Streams {
		var services []svc.Name
		for i := range s.Backends {
			to := svc.Name{Namespace: n.Namespace, Name: string(s.Backends[i].Name)}
			if s.Backends[i].Namespace != nil {
				to.Namespace = string(*s.Backends[i].Namespace)
			}
			services = append(services, to)
		}
		add(n.Namespace, services, s.Parents)
	}
}

func (p *Plan) ofGateways() (out []Front) {
	p.reach()
	o, now := p.before.objects(), p.after.objects()
	for _, n := range slices.SortedFunc(maps.Keys(p.gateways), svc.Name.Compare) {
		if p.work.over() {
			return nil
		}
		assumed := false
		if p.before.Gateways[n] == nil && p.after.Gateways[n] == nil {
			if p.before.Unread == nil || !p.before.Unread(n.Namespace) {
				p.note("there is no Gateway %s: nothing serves what names it as its parent", n)
				continue
			}
			p.note("you may not read Gateway %s: the plan is as if its listeners took all hosts and routes", n)
			assumed = true
			g := p.standIn(n)
			for _, w := range []*World{p.before, p.after} {
				w.Gateways[n] = g
				w.GatewayClasses[standInClass] = &gwv1.GatewayClass{Spec: gwv1.GatewayClassSpec{ControllerName: names.ControllerName}}
			}
		}
		was, is := p.before.oursGateway(n), p.after.oursGateway(n)
		if was == nil && is == nil {
			p.note("Gateway %s: its class is not of fairlead, which does not serve it", n)
			continue
		}
		a := p.before.gatewayFront(o, n, nil)
		b := p.after.gatewayFront(now, n, a)
		before, after := troubleOf(p.before, a, n), troubleOf(p.after, b, n)
		var had, has string
		if !assumed {
			a, had = p.before.served(n, a)
			b, has = p.after.served(n, b)
		}
		front := Front{Front: "Gateway " + n.String(), Service: names.ServiceOfGateway(n).String()}
		front.Changes = append(p.addresses(n), p.named(n, a != nil, had, has)...)
		c := comparison{was: newGatewaySide(a), is: newGatewaySide(b), assumed: assumed, work: p.work, walks: map[string]*walked{},
			why: func(listener string) string { return after.listener(listener, n) }}
		c.run()
		c.address(front.Service, a != nil && len(a.Ports()) > 0, b != nil && len(b.Ports()) > 0)
		front.Changes = append(append(front.Changes, c.out...), compareTrouble(before, after, p.isTouched)...)
		if a != nil && b != nil {
			front.Changes = append(front.Changes, p.authorities(a, b)...)
		}
		out = append(out, front)
	}
	return out
}

// named compares why a Gateway cannot have its Service, "" while it can. was reports whether it was served.
func (p *Plan) named(n svc.Name, was bool, had, has string) (out []Change) {
	c := Change{Where: "Gateway " + n.String()}
	switch {
	case has == had && (has == "" || !p.isTouched(c.Where)):
		return nil
	case has == had:
		c.Text = "is still not served: " + has
	case has == "":
		c.Text = "can have its Service now; before: " + had
	default:
		c.Text = "is not served: " + has
		if was {
			c.Cuts = "nothing answers at its addresses any more"
		}
	}
	return []Change{c}
}

// authorities compares the certificates of the authorities that a front names before and after the plan.
func (p *Plan) authorities(was, is *gateway.Front) (out []Change) {
	for _, r := range is.NamedAuthorities() {
		a, b := p.before.Authorities[r], p.after.Authorities[r]
		if !p.trusted[r] || !slices.Contains(was.NamedAuthorities(), r) || a == nil || b == nil || a.Problem+b.Problem != "" {
			continue // a reference that cannot be used, or is new, has its own lines
		}
		gone := without(a.Certificates, b.Certificates)
		c := Change{Where: r.String(), Text: fmt.Sprintf("has other certificates of authorities: %d come, %d go",
			without(b.Certificates, a.Certificates), gone)}
		if gone > 0 {
			c.Cuts = "backends and clients that are verified by it are refused if an authority that goes has signed their certificate"
		}
		out = append(out, c)
	}
	return out
}

// without counts what a list has and another one has not.
func without(list, other []string) (n int) {
	for _, x := range list {
		if !slices.Contains(other, x) {
			n++
		}
	}
	return n
}

// addresses compares the addresses that a Gateway asks for, and notes what becomes of its Service otherwise.
func (p *Plan) addresses(n svc.Name) (out []Change) {
	was, is := p.before.Gateways[n], p.after.Gateways[n]
	if was == nil || is == nil {
		return nil
	}
	text := func(g *gwv1.Gateway) (out []string) {
		for _, a := range g.Spec.Addresses {
			out = append(out, a.Value)
		}
		return out
	}
	from, to := text(was), text(is)
	if !slices.Equal(from, to) {
		c := Change{Where: "Gateway " + n.String(), Text: fmt.Sprintf("asks for addresses %v instead of %v", to, from)}
		if slices.ContainsFunc(from, func(a string) bool { return !slices.Contains(to, a) }) {
			c.Cuts = "nothing answers at its former addresses any more"
		}
		out = append(out, c)
	}
	if !reflect.DeepEqual(was.Spec.Infrastructure, is.Spec.Infrastructure) {
		p.note("Gateway %s: its infrastructure changes labels and annotations of Service %s: what these do is not in the plan", n,
			names.ServiceOfGateway(n))
	}
	return out
}

func newGatewaySide(f *gateway.Front) *side {
	if f == nil {
		return newSide(nil, nil, nil, false)
	}
	return newSide(f.Table, f.Targets, nil, false)
}

// standInClass is the class of Gateways that could not be read. No object can have the name.
const standInClass = "?"

// standIn returns a Gateway in place of one that could not be read: with listeners that take what routes of both Worlds ask for.
func (p *Plan) standIn(n svc.Name) *gwv1.Gateway {
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name},
		Spec: gwv1.GatewaySpec{GatewayClassName: standInClass, AllowedListeners: &gwv1.AllowedListeners{
			Namespaces: &gwv1.ListenerNamespaces{From: new(gwv1.NamespacesFromAll)},
		}}}
	type section struct {
		name     gwv1.SectionName
		port     gwv1.PortNumber
		protocol gwv1.ProtocolType
	}
	seen := map[section]bool{}
	for _, w := range []*World{p.before, p.after} {
		for route, refs := range w.routes() {
			for i := range refs {
				if parents.Gateway(route.Namespace, &refs[i]) != n {
					continue
				}
				s := section{protocol: protocolOf(route.Kind)}
				if refs[i].SectionName != nil {
					s.name = *refs[i].SectionName
				}
				if refs[i].Port != nil {
					s.port = *refs[i].Port
				}
				seen[s] = true
			}
		}
	}
	sections := slices.SortedFunc(maps.Keys(seen), func(a, b section) int {
		return cmp.Or(cmp.Compare(b.name, a.name), cmp.Compare(a.port, b.port), cmp.Compare(a.protocol, b.protocol))
	}) // the ones without a name come last
	taken := map[gwv1.PortNumber]bool{}
	for s := range seen {
		taken[s.port] = true
	}
	had := map[gwv1.PortNumber]bool{}
	free := gwv1.PortNumber(1)
	for i, s := range sections {
		if had[s.port] && s.port != 0 {
			continue // it would be in conflict with another one
		}
		had[s.port] = true
		l := gwv1.Listener{Name: cmp.Or(s.name, gwv1.SectionName(fmt.Sprintf("any-%d", i))), Protocol: s.protocol, Port: s.port,
			AllowedRoutes: &gwv1.AllowedRoutes{Namespaces: &gwv1.RouteNamespaces{From: new(gwv1.NamespacesFromAll)}}}
		for l.Port == 0 {
			if !taken[free] {
				l.Port, taken[free] = free, true
			}
			free++
		}
		if s.protocol == gwv1.TLSProtocolType {
			l.TLS = &gwv1.ListenerTLSConfig{Mode: new(gwv1.TLSModePassthrough)}
		}
		g.Spec.Listeners = append(g.Spec.Listeners, l)
	}
	return g
}

// protocolOf returns the protocol of a listener that takes routes of a kind.
func protocolOf(kind gwv1.Kind) gwv1.ProtocolType {
	switch kind {
	case kinds.TLSRoute:
		return gwv1.TLSProtocolType
	case kinds.TCPRoute:
		return gwv1.TCPProtocolType
	case kinds.UDPRoute:
		return gwv1.UDPProtocolType
	}
	return gwv1.HTTPProtocolType
}
