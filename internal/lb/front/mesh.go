package front

import (
	"cmp"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// meshSuffix tells the proxied way of a Service's ClusterIPs from that of its load balancer, in metrics and logs: no Service
// has a name with it.
const meshSuffix = ":mesh"

// meshName returns the name by which the server has a Service with routes.
func meshName(n svc.Name) svc.Name {
	return svc.Name{Namespace: n.Namespace, Name: n.Name + meshSuffix}
}

// meshing leads connections to ClusterIPs here, if routes name their Services as parents. The Front's mu guards it.
type meshing struct {
	mu     *sync.Mutex
	wake   func()
	served func() // after NoMesh may have changed
	log    *slog.Logger
	events Recorder
	node   string
	// no is why it does not, "" if it does. Before it is used first, the kernel is asked.
	no     string
	firsts func() bool // nil after that
	// unread is why what routes name as their parents is not known, "" if it is.
	unread string

	on    bool // names.MeshService has existed
	all   map[svc.Name]*meshed
	addrs map[netip.Addr]bool // all ClusterIPs that lead here
}

// meshed is a Service that routes name as their parent.
type meshed struct {
	mesh *gateway.Mesh
	// built is for the server, nil if it must be built again. last is the one before, which is served until the endpoints of new
	// targets have been read.
	built, last *proxied.Service
	failure     string // the last recorded one
}

func newMeshing(f *Front, o Options) *meshing {
	return &meshing{
		mu: &f.mu, wake: f.wake.Set, served: f.served, log: f.log, events: f.events, node: o.NodeName, no: o.NoMesh,
		all: map[svc.Name]*meshed{}, addrs: map[netip.Addr]bool{},
	}
}

// SetMesh records that routes name Services as their parents (names.MeshService exists). They are followed from now on.
func (m *meshing) SetMesh() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.on {
		m.on = true
		m.wake()
	}
}

// NoMesh returns why connections to ClusterIPs with routes are not led here, "" if they are, or there are none.
func (m *meshing) NoMesh() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cmp.Or(m.no, m.unread)
}

// setUnread records why what routes name as their parents is not known, "" if it is.
func (m *meshing) setUnread(why string) {
	m.mu.Lock()
	changed := m.unread != why
	m.unread = why
	m.mu.Unlock()
	if changed {
		m.served()
	}
}

// probe asks the kernel, once, when there is the first Service with routes.
func (m *meshing) probe() {
	m.mu.Lock()
	asks := len(m.all) > 0 && m.firsts != nil
	if asks {
		if m.no == "" && !m.firsts() {
			m.no = "this kernel does not lead connections to ClusterIPs to programs (nf_tables with tproxy and nat)"
		}
		m.firsts = nil
	}
	m.mu.Unlock()
	if asks {
		m.served()
	}
}

// take takes over what routes have become, and adds the Services that rules lead to. It returns the ClusterIPs that lead here now and
// did not before, and the other way round: they concern what has endpoints there (without).
func (m *meshing) take(next map[svc.Name]*gateway.Mesh, named map[svc.Name]bool) (moved map[netip.Addr]bool) {
	addrs := map[netip.Addr]bool{}
	for n, mesh := range next {
		if !mesh.Serves() {
			delete(m.all, n)
			continue
		}
		s := m.all[n]
		if s == nil {
			s = &meshed{}
			m.all[n] = s
		}
		if s.mesh != mesh {
			s.mesh, s.built = mesh, nil
		}
		for _, t := range mesh.Targets {
			named[t.Name] = true
		}
		for _, a := range mesh.Addrs {
			addrs[a] = true
		}
	}
	maps.DeleteFunc(m.all, func(n svc.Name, _ *meshed) bool { return next[n] == nil })
	moved = map[netip.Addr]bool{}
	for a := range addrs {
		moved[a] = !m.addrs[a]
	}
	for a := range m.addrs {
		moved[a] = !addrs[a]
	}
	maps.DeleteFunc(moved, func(_ netip.Addr, is bool) bool { return !is })
	m.addrs = addrs
	return moved
}

// rebuild has built again what leads to targets of which one is concerned.
func (m *meshing) rebuild(concerned func(gateway.Target) bool) {
	for _, s := range m.all {
		if slices.ContainsFunc(s.mesh.Targets, concerned) {
			s.built = nil
		}
	}
}

// without returns endpoints but the ones at ClusterIPs that lead here, or at claimed addresses: an EndpointSlice that names one
// would lead a request in circles.
func (m *meshing) without(all []netip.AddrPort, claims map[netip.Addr][]svc.Name) []netip.AddrPort {
	circular := func(a netip.AddrPort) bool { return m.addrs[a.Addr()] || len(claims[a.Addr()]) > 0 }
	if !slices.ContainsFunc(all, circular) {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), circular)
}

// build appends the Services that can be served to out.
func (m *meshing) build(in *inputs, out []*proxied.Service) []*proxied.Service {
	if len(m.all) == 0 {
		return out
	}
	for n, s := range m.all {
		if m.no != "" {
			m.fail(n, s, m.no)
			continue
		}
		if s.built == nil {
			if s.built = in.mesh(n, s.mesh); s.built != nil {
				s.last = s.built
			}
		}
		if s.last != nil {
			out = append(out, s.last)
		}
	}
	return out
}

// observe records which Services are not served, by what the server has failed to do.
func (m *meshing) observe(failed map[svc.Name]error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n, s := range m.all {
		if m.no != "" || s.last == nil { // the server was not asked
			continue
		}
		why := ""
		if err := failed[meshName(n)]; err != nil {
			why = err.Error()
		}
		m.fail(n, s, why)
	}
}

// fail records why a Service is not served, once for each change.
func (m *meshing) fail(n svc.Name, s *meshed, why string) {
	if s.failure == why {
		return
	}
	if s.failure = why; why == "" {
		return
	}
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, UID: types.UID(s.mesh.Key)}}
	m.events.Event(o, corev1.EventTypeWarning, "RoutesNotServed", "node "+m.node+": "+why)
	m.log.Warn("cannot serve the routes of a Service", "service", n, "err", why)
}

// mesh returns the Service that serves the ClusterIPs of a Service, nil while something has not been read yet.
func (in *inputs) mesh(n svc.Name, m *gateway.Mesh) *proxied.Service {
	asked := dialect.Service{Annotations: map[string]string{dialect.LBHealthCheck: "false"}} // whether endpoints are ready, Kubernetes knows
	for number := range m.Table.Ports {
		asked.Ports = append(asked.Ports, dialect.Port{Number: number, Protocol: string(corev1.ProtocolTCP)})
	}
	slices.SortFunc(asked.Ports, func(a, b dialect.Port) int { return int(a.Number) - int(b.Number) })
	v := &proxied.Service{
		Name: meshName(n), Spec: dialect.Read(asked).Spec, Key: m.Key, Addrs: m.Addrs,
		ClusterIP: true, Routes: &proxied.Routes{Ports: m.Table.Ports, Targets: map[gateway.Target][]netip.AddrPort{}},
	}
	for i := range v.Spec.Listeners {
		v.Spec.Listeners[i].Protocol, v.Spec.Listeners[i].Backend = dialect.HTTP, dialect.HTTP
	}
	for _, to := range m.Targets {
		back := in.routing.backends[to.Name]
		if back == nil || !back.listed {
			return nil
		}
		v.Routes.Targets[to] = in.routing.meshing.without(back.endpoints(to.Backend, in.node, in.zone), in.claims)
	}
	return v
}
