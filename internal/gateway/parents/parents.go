// Package parents reads what routes and ListenerSets name as their parents.
package parents

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// named returns the object that a reference names, the zero Name unless it is of a group and kind. A reference without them names a
// Gateway.
func named(namespace string, p *gwv1.ParentReference, group gwv1.Group, kind gwv1.Kind) svc.Name {
	n := svc.Name{Namespace: namespace, Name: string(p.Name)}
	hasGroup, hasKind := gwv1.Group(gwv1.GroupName), gwv1.Kind("Gateway")
	if p.Group != nil {
		hasGroup = *p.Group
	}
	if p.Kind != nil {
		hasKind = *p.Kind
	}
	if p.Namespace != nil {
		n.Namespace = string(*p.Namespace)
	}
	if hasGroup != group || hasKind != kind {
		return svc.Name{}
	}
	return n
}

// Gateway returns the Gateway that a reference names, the zero Name if it names something else.
func Gateway(namespace string, p *gwv1.ParentReference) svc.Name {
	return named(namespace, p, gwv1.GroupName, "Gateway")
}

// Set returns the ListenerSet that a reference names, the zero Name if it names something else.
func Set(namespace string, p *gwv1.ParentReference) svc.Name {
	return named(namespace, p, gwv1.GroupName, "ListenerSet")
}

// Service returns the Service that a reference of a route names as the parent, the zero Name if it names something else.
func Service(namespace string, p *gwv1.ParentReference) svc.Name {
	return named(namespace, p, "", "Service")
}

// OfSet returns the Gateway that a ListenerSet names, the zero Name if it names something else.
func OfSet(s *gwv1.ListenerSet) svc.Name {
	p := &s.Spec.ParentRef
	return Gateway(s.Namespace, &gwv1.ParentReference{Group: p.Group, Kind: p.Kind, Namespace: p.Namespace, Name: p.Name})
}

// Gateways returns the Gateways that the references of a route name, or the ListenerSets that they name.
func Gateways(sets map[svc.Name]*gwv1.ListenerSet, namespace string, refs []gwv1.ParentReference) (out []svc.Name) {
	for i := range refs {
		n := Gateway(namespace, &refs[i])
		if set := sets[Set(namespace, &refs[i])]; set != nil {
			n = OfSet(set)
		}
		if n != (svc.Name{}) {
			out = append(out, n)
		}
	}
	return out
}

// Services returns the Services that references of a route name as parents, each once.
func Services(namespace string, refs []gwv1.ParentReference) (out []svc.Name) {
	for i := range refs {
		if n := Service(namespace, &refs[i]); n != (svc.Name{}) && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// Either returns kinds of routes as a message has them.
func Either(kinds []gwv1.Kind) string {
	var out []string
	for _, k := range kinds {
		out = append(out, string(k))
	}
	return strings.Join(out, " or ")
}

// Admits reports whether an object of the namespace in lets objects of another one attach, as its field namespaces has it. have are the
// labels of the other one, if they are known.
func Admits(from gwv1.FromNamespaces, selector *metav1.LabelSelector, in, namespace string, have map[string]string, known bool) bool {
	switch from {
	case gwv1.NamespacesFromAll:
		return true
	case gwv1.NamespacesFromSame:
		return namespace == in
	case gwv1.NamespacesFromSelector:
		s, err := metav1.LabelSelectorAsSelector(selector)
		return err == nil && known && selector != nil && s.Matches(labels.Set(have))
	}
	return false
}
