package trust

import (
	"fmt"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Clients is how certificates of clients are verified.
type Clients struct {
	Authorities []Ref
	// Insecure is true if clients without a certificate, or with one that cannot be verified, get in, too.
	Insecure bool
}

// ClientValidation is what a Gateway asks of clients at a port of HTTPS.
type ClientValidation struct {
	Clients    *Clients // nil if no certificate is asked for
	Resolved   gwv1.ListenerConditionReason
	Unresolved string
}

// Validations are what a Gateway asks of clients, by port. Port 0 is for the others.
type Validations map[gwv1.PortNumber]*ClientValidation

// Ask reports whether the Gateway asks for certificates at a port.
func (v Validations) Ask() bool {
	for _, at := range v {
		if at.Clients != nil {
			return true
		}
	}
	return false
}

// At returns what is asked for at a port, nil if nothing is.
func (v Validations) At(port gwv1.PortNumber) *ClientValidation {
	if at := v[port]; at != nil {
		return at
	}
	return v[0]
}

// ReadValidations reads what a Gateway asks of clients, with the objects that a ReferenceGrant lets from name.
func ReadValidations(g *gwv1.Gateway, from gwv1.ReferenceGrantFrom, grants Grants, authorities *Authorities) Validations {
	if g.Spec.TLS == nil || g.Spec.TLS.Frontend == nil {
		return nil
	}
	front := g.Spec.TLS.Frontend
	out := Validations{0: readValidation(front.Default.Validation, "tls.frontend.default", from, grants, authorities)}
	for i, p := range front.PerPort {
		out[p.Port] = readValidation(p.TLS.Validation, fmt.Sprintf("tls.frontend.perPort[%d].tls", i), from, grants, authorities)
	}
	return out
}

func readValidation(
	spec *gwv1.FrontendTLSValidation, at string, from gwv1.ReferenceGrantFrom, grants Grants, authorities *Authorities,
) *ClientValidation {
	out := &ClientValidation{Resolved: gwv1.ListenerReasonResolvedRefs}
	if spec == nil {
		return out
	}
	out.Clients = &Clients{Insecure: spec.Mode == gwv1.AllowInsecureFallback}
	for i, r := range spec.CACertificateRefs {
		at, namespace := fmt.Sprintf("%s.validation.caCertificateRefs[%d]", at, i), from.Namespace
		if r.Namespace != nil {
			namespace = *r.Namespace
		}
		n := svc.Name{Namespace: string(namespace), Name: string(r.Name)}
		ref, ok := RefOf(string(r.Group), string(r.Kind), n)
		switch {
		case !ok:
			out.miss(gwv1.ListenerReasonInvalidCACertificateKind, WrongKind, at, r.Kind)
		case !grants.Permit(from, r.Kind, n):
			out.miss(gwv1.ListenerReasonRefNotPermitted, "%s: no ReferenceGrant of namespace %s permits it", at, n.Namespace)
		default:
			if wrong := authorities.Add(ref); wrong != "" {
				out.miss(gwv1.ListenerReasonInvalidCACertificateRef, "%s: %s: %s", at, ref, wrong)
				continue
			}
			out.Clients.Authorities = append(out.Clients.Authorities, ref)
		}
	}
	return out
}

func (v *ClientValidation) miss(why gwv1.ListenerConditionReason, format string, args ...any) {
	if v.Unresolved == "" {
		v.Resolved, v.Unresolved = why, fmt.Sprintf(format, args...)
	}
}
