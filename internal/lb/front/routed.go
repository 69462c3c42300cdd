package front

import (
	"context"
	"crypto/tls"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// routing is what the Services of fronts of the Gateway API and of Ingresses are built from. The Front's mu guards it.
type routing struct {
	watch    *watch.Watch // nil if they are not served
	client   kubernetes.Interface
	changed  func(func()) // Front.changed
	mu       *sync.Mutex  // the Front's
	services map[svc.Name]*service
	state    *watch.State // the last one that was whole, nil before
	// backends are the Services that rules lead to, and wide the watches of namespaces with many of them.
	backends map[svc.Name]*target
	wide     map[string]*sliceWatch
	meshing  *meshing
}

// isRouted reports whether a Service is a front.
func isRouted(o *corev1.Service) bool { return o.Labels[names.FrontLabel] != "" }

// frontState is what a front has of its objects.
type frontState struct {
	table   *gateway.Table
	targets []gateway.Target
	revoked map[gateway.Revocation]bool
	gateway *gateway.Front // nil for Ingresses
	orders  *certificates.Set
}

// frontOf returns the table of the front that a Service serves, with its targets. A Service only serves the Gateway or the Ingress whose
// name and namespace it has, whatever its labels are.
func (r *routing) frontOf(o *corev1.Service) (out frontState, ok bool) {
	if r.state == nil {
		return frontState{}, false
	}
	n := svc.NameOf(o)
	if n == names.IngressService() {
		return r.ingressesAt(names.SharedFront())
	}
	owner := metav1.GetControllerOf(o) // the label has only the first 63 bytes of the name
	if owner == nil {
		return frontState{}, false
	}
	of := svc.Name{Namespace: n.Namespace, Name: owner.Name}
	switch {
	case owner.Kind == "Ingress" && names.ServiceOfFront(of) == n:
		return r.ingressesAt(of)
	case owner.Kind == "Gateway" && names.ServiceOfGateway(of) == n:
		if f := r.state.Fronts[of]; f != nil {
			return frontState{f.Table, f.Targets, f.Revoked, f, f.Orders}, true
		}
	}
	return frontState{}, false
}

// ingressesAt is frontOf for the Service of a front of Ingresses.
func (r *routing) ingressesAt(front svc.Name) (out frontState, ok bool) {
	if f := r.state.IngressFronts[front]; f != nil {
		return frontState{table: f.Table, targets: f.Targets, orders: f.Orders}, true
	}
	return frontState{}, false
}

// follow follows what fronts depend on, once there is one, and has fronts that have changed built again.
func (r *routing) follow(ctx context.Context, running *sync.WaitGroup) {
	if r.watch == nil {
		return
	}
	gateways, ingresses := false, false
	r.mu.Lock()
	meshes := r.meshing.on
	for _, s := range r.services {
		gateways = gateways || s.object.Labels[names.FrontLabel] == names.FrontGateway
		ingresses = ingresses || s.object.Labels[names.FrontLabel] == names.FrontIngress
	}
	r.mu.Unlock()
	if gateways {
		r.watch.FollowGateways(ctx, running)
	}
	if ingresses {
		r.watch.FollowIngresses(ctx, running)
	}
	if meshes {
		r.watch.FollowMesh(ctx, running)
	}
	next := r.watch.Update(ctx, running)
	if !next.Listed {
		return
	}
	r.meshing.setUnread(next.NoMeshes)
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.state
	r.state = next
	named := map[svc.Name]bool{}
	for _, s := range r.services {
		if !isRouted(s.object) {
			continue
		}
		front, ok := r.frontOf(s.object)
		if !ok {
			s.built, s.last = nil, nil
			continue
		}
		for _, t := range front.targets {
			named[t.Name] = true
		}
		if s.table != front.table || before == nil || !maps.Equal(before.Certificates, next.Certificates) ||
			!maps.Equal(before.Users, next.Users) {
			s.table, s.built = front.table, nil
		}
	}
	r.takeMeshes(next.Meshes, named)
	r.followBackends(ctx, running, named)
}

// takeMeshes takes over what routes at Services have become, and adds the Services that rules lead to.
func (r *routing) takeMeshes(next map[svc.Name]*gateway.Mesh, named map[svc.Name]bool) {
	if moved := r.meshing.take(next, named); len(moved) > 0 {
		r.rebuild(r.leadsTo(moved))
		r.meshing.rebuild(r.leadsTo(moved))
	}
}

// leadsTo returns a function that reports whether a target has an endpoint at one of some addresses.
func (r *routing) leadsTo(addrs map[netip.Addr]bool) func(gateway.Target) bool {
	return func(t gateway.Target) bool {
		back := r.backends[t.Name]
		return back != nil && slices.ContainsFunc(back.addrs[t.Backend], func(a netip.AddrPort) bool { return addrs[a.Addr()] })
	}
}

// rebuild has the fronts built again that lead to targets of which one is concerned.
func (r *routing) rebuild(concerned func(gateway.Target) bool) {
	for _, s := range r.services {
		if isRouted(s.object) {
			if f, ok := r.frontOf(s.object); ok && slices.ContainsFunc(f.targets, concerned) {
				s.built = nil
			}
		}
	}
}

// setZone has everything built again: other endpoints are near.
func (r *routing) setZone() {
	for _, t := range r.backends {
		t.addrs = nil
	}
	r.meshing.rebuild(func(gateway.Target) bool { return true })
}

// endpoints returns the endpoints of a port that package table chooses for this node, of IPv4 if there are any.
func (t *target) endpoints(b gateway.Backend, node, zone string) []netip.AddrPort {
	if out, known := t.addrs[b]; known {
		return out
	}
	var out []netip.AddrPort
	transport := svc.TCP
	if b.Protocol == gateway.UDP {
		transport = svc.UDP
	}
	for _, family := range []svc.Family{svc.IPv4, svc.IPv6} {
		key := table.Key{ID: svc.PortName{Name: b.Name, Port: b.PortName}, Family: family}
		var all []table.Candidate
		for _, name := range slices.Sorted(maps.Keys(t.slices)) {
			all = table.AppendCandidates(all, t.slices[name], key, transport, node)
		}
		all = table.Unique(all)
		chosen := table.ForCluster(all, node, zone)
		if b.Local {
			chosen = table.ForLocal(all)
		}
		for i := range all {
			if chosen(&all[i]) {
				out = append(out, all[i].Addr)
			}
		}
		if len(out) > 0 {
			break
		}
	}
	if t.addrs == nil {
		t.addrs = map[gateway.Backend][]netip.AddrPort{}
	}
	t.addrs[b] = out
	return out
}

// backendWait is how long a front stays as it is until the endpoints of new targets have been read. The front of all Ingresses must not
// stand still while one tenant goes on to name new Services.
const backendWait = time.Second

// awaits reports whether a front still waits for endpoints, of which some have not been read if unread is true.
func (s *service) awaits(unread bool, now time.Time) bool {
	if !unread {
		s.unread = time.Time{}
		return false
	}
	if s.unread.IsZero() {
		s.unread = now
	}
	return now.Sub(s.unread) < backendWait
}

// route takes the table of a front over, with the endpoints of its targets.
func (d *draft) route() reason {
	if !isRouted(d.from.object) {
		return reason{}
	}
	front, ok := d.routing.frontOf(d.from.object)
	switch {
	case d.routing.watch == nil:
		return because("this node serves no Gateways and Ingresses")
	case !ok:
		return waitFor("its routes")
	}
	t := front.table
	routes := &proxied.Routes{
		Ports: t.Ports, Datagrams: t.Datagrams, Targets: map[gateway.Target][]netip.AddrPort{}, Revoked: front.revoked,
		Certificates: d.routing.state.Certificates, Users: d.routing.state.Users,
	}
	next := pools{}
	routes.Subjects = t.Subjects
	d.to.Challenges, routes.Tokens = answersOf(front.orders, d.routing.state.Answers)
	routes.Policies = verification(front.gateway, d.routing.state, d.from.pools, next)
	routes.Clients = clientsOf(t, d.routing.state, d.from.pools, next)
	unlisted := reason{}
	for _, to := range front.targets {
		if _, verified := routes.Policies[to.Policy]; to.Policy != (svc.Name{}) && !verified {
			continue // its requests are answered with 503
		}
		back := d.routing.backends[to.Name]
		if back == nil || !back.listed {
			unlisted = waitFor("the EndpointSlices of " + to.Name.String())
			continue // as above, after backendWait
		}
		routes.Targets[to] = d.routing.meshing.without(back.endpoints(to.Backend, d.node, d.zone), nil)
	}
	if d.from.awaits(unlisted.waits, d.now) {
		return unlisted
	}
	d.to.Routes, d.from.pools = routes, next
	d.to.Spec.Listeners = nil // a port without a listener that serves is closed
	for _, l := range d.from.spec.Listeners {
		p := t.Ports[l.Port]
		if l.Protocol == dialect.UDP {
			p = t.Datagrams[l.Port]
		}
		switch {
		case p == nil:
			continue
		case l.Protocol == dialect.UDP:
		case p.TLS:
			l.Protocol, l.Backend = dialect.HTTPS, dialect.HTTP
		case p.Streams:
			l.Protocol, l.Backend = dialect.TCP, dialect.TCP
		default:
			l.Protocol, l.Backend = dialect.HTTP, dialect.HTTP
		}
		d.to.Spec.Listeners = append(d.to.Spec.Listeners, l)
	}
	return d.challenge()
}

// answersOf returns what a front answers an authority of ACME with, by hosts: nothing but what the Secret has whose certificate is ordered
// for that host. Who has another Secret of the front could have the names of others certified.
func answersOf(
	orders *certificates.Set, from map[svc.Name]acme.Answers,
) (challenges map[string]*tls.Certificate, tokens map[string]map[string]string) {
	if len(from) == 0 {
		return nil, nil
	}
	challenges, tokens = map[string]*tls.Certificate{}, map[string]map[string]string{}
	for host, secret := range orders.Answering() {
		answers := from[secret]
		if c := answers.Challenges[host]; c != nil {
			challenges[host] = c
		}
		if len(answers.Tokens) > 0 {
			tokens[host] = answers.Tokens
		}
	}
	return challenges, tokens
}
