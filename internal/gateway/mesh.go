package gateway

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/svc"
)

// Mesh is what becomes of the routes that name a Service as their parent: the node of a client takes the connections to the
// Service's ClusterIPs, at the ports of Table, to itself. Other ports stay as they are.
type Mesh struct {
	Table *Table
	// Targets are where rules lead to, each once.
	Targets []Target
	// Addrs are the ClusterIPs, and Key the UID of the Service.
	Addrs []netip.Addr
	Key   string

	parents map[kinds.Route][]gwv1.RouteParentStatus
	cache   map[kinds.Route]*cachedRoute
	refers  map[svc.Name]bool
}

// BuildMesh returns what becomes of the routes that name a Service, which need not exist. Objects.Meshed has the routes. before
// is as that of BuildGateway.
func BuildMesh(o *Objects, name svc.Name, before *Mesh) *Mesh {
	m := &Mesh{
		parents: map[kinds.Route][]gwv1.RouteParentStatus{}, cache: map[kinds.Route]*cachedRoute{},
		refers: map[svc.Name]bool{name: true},
	}
	if before == nil {
		before = &Mesh{}
	}
	b := &meshBuilder{Mesh: m, objects: o, name: name, service: o.Services[name], seen: map[Target]bool{}}
	if s := b.service; s != nil {
		m.Addrs, m.Key = s.ClusterIPs, s.UID
		b.listen()
	}
	for _, route := range b.routes() {
		b.add(route, before.cache[route.Key()])
	}
	used := slices.DeleteFunc(b.ports, func(l *listener) bool { return len(l.rules) == 0 })
	m.Table = listenersOf(used, before.Table)
	return m
}

// Parents returns the statuses of a route for the references that name the Service.
func (m *Mesh) Parents(route kinds.Route) []gwv1.RouteParentStatus { return m.parents[route] }

// Refers reports whether the result depends on a Service.
func (m *Mesh) Refers(service svc.Name) bool { return m.refers[service] }

// Serves reports whether connections to the Service take the proxied way at some port.
func (m *Mesh) Serves() bool { return len(m.Table.Ports) > 0 && len(m.Addrs) > 0 }

// meshBuilder collects the rules for the ports of a Service.
type meshBuilder struct {
	*Mesh
	objects *Objects
	name    svc.Name
	service *services.Service // nil if there is none
	ports   []*listener
	seen    map[Target]bool
}

// listen makes a listener for each port of TCP.
func (b *meshBuilder) listen() {
	for i := range b.service.Ports {
		p := &b.service.Ports[i]
		if p.UDP {
			continue
		}
		b.ports = append(b.ports, &listener{
			spec: &gwv1.Listener{
				Name: gwv1.SectionName(p.Name), Port: gwv1.PortNumber(p.Number), Protocol: gwv1.HTTPProtocolType,
			},
			in: b.name.Namespace, kinds: []gwv1.Kind{kinds.HTTPRoute, kinds.GRPCRoute}, rules: map[string][]*match{},
			taken: map[gwv1.Kind]*hostpath.Patterns{},
		})
	}
}

// routes returns the routes that name the Service, the older ones first.
func (b *meshBuilder) routes() (out []requests) {
	for key := range b.objects.Meshed[b.name] {
		switch {
		case key.Kind == kinds.HTTPRoute && b.objects.Routes[key.Name] != nil:
			out = append(out, requests{HTTP: b.objects.Routes[key.Name]})
		case key.Kind == kinds.GRPCRoute && b.objects.Calls[key.Name] != nil:
			out = append(out, requests{GRPC: b.objects.Calls[key.Name]})
		}
	}
	kinds.SortByAge(out)
	return out
}

// add adds a route to the ports that it names, and keeps its status. The hostnames of the route have no meaning here: the
// ClusterIP decides what a connection is for.
func (b *meshBuilder) add(route requests, cached *cachedRoute) {
	key := route.Key()
	admitted := b.service != nil && key.Namespace == b.name.Namespace
	c := cached.or(b.objects, route, admitted, true)
	b.cache[key] = c
	for _, r := range c.refs {
		b.refers[r.to] = true
	}
	attached := map[*listener]bool{}
	refs := route.Parents()
	for i := range refs {
		if parents.Service(key.Namespace, &refs[i]) != b.name {
			continue
		}
		reason, message := b.attach(&refs[i], key, attached)
		if message == "" && c.wholly {
			reason, message = gwv1.RouteReasonUnsupportedValue, c.invalid
		}
		b.parents[key] = append(b.parents[key], c.status(&refs[i], reason, message))
	}
	for l := range attached {
		l.rules[""] = append(l.rules[""], c.matches...)
		l.take(key.Kind, "")
	}
	if len(attached) == 0 {
		return
	}
	for _, t := range c.targets {
		// A node gets authorities for Gateways only. A backend that is no target is not spoken to: 503.
		if t.Policy == (svc.Name{}) && !b.seen[t] {
			b.seen[t] = true
			b.Targets = append(b.Targets, t)
		}
	}
}

// attach finds the ports that a route attaches to by one reference.
func (b *meshBuilder) attach(p *gwv1.ParentReference, route kinds.Route, to map[*listener]bool) (
	reason gwv1.RouteConditionReason, message string,
) {
	switch {
	case b.service == nil:
		return gwv1.RouteReasonNoMatchingParent, fmt.Sprintf("there is no Service %s", b.name)
	case route.Namespace != b.name.Namespace:
		return gwv1.RouteReasonNotAllowedByListeners, "only routes of the Service's own namespace are served (consumer routes are not)"
	case b.name == svc.Name{Namespace: corev1.NamespaceDefault, Name: svc.APIService}:
		return gwv1.RouteReasonUnsupportedValue, fmt.Sprintf("Service %s is the API server's, which clients speak TLS to", b.name)
	case len(b.service.ClusterIPs) == 0:
		return gwv1.RouteReasonUnsupportedValue, fmt.Sprintf("Service %s has no ClusterIP", b.name)
	}
	var found []*listener
	for _, l := range b.ports {
		port := b.service.Find(int32(l.spec.Port), false)
		switch {
		case p.SectionName != nil && *p.SectionName != l.spec.Name || p.Port != nil && *p.Port != l.spec.Port:
			continue
		case p.SectionName == nil && p.Port == nil && !port.IsHTTP():
			continue
		}
		if _, ok := backendProtocol(port.Protocol, false); !ok {
			return gwv1.RouteReasonUnsupportedValue,
				fmt.Sprintf("port %d: connections of appProtocol %.100s are not read", port.Number, port.Protocol)
		}
		if port.IsTLSByName() {
			return gwv1.RouteReasonUnsupportedValue, fmt.Sprintf("port %d: its name %s is of TLS, which is not read; appProtocol can tell otherwise",
				port.Number, port.Name)
		}
		if l.isTaken(route.Kind, "") {
			return routeReasonHostnameConflict,
				fmt.Sprintf("port %d: an older route of the other kind, of HTTPRoute and GRPCRoute, has it", port.Number)
		}
		found = append(found, l)
	}
	if len(found) == 0 {
		return gwv1.RouteReasonNoMatchingParent, "the Service has no port of TCP with this sectionName and port; " +
			"without either, no port that is of HTTP by its appProtocol or name"
	}
	for _, l := range found {
		to[l] = true
	}
	return gwv1.RouteReasonAccepted, ""
}
