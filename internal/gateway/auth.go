package gateway

import (
	"cmp"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/svc"
)

// Auth is who decides about requests. Without a valid Backend none of them passes.
type Auth struct {
	filter.Auth
	Backend Backend
	own     bool // it is at the path Target of the host: see askOwn
}

// Asked returns where the server of the rule's Auth is. It is always a Service, which is reached as a backend is:
// no name is resolved, and no rule names an address.
func (r *Rule) Asked() Target { return Target{Backend: r.Auth.Backend} }

// auth reads a filter of type ExternalAuth.
func (b *ruleCompiler) auth(rule *Rule, spec *gwv1.HTTPExternalAuthFilter, at string) {
	if rule.Auth != nil {
		b.fail("%s: a rule can have one filter of type ExternalAuth", at)
		return
	}
	rule.Auth = &Auth{Auth: *read(b, filter.ReadAuth, spec, at)}
	protocol, ok := HTTP1, false
	if rule.Auth.GRPC {
		protocol = H2C
	}
	if rule.Auth.Backend, ok = b.resolve(&spec.BackendRef, at+".backendRef", protocol); ok {
		b.route.leadsTo(rule.Asked())
	}
}

// auth has the requests of a rule of an Ingress authorized. The Service may be of another namespace by a ReferenceGrant.
func (b *ingressBuilder) auth(a *annotatedIngress, r *Rule) {
	spec, at := a.Auth, "annotation "+nginx.Prefix+"auth-url"
	name := svc.Name{Namespace: cmp.Or(spec.Namespace, a.Namespace), Name: spec.Service}
	r.Auth = &Auth{own: spec.Own, Auth: filter.Auth{
		Method: cmp.Or(spec.Method, "GET"), Host: spec.Host, Target: spec.Target, AskAll: true, Take: spec.Fields, Nginx: &spec.NginxAuth,
	}}
	for _, f := range spec.Fields {
		if r.Closed = r.Closed || !filter.ValidField(f, "x"); r.Closed {
			b.problem(a.Ingress, "annotation %sauth-response-headers: %s belongs to messages and connections; requests are answered with 503",
				nginx.Prefix, f)
			return
		}
	}
	if spec.Own {
		return
	}
	b.front.granted = b.front.granted || name.Namespace != a.Namespace
	from := gwv1.ReferenceGrantFrom{Group: networkingv1.GroupName, Kind: kindIngress, Namespace: gwv1.Namespace(a.Namespace)}
	if !b.objects.Grants.Permit(from, "Service", name) {
		b.problem(a.Ingress, "%s: no ReferenceGrant of namespace %s permits Service %s; requests are answered with 503", at, name.Namespace, name)
		return
	}
	port := networkingv1.ServiceBackendPort{Number: int32(spec.Port)}
	backend, ok := b.service(a.Ingress, name, port, at, func(string) (BackendProtocol, bool) {
		if spec.TLS {
			return HTTPS, true
		}
		return HTTP1, true
	})
	if ok {
		r.Auth.Backend = backend
		b.follow(r.Asked())
	}
}

// askOwn finds the servers of the rules that have theirs at a path of the same host, once all rules are there. The server is the backend
// of that path, which must be open to everybody: it is asked as it is, and by no other rule.
func askOwn(b *ingressBuilder) {
	for host, matches := range b.rules {
		var all *paths
		for i, m := range matches {
			if m.Rule.Auth == nil || !m.Rule.Auth.own {
				continue
			}
			if all == nil {
				all = newPaths(slices.Clone(matches))
			}
			rule, with, auth := *m.Rule, *m, *m.Rule.Auth
			rule.Auth, with.Rule, with.toHTTPS, matches[i] = &auth, &rule, nil, &with
			path, _, _ := strings.Cut(auth.Target, "?")
			to := all.find(&Request{Host: host, Path: path, Method: auth.Method, Fields: filter.NoFields{}}, path)
			if to == nil || !plain(to.Rule) {
				b.problem(b.objects.Ingresses[rule.Route.Name], "annotation %sauth-url: host %q has no path for %s that leads to a Service "+
					"without authorization, other limits of clients, redirects and rewrites; requests are answered with 503", nginx.Prefix, host, path)
				continue
			}
			auth.Backend, auth.Host = to.Rule.Backends[0].Backend, to.Rule.Filters.Rewrite.Host
			b.follow(rule.Asked())
		}
	}
}

// plain reports whether a rule lets every request go to its backend as it is.
func plain(r *Rule) bool {
	return !r.Closed && r.Redirect == nil && r.Auth == nil && r.Basic == nil && r.Access == nil && r.Filters.Rewrite.Path == nil &&
		len(r.Backends) > 0 && r.Backends[0].Valid
}

// basic has the clients of a rule of an Ingress give a name and a password.
func (b *ingressBuilder) basic(a *annotatedIngress, r *Rule) {
	from := basic.Source{Secret: svc.Name{Namespace: a.Namespace, Name: a.Basic.Secret}, Map: a.Basic.Map}
	r.Basic = &basic.Rule{Source: from, Realm: a.Basic.Realm}
	if n := a.Basic.Namespace; n != "" && n != a.Namespace {
		r.Basic.Source = basic.Source{}
		b.problem(a.Ingress, "annotation %sauth-secret: it is of another namespace; requests are answered with 503", nginx.Prefix)
		return
	}
	use := "passwords"
	if from.Map {
		use = "passwords by name"
	}
	wrong := b.named.AddFor(use, from.Secret, func(n svc.Name) (string, bool) {
		secret, known := b.objects.Secrets[n]
		if from.Map {
			return secret.NoMap, known
		}
		return secret.NoFile, known
	})
	if wrong != "" {
		b.problem(a.Ingress, "annotation %sauth-secret: Secret %s: %s; requests are answered with 503", nginx.Prefix, from.Secret, wrong)
	}
}
