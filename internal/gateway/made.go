package gateway

import (
	"fmt"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/svc"
)

// madeIngress is what was made of an Ingress. The next front takes it over while the Ingress and its Services are the same objects: a
// change costs little more than itself, and hosts keep their parts of the table.
type madeIngress struct {
	options *nginx.Options
	paths   []hostMatch
	last    *match // of its default backend, nil without one
	// kept is false if more than its Services was looked at, or something is wrong.
	kept    bool
	secured bool // Objects.Secured
	refs    []ingressRef
	targets []Target
}

// hostMatch is a match of a host.
type hostMatch struct {
	host  string
	match *match
}

// ingressRef is a Service that an Ingress names, as it was found.
type ingressRef struct {
	to    svc.Name
	found *services.Service
}

// holds reports whether the same would be made again. All hosts of the Ingress were its own, or there would be a problem.
func (m *madeIngress) holds(b *ingressBuilder, a *annotatedIngress) bool {
	n := svc.NameOf(a.Ingress)
	if !m.kept || m.secured != b.objects.Secured[n] || b.front.Problems[n] != "" || a.meetsExpressions(b) {
		return false
	}
	return !slices.ContainsFunc(m.refs, func(r ingressRef) bool { return b.objects.Services[r.to] != r.found })
}

// meetsExpressions reports whether an Ingress that protects has a host at which paths are regular expressions.
func (a *annotatedIngress) meetsExpressions(b *ingressBuilder) bool {
	return a.Protects() && slices.ContainsFunc(a.Spec.Rules, func(r networkingv1.IngressRule) bool {
		return b.expressed[svc.Name{Namespace: a.Namespace, Name: strings.ToLower(r.Host)}]
	})
}

// again has nodes follow what the Ingress leads to.
func (m *madeIngress) again(b *ingressBuilder) {
	for _, r := range m.refs {
		b.front.refers[r.to] = true
	}
	for _, t := range m.targets {
		b.follow(t)
	}
}

// makeIngress makes the matches of an Ingress for the hosts that it owns.
func makeIngress(b *ingressBuilder, a *annotatedIngress, hosts map[string]bool) *madeIngress {
	in, index := a.Ingress, 0
	made := &madeIngress{options: a.Options, secured: b.objects.Secured[svc.NameOf(in)]}
	rule := func(m *match, backend *networkingv1.IngressBackend, at string) {
		m.Rule = b.rule(a, index, backend, at)
		index++
		b.annotate(a, m)
		if backend.Service != nil {
			to := svc.Name{Namespace: in.Namespace, Name: backend.Service.Name}
			made.refs = append(made.refs, ingressRef{to, b.objects.Services[to]})
		}
		for i := range m.Rule.Backends {
			if w := &m.Rule.Backends[i]; w.Valid && !m.Rule.Closed && !slices.Contains(made.targets, m.Rule.Target(w)) {
				made.targets = append(made.targets, m.Rule.Target(w))
			}
		}
	}
	for i := range in.Spec.Rules {
		spec := &in.Spec.Rules[i]
		host := strings.ToLower(spec.Host)
		if spec.HTTP == nil || !hosts[host] {
			continue
		}
		for j := range spec.HTTP.Paths {
			at := fmt.Sprintf("rules[%d].http.paths[%d]", i, j)
			m, ok := b.path(a, host, &spec.HTTP.Paths[j], at)
			if !ok {
				continue
			}
			if m.Rule == nil {
				rule(m, &spec.HTTP.Paths[j].Backend, at+".backend")
			}
			made.paths = append(made.paths, hostMatch{host, m})
		}
	}
	if d := in.Spec.DefaultBackend; d != nil {
		made.last = &match{kind: lastMatch}
		rule(made.last, d, "defaultBackend")
	}
	made.refs = slices.Compact(made.refs)
	made.kept = a.Auth == nil && a.Basic == nil && a.DefaultBackend == "" &&
		!a.expressions() && !a.meetsExpressions(b) && b.front.Problems[svc.NameOf(in)] == ""
	return made
}
