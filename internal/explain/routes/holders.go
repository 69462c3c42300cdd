package routes

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// owner is whose front a Service is: the kind and the name of an object of its namespace, empty for one that no controller of fronts has
// made.
type owner struct{ kind, name string }

func ownerOf(s *corev1.Service) owner {
	if o := metav1.GetControllerOf(s); o != nil && s.Labels[names.FrontLabel] != "" {
		return owner{o.Kind, o.Name}
	}
	return owner{}
}

// lives reports whether an object exists that may keep a Service.
func (w *World) lives(namespace string, o owner) bool {
	n := svc.Name{Namespace: namespace, Name: o.name}
	switch o.kind {
	case "Gateway":
		return w.oursGateway(n) != nil
	case "ListenerSet":
		return w.Sets[n] != nil
	case "ReferenceGrant":
		return w.Grants[n] != nil
	case "BackendTLSPolicy":
		return w.Policies[n] != nil
	}
	return o.kind != ""
}

// refused returns why a Gateway with ports cannot have its Service, "" if it can. The names of several objects can lead to one name of a
// Service: then the object has it that had it before, or, of several Gateways, the first one by its name. Where Services could not be
// read it is not known who has one.
func (w *World) refused(n svc.Name) string {
	if w.Unowned != nil && w.Unowned(n.Namespace) {
		return ""
	}
	service := names.ServiceOfGateway(n)
	held := func(o owner) string {
		return fmt.Sprintf("its Service would be %s, which %s %s has; give one of them another name", service, o.kind, o.name)
	}
	if o, there := w.owners[service]; there {
		switch {
		case o == owner{"Gateway", n.Name}:
			return ""
		case o == owner{}:
			return fmt.Sprintf("there is a Service %s that is not of a Gateway", service)
		case w.lives(n.Namespace, o):
			return held(o)
		}
	}
	var earlier []svc.Name
	for other := range w.Gateways {
		if other.Namespace == n.Namespace && other.Compare(n) < 0 && names.ServiceOfGateway(other) == service {
			earlier = append(earlier, other)
		}
	}
	slices.SortFunc(earlier, svc.Name.Compare)
	for _, other := range earlier {
		if f := w.gatewayFront(w.objects(), other, nil); f != nil && len(f.Ports()) > 0 {
			return held(owner{"Gateway", other.Name})
		}
	}
	return ""
}

// served returns the front of a Gateway, nil if it is not served since it cannot have its Service, and why.
func (w *World) served(n svc.Name, f *gateway.Front) (*gateway.Front, string) {
	if f == nil || len(f.Ports()) == 0 {
		return f, ""
	}
	if why := w.refused(n); why != "" {
		return nil, why
	}
	return f, ""
}

// reachNamed adds the Gateways that would have the Service of one of the plan, or have a Service of the plan in their way.
func (p *Plan) reachNamed() {
	wanted := map[svc.Name]bool{}
	for n, is := range p.gateways {
		if is {
			wanted[names.ServiceOfGateway(n)] = true
		}
	}
	maps.Copy(wanted, p.services)
	for _, w := range []*World{p.before, p.after} {
		for n := range w.Gateways {
			p.gateways[n] = p.gateways[n] || wanted[names.ServiceOfGateway(n)]
		}
	}
}
