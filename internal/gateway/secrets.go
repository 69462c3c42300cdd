package gateway

import (
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of the Secrets of a front. They are followed one by one, and an annotation of the front's Service names them, for
// which the API has 256 KiB together with the others.
const (
	maxGatewaySecrets = 256
	maxIngressSecrets = 4096
	maxIngressTLS     = 64 // entries of an Ingress
)

// grantedObject is an object that is neither of the Gateway's namespace nor of the ListenerSet's, with the ReferenceGrant that
// permits it.
type grantedObject struct {
	grant  svc.Name
	object trust.Ref
}

// Granted returns the usable objects that the Gateway and listeners name by ReferenceGrants and nodes may read by the Services of
// these.
func (f *Front) Granted() map[svc.Name][]trust.Ref {
	out := map[svc.Name][]trust.Ref{}
	for _, g := range f.granted {
		out[g.grant] = append(out[g.grant], g.object)
	}
	for _, l := range f.listeners {
		for _, g := range l.granted {
			out[g.grant] = append(out[g.grant], g.object)
		}
	}
	return out
}

// Opened returns the usable objects that the front names. The Service of the Gateway opens the ones of its namespace to nodes.
func (f *Front) Opened() []trust.Ref {
	return append(trust.SecretRefs(f.Secrets), f.authorities.Usable()...)
}

// NamedAuthorities returns the objects with authorities that the front names, and may name, each once.
func (f *Front) NamedAuthorities() []trust.Ref { return f.authorities.Named() }

// GrantsOf returns the ReferenceGrants of Granted for the listeners of a ListenerSet, or for the zero Name of the Gateway itself.
func (f *Front) GrantsOf(set svc.Name) (out []svc.Name) {
	if set == (svc.Name{}) {
		for _, g := range f.granted {
			out = append(out, g.grant)
		}
	}
	for _, l := range f.listeners {
		of := svc.Name{}
		if l.set != nil {
			of = svc.NameOf(l.set)
		}
		for _, g := range l.granted {
			if of == set {
				out = append(out, g.grant)
			}
		}
	}
	return out
}

// newSecretSet collects the Secrets that a front names, so many at most.
func newSecretSet(o *Objects, most int) *trust.SecretSet {
	return trust.NewSecretSet(most, func(n svc.Name) (string, bool) {
		secret, known := o.Secrets[n]
		return secret.Problem, known
	})
}
