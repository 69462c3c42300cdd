package trust

import (
	"slices"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Grants are the ReferenceGrants.
type Grants map[svc.Name]*gwv1.ReferenceGrant

// Permit reports whether objects of a kind and a namespace may name an object of the core group: of their own namespace, or by a
// ReferenceGrant.
func (g Grants) Permit(from gwv1.ReferenceGrantFrom, kind gwv1.Kind, to svc.Name) bool {
	if string(from.Namespace) == to.Namespace {
		return true
	}
	for n, grant := range g {
		if n.Namespace == to.Namespace && lets(grant, from, kind, to.Name) {
			return true
		}
	}
	return false
}

// For returns the first of the ReferenceGrants that permit a reference to another namespace, by name, and the zero Name if there is
// none.
func (g Grants) For(from gwv1.ReferenceGrantFrom, kind gwv1.Kind, to svc.Name) (first svc.Name) {
	for n, grant := range g {
		if n.Namespace == to.Namespace && lets(grant, from, kind, to.Name) && (first == svc.Name{} || n.Compare(first) < 0) {
			first = n
		}
	}
	return first
}

func lets(g *gwv1.ReferenceGrant, from gwv1.ReferenceGrantFrom, kind gwv1.Kind, name string) bool {
	return slices.Contains(g.Spec.From, from) && slices.ContainsFunc(g.Spec.To, func(t gwv1.ReferenceGrantTo) bool {
		return t.Group == "" && t.Kind == kind && (t.Name == nil || *t.Name == "" || string(*t.Name) == name)
	})
}
