package gateway

import (
	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// Objects are what fronts are built from. The objects in it are not changed.
type Objects struct {
	// Gateways have a class of this controller.
	Gateways map[svc.Name]*gwv1.Gateway
	Routes   map[svc.Name]*gwv1.HTTPRoute
	Calls    map[svc.Name]*gwv1.GRPCRoute
	Grants   trust.Grants
	// Namespaces are the labels of the namespaces.
	Namespaces map[string]map[string]string
	Services   map[svc.Name]*services.Service
	Secrets    map[svc.Name]Secret
	// Ingresses have a class of this controller, and Secured have one of NginxController.
	Ingresses map[svc.Name]*networkingv1.Ingress
	Secured   map[svc.Name]bool
	// Streams are the routes of connections and of datagrams, and Sets the ListenerSets of every Gateway.
	Streams map[kinds.Route]*kinds.Stream
	Sets    map[svc.Name]*gwv1.ListenerSet
	// Policies are the BackendTLSPolicies, and Authorities is why an object with authorities cannot be used, "" if it can.
	Policies    *trust.Policies
	Authorities map[trust.Ref]string
	// Meshed are the routes that name a Service as their parent, by the Service.
	Meshed map[svc.Name]map[kinds.Route]bool
	// Named are Routes, Calls, Streams and Sets by what they name. With nil each front looks at all of them.
	Named *parents.Index[kinds.Route]
}

// Index returns Named, or a new index of the objects.
func (o *Objects) Index() *parents.Index[kinds.Route] {
	if o.Named != nil {
		return o.Named
	}
	x := parents.NewIndex[kinds.Route]()
	for n, r := range o.Routes {
		x.SetRoute(kinds.Route{Kind: kinds.HTTPRoute, Name: n}, n.Namespace, nil, r.Spec.ParentRefs)
	}
	for n, r := range o.Calls {
		x.SetRoute(kinds.Route{Kind: kinds.GRPCRoute, Name: n}, n.Namespace, nil, r.Spec.ParentRefs)
	}
	for key, s := range o.Streams {
		x.SetRoute(key, key.Namespace, nil, s.Parents)
	}
	for _, s := range o.Sets {
		x.SetListenerSet(nil, s)
	}
	return x
}

// Secret is what listeners and Ingresses ask of a Secret.
type Secret struct {
	// Problem is why it cannot be used for TLS, "" if it can, and NoFile and NoMap why it has no names and passwords in either form.
	Problem, NoFile, NoMap string
}
