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
type Clients = trust.Clients

// readValidations reads what the Gateway asks of clients.
func (f *frontTLS) readValidations(o *Objects, g *gwv1.Gateway, authorities *trust.Authorities) trust.Validations {
	out := trust.ReadValidations(g, kinds.From(kindGateway, f.gateway.Namespace), o.Grants, authorities)
	for _, port := range slices.Sorted(maps.Keys(out)) {
		if at := out[port]; at.Clients != nil {
			f.insecure = f.insecure || at.Clients.Insecure
			for _, r := range at.Clients.Authorities {
				f.grant(o, r)
			}
		}
	}
	return out
}

// verifyClients takes over what the Gateway asks of clients at the port of the listener.
func (l *listener) verifyClients(all trust.Validations) {
	v := all.At(l.spec.Port)
	if v == nil || l.spec.Protocol != gwv1.HTTPSProtocolType || v.Clients == nil {
		return
	}
	l.clients = v.Clients
	if v.Unresolved != "" {
		l.miss(v.Resolved, "%s", v.Unresolved)
	}
	if len(v.Clients.Authorities) == 0 {
		l.refuse(gwv1.ListenerReasonNoValidCACertificate, "no reference leads to an authority for certificates of clients; %s", v.Unresolved)
	}
}
