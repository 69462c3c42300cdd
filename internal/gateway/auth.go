package gateway

import (
	"cmp"

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
	var ok bool
	if rule.Auth.Backend, ok = b.resolve(&spec.BackendRef, at+".backendRef"); ok {
		b.route.leadsTo(rule.Asked())
	}
}

// auth has the requests of a rule of an Ingress authorized. The Service may be of another namespace by a ReferenceGrant.
func (b *ingressBuilder) auth(a *annotatedIngress, r *Rule) {
	spec, at := a.Auth, "annotation "+nginx.Prefix+"auth-url"
	name := svc.Name{Namespace: cmp.Or(spec.Namespace, a.Namespace), Name: spec.Service}
	r.Auth = &Auth{Auth: filter.Auth{
		Method: cmp.Or(spec.Method, "GET"), Host: spec.Host, Target: spec.Target, AskAll: true, Take: spec.Fields, Nginx: &spec.NginxAuth,
	}}
	for _, f := range spec.Fields {
		if r.Closed = r.Closed || !filter.ValidField(f, "x"); r.Closed {
			b.problem(a.Ingress, "annotation %sauth-response-headers: %s belongs to messages and connections; requests are answered with 503",
				nginx.Prefix, f)
			return
		}
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
