package gateway

import (
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// frontTLS is what a front has of the TLS settings of its Gateway itself.
type frontTLS struct {
	gateway svc.Name
	// ClientCertificate is the Secret of what backends with a BackendTLSPolicy are shown, the zero Name without one.
	ClientCertificate svc.Name
	// uncertified is true if the Gateway has to show a certificate and has none. resolved and unresolved have the reason.
	uncertified bool
	resolved    gwv1.GatewayConditionReason
	unresolved  string
	// insecure is true if clients without a verified certificate get in where one is asked for.
	insecure bool
	granted  []grantedObject
}

// addPolicies reads the BackendTLSPolicies of the Services that routes lead to. A backend whose policy cannot be met is no target:
// its requests are answered with 503, and it is never spoken to without TLS.
func (f *Front) addPolicies(o *Objects, authorities *trust.Authorities) {
	backends := map[svc.Name]bool{}
	named := map[svc.Name]bool{}
	for _, t := range f.Targets {
		if !backends[t.Name] {
			backends[t.Name] = true
			for _, n := range o.Policies.At(t.Name).Names() {
				named[n] = true
			}
		}
	}
	hasPort := func(service svc.Name, name string) bool {
		return slices.ContainsFunc(o.Services[service].Ports, func(p services.Port) bool { return p.Name == name && !p.UDP })
	}
	f.Policies, f.policyStatus = map[svc.Name]*trust.Policy{}, map[svc.Name][]metav1.Condition{}
	for _, n := range slices.SortedFunc(maps.Keys(named), svc.Name.Compare) {
		p := o.Policies.Read(n, authorities)
		accepted, wrong := o.Policies.Verdict(p, func(s svc.Name) bool { return backends[s] }, hasPort)
		f.policyStatus[n] = []metav1.Condition{
			condition(gwv1.PolicyConditionAccepted, wrong == "", accepted, p.Generation, wrong),
			condition(gwv1.BackendTLSPolicyConditionResolvedRefs, p.NotResolved == "", p.Resolved, p.Generation, p.NotResolved),
		}
		if p.NotAccepted == "" {
			f.Policies[n] = p
		}
	}
	f.Targets = slices.DeleteFunc(f.Targets, func(t Target) bool {
		return t.Policy != svc.Name{} && (f.Policies[t.Policy] == nil || f.uncertified)
	})
}

// PolicyStatuses returns the conditions of the BackendTLSPolicies of Services that routes lead to. The map is not the caller's.
func (f *Front) PolicyStatuses() map[svc.Name][]metav1.Condition { return f.policyStatus }

// OpenedByPolicies returns the objects with authorities that nodes may read by the Services of policies: the ones of other namespaces
// than the Gateway's.
func (f *Front) OpenedByPolicies() map[svc.Name][]trust.Ref {
	out := map[svc.Name][]trust.Ref{}
	for n, p := range f.Policies {
		if n.Namespace != f.gateway.Namespace && len(p.Authorities) > 0 {
			out[n] = p.Authorities
		}
	}
	return out
}

// readClientCertificate reads what the Gateway shows to backends. Without it no backend with TLS is spoken to.
func (f *frontTLS) readClientCertificate(o *Objects, g *gwv1.Gateway, secrets *trust.SecretSet) {
	if g.Spec.TLS == nil || g.Spec.TLS.Backend == nil || g.Spec.TLS.Backend.ClientCertificateRef == nil {
		return
	}
	const at = "tls.backend.clientCertificateRef"
	ref, from := g.Spec.TLS.Backend.ClientCertificateRef, kinds.From(kindGateway, g.Namespace)
	n := svc.Name{Namespace: string(valueOf(ref.Namespace, gwv1.Namespace(g.Namespace))), Name: string(ref.Name)}
	f.uncertified = true
	switch {
	case !o.Grants.Permit(from, gwv1.Kind(valueOf(ref.Kind, trust.Secret)), n):
		f.resolved = gwv1.GatewayReasonRefNotPermitted
		f.unresolved = fmt.Sprintf("%s: no ReferenceGrant of namespace %s permits it", at, n.Namespace)
	case valueOf(ref.Group, "") != "" || valueOf(ref.Kind, trust.Secret) != trust.Secret:
		f.resolved, f.unresolved = gwv1.GatewayReasonInvalidClientCertificateRef, at+": want a Secret"
	default:
		if wrong := secrets.Add(n); wrong != "" {
			f.resolved, f.unresolved = gwv1.GatewayReasonInvalidClientCertificateRef, fmt.Sprintf("%s: Secret %s: %s", at, n, wrong)
			return
		}
		f.uncertified, f.ClientCertificate = false, n
		f.grant(o, trust.Ref{Kind: trust.Secret, Name: n})
	}
}

// grant notes that nodes may read an object of another namespace, which the Gateway names, by the Service of a ReferenceGrant.
func (f *frontTLS) grant(o *Objects, r trust.Ref) {
	if r.Namespace != f.gateway.Namespace {
		grant := o.Grants.For(kinds.From(kindGateway, f.gateway.Namespace), gwv1.Kind(r.Kind), r.Name)
		f.granted = append(f.granted, grantedObject{grant, r})
	}
}

// Clients is how certificates of clients are verified.
type Clients struct {
	Authorities []trust.Ref
	// Insecure is true if clients without a certificate, or with one that cannot be verified, get in, too.
	Insecure bool
}

// clientValidation is what a Gateway asks of clients at a port of HTTPS.
type clientValidation struct {
	clients    *Clients // nil if no certificate is asked for
	resolved   gwv1.ListenerConditionReason
	unresolved string
}

// validations are what a Gateway asks of clients, by port. Port 0 is for the others.
type validations map[gwv1.PortNumber]*clientValidation

// ask reports whether the Gateway asks for certificates at a port.
func (v validations) ask() bool {
	for _, at := range v {
		if at.clients != nil {
			return true
		}
	}
	return false
}

// readValidations reads what the Gateway asks of clients.
func (f *frontTLS) readValidations(o *Objects, g *gwv1.Gateway, authorities *trust.Authorities) validations {
	if g.Spec.TLS == nil || g.Spec.TLS.Frontend == nil {
		return nil
	}
	from := g.Spec.TLS.Frontend
	out := validations{0: f.readValidation(o, from.Default.Validation, "tls.frontend.default", authorities)}
	for i, p := range from.PerPort {
		out[p.Port] = f.readValidation(o, p.TLS.Validation, fmt.Sprintf("tls.frontend.perPort[%d].tls", i), authorities)
	}
	return out
}

func (f *frontTLS) readValidation(
	o *Objects, from *gwv1.FrontendTLSValidation, at string, authorities *trust.Authorities,
) *clientValidation {
	out := &clientValidation{resolved: gwv1.ListenerReasonResolvedRefs}
	if from == nil {
		return out
	}
	out.clients = &Clients{Insecure: from.Mode == gwv1.AllowInsecureFallback}
	f.insecure = f.insecure || out.clients.Insecure
	for i, r := range from.CACertificateRefs {
		at := fmt.Sprintf("%s.validation.caCertificateRefs[%d]", at, i)
		n := svc.Name{Namespace: string(valueOf(r.Namespace, gwv1.Namespace(f.gateway.Namespace))), Name: string(r.Name)}
		ref, ok := trust.RefOf(string(r.Group), string(r.Kind), n)
		switch {
		case !ok:
			out.miss(gwv1.ListenerReasonInvalidCACertificateKind, trust.WrongKind, at, r.Kind)
		case !o.Grants.Permit(kinds.From(kindGateway, f.gateway.Namespace), r.Kind, n):
			out.miss(gwv1.ListenerReasonRefNotPermitted, "%s: no ReferenceGrant of namespace %s permits it", at, n.Namespace)
		default:
			if wrong := authorities.Add(ref); wrong != "" {
				out.miss(gwv1.ListenerReasonInvalidCACertificateRef, "%s: %s: %s", at, ref, wrong)
				continue
			}
			out.clients.Authorities = append(out.clients.Authorities, ref)
			f.grant(o, ref)
		}
	}
	return out
}

func (v *clientValidation) miss(why gwv1.ListenerConditionReason, format string, args ...any) {
	if v.unresolved == "" {
		v.resolved, v.unresolved = why, fmt.Sprintf(format, args...)
	}
}

// verifyClients takes over what the Gateway asks of clients at the port of the listener.
func (l *listener) verifyClients(all validations) {
	v := all[l.spec.Port]
	if v == nil {
		v = all[0]
	}
	if v == nil || l.spec.Protocol != gwv1.HTTPSProtocolType || v.clients == nil {
		return
	}
	l.clients = v.clients
	if v.unresolved != "" {
		l.miss(v.resolved, "%s", v.unresolved)
	}
	if len(v.clients.Authorities) == 0 {
		l.refuse(gwv1.ListenerReasonNoValidCACertificate, "no reference leads to an authority for certificates of clients; %s", v.unresolved)
	}
}
