package table

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// Builder follows the API's objects and turns them into Tables. The cost of a
// Build is that of the Services touched since the last one.
//
// A Builder is used by one goroutine. It keeps the Services it is given and
// changes none; the caller does not change them either. Of EndpointSlices it
// keeps what counts.
type Builder struct {
	cfg Config

	services map[svc.Name]*service
	hosts    map[svc.Name]*service // the services with host ports
	// sliceOf says to which Service a slice belongs.
	sliceOf map[svc.Name]svc.Name
	claims  Claims[svc.Frontend, claimant]
	byEndpoint
	forwarding
	node   node
	ranges ranges

	dirty    []*service
	problems map[svc.Name][]Problem
	// news are the Services whose problems differ from those before the last
	// Build.
	news  map[svc.Name]bool
	table *Table
}

// service is all that is known of one Service.
type service struct {
	name   svc.Name
	obj    *corev1.Service  // nil while only slices are there
	host   *svc.HostPorts   // of the Pod that it stands for, nil for a Service
	slices []*endpointSlice // by name

	dirty   bool
	reclaim bool // obj changed: claims and cluster IPs must follow
	reindex bool // slices changed
	hinted  bool // some endpoint has topology hints
	ranged  bool // has load balancer source ranges
	claims  []claimed
	addrs   []netip.Addr // cluster IPs held in vips
	near    []netip.Addr // endpoints near some cluster IP
	own     []string     // the UIDs of Pods of this node among the endpoints
	ports   []*ServicePort
}

type claimed struct {
	at svc.Frontend
	by claimant
}

// NewBuilder returns a Builder that knows of no object yet.
func NewBuilder(cfg Config) *Builder {
	cluster, local := cfg.cidrs(nil)
	b := &Builder{
		cfg:      cfg,
		services: map[svc.Name]*service{},
		hosts:    map[svc.Name]*service{},
		sliceOf:  map[svc.Name]svc.Name{},
		claims:   NewClaims[svc.Frontend](claimant.before),

		byEndpoint: byEndpoint{own: newOwnPods(), vips: newVIPs()},
		node:       node{clusterCIDRs: cfg.ClusterCIDRs, noLoopback: cfg.NoLoopback},
		forwarding: forwarding{wanted: map[*service]bool{}},

		problems: map[svc.Name][]Problem{},
		news:     map[svc.Name]bool{},
		table:    &Table{ClusterCIDRs: cluster, LocalCIDRs: local, PodInterfaces: cfg.PodInterfaces, MasqueradeAll: cfg.MasqueradeAll},
	}
	b.forwarding.changed = b.touch
	return b
}

func (b *Builder) service(n svc.Name) *service {
	s := b.services[n]
	if s == nil {
		s = &service{name: n}
		b.services[n] = s
	}
	return s
}

func (b *Builder) touch(s *service) {
	if !s.dirty {
		s.dirty = true
		b.dirty = append(b.dirty, s)
	}
}

// SetService adds or replaces a Service.
func (b *Builder) SetService(obj *corev1.Service) {
	s := b.service(svc.NameOf(obj))
	s.obj, s.reclaim = obj, true
	b.touch(s)
}

// DeleteService forgets a Service; unknown names are ignored.
func (b *Builder) DeleteService(n svc.Name) {
	if s := b.services[n]; s != nil && s.obj != nil {
		s.obj, s.reclaim = nil, true
		b.touch(s)
	}
}

// Services yields the names of the Services set.
func (b *Builder) Services() iter.Seq[svc.Name] {
	return func(yield func(svc.Name) bool) {
		for n, s := range b.services {
			if s.obj != nil && !yield(n) {
				return
			}
		}
	}
}

// SetSlice adds or replaces an EndpointSlice. One without the label
// kubernetes.io/service-name belongs to no Service and counts as absent, as
// does one of another proxy or of host names. The object is not kept.
func (b *Builder) SetSlice(obj *discoveryv1.EndpointSlice) {
	name := svc.Name{Namespace: obj.Namespace, Name: obj.Name}
	owner := obj.Labels[discoveryv1.LabelServiceName]
	kept := keep(obj, b.cfg.NodeName)
	if owner == "" || kept == nil {
		b.DeleteSlice(name)
		return
	}
	of := svc.Name{Namespace: obj.Namespace, Name: owner}
	if before, known := b.sliceOf[name]; known && before != of {
		b.DeleteSlice(name)
	}
	b.sliceOf[name] = of
	s := b.service(of)
	i, found := s.find(obj.Name)
	if found {
		s.slices[i] = kept
	} else {
		s.slices = slices.Insert(s.slices, i, kept)
	}
	s.reindex = true
	b.touch(s)
}

// DeleteSlice forgets an EndpointSlice; unknown names are ignored.
func (b *Builder) DeleteSlice(n svc.Name) {
	of, known := b.sliceOf[n]
	if !known {
		return
	}
	delete(b.sliceOf, n)
	s := b.services[of]
	if i, found := s.find(n.Name); found {
		s.slices = slices.Delete(s.slices, i, i+1)
	}
	s.reindex = true
	b.touch(s)
}

// Slices yields the names of the EndpointSlices set.
func (b *Builder) Slices() iter.Seq[svc.Name] { return maps.Keys(b.sliceOf) }

func (s *service) find(slice string) (int, bool) {
	return slices.BinarySearchFunc(s.slices, slice, func(o *endpointSlice, name string) int {
		return strings.Compare(o.name, name)
	})
}

// SetNode takes over what counts of this node's own Node object: its zone, its
// InternalIPs, its Pods' ranges and where its agent answers. Nil means that there is none (any more). Services that
// depend on neither are not decided again.
func (b *Builder) SetNode(n *corev1.Node) {
	zone, primary := "", []netip.Addr(nil)
	var agent []svc.Frontend
	b.node.podCIDRs = nil
	if n != nil {
		for _, text := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil {
				b.node.podCIDRs = append(b.node.podCIDRs, p.Masked())
			}
		}
		zone = n.Labels[corev1.LabelTopologyZone]
		port := n.Status.DaemonEndpoints.KubeletEndpoint.Port
		for _, a := range n.Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if err != nil {
				continue
			}
			if a.Type == corev1.NodeInternalIP {
				primary = append(primary, ip.Unmap())
			}
			if port > 0 && port <= 65535 {
				agent = append(agent, svc.Frontend{Protocol: svc.TCP, Addr: netip.AddrPortFrom(ip.Unmap(), uint16(port))})
			}
		}
	}
	if a := b.cfg.PrimaryAddress; a.IsValid() {
		primary = slices.Insert(primary, 0, a.Unmap())
	}
	primary = firstOfEachFamily(primary)
	b.reserve(reservedAgent, agent)
	newZone, newPrimary := zone != b.node.zone, !slices.Equal(primary, b.node.primary)
	b.node.zone, b.node.primary = zone, primary
	if !newZone && !newPrimary {
		return
	}
	for _, s := range b.services {
		if newZone && s.hinted || newPrimary && s.ranged {
			b.touch(s)
		}
	}
}

// SetAddresses sets the addresses of this machine. They decide where node
// ports answer.
func (b *Builder) SetAddresses(addrs []netip.Addr) {
	b.node.machine = slices.Clone(addrs)
	b.touchHosts()
}

// Build returns the Table of all that was set, and the keys of the service ports
// that differ from the Table before, gone ones included. With no difference at
// all it returns that Table itself. The keys are never nil, since nil asks a
// plane for a full comparison. Service ports that do not differ are the same
// pointers in both Tables.
func (b *Builder) Build() (*Table, []Key) {
	b.follow()
	clear(b.news)
	changed := []Key{}
	var edit *shardsEdit
	set := func(k Key, p *ServicePort) {
		if edit == nil {
			edit = b.table.ports.edit()
		}
		edit.set(k, p)
		changed = append(changed, k)
	}
	for _, s := range b.dirty {
		s.dirty = false
		b.rebuild(s, set)
		if s.obj == nil && s.host == nil && len(s.slices) == 0 {
			delete(b.services, s.name)
		}
	}
	clear(b.dirty)
	b.dirty = b.dirty[:0]

	addrs := b.cfg.NodePortAddresses.choose(b.node.machine, b.node.primary)
	ranges := b.ranges.choose(&b.node, b.vips)
	cluster, local := b.cfg.cidrs(b.node.podCIDRs)
	direct := b.ForwardsDirectly()
	if edit == nil && direct == b.table.ForwardsDirectly &&
		slices.Equal(addrs, b.table.NodePortAddrs) && slices.Equal(ranges, b.table.ServiceCIDRs) &&
		slices.Equal(cluster, b.table.ClusterCIDRs) && slices.Equal(local, b.table.LocalCIDRs) {
		return b.table, changed
	}
	next := *b.table
	next.NodePortAddrs, next.ServiceCIDRs, next.ClusterCIDRs, next.LocalCIDRs = addrs, ranges, cluster, local
	next.Loopback, next.ForwardsDirectly = b.onLoopback(), direct
	if edit != nil {
		next.ports = edit.done()
	}
	b.table = &next
	return b.table, changed
}

// follow brings claims and cluster IPs up to date with the objects, which may
// touch further services, before anything is decided from them.
func (b *Builder) follow() {
	if s := b.services[apiService]; s != nil && s.reindex {
		b.reserve(reservedAPI, endpointsOf(s))
	}
	for i := 0; i < len(b.dirty); i++ { // grows on the way
		if s := b.dirty[i]; s.reclaim {
			s.reclaim = false
			b.reclaim(s)
		}
	}
	if b.vips.grown {
		b.vips.grown = false
		for _, s := range b.services {
			b.index(s)
			if slices.ContainsFunc(s.near, func(a netip.Addr) bool { return b.vips.owner(a) != nil }) {
				b.touch(s)
			}
		}
		return
	}
	for _, s := range b.dirty {
		if s.reindex {
			b.index(s)
		}
	}
}

// touchClaimants touches the Services that want a frontend, but for one.
func (b *Builder) touchClaimants(at svc.Frontend, but *service) {
	for c := range b.claims.All(at) {
		if c.s != but {
			b.touch(c.s)
		}
	}
}

func (b *Builder) reclaim(s *service) {
	for _, c := range s.claims {
		b.claims.Remove(c.at, c.by)
		b.touchClaimants(c.at, s)
	}
	s.claims = nil
	claim := func(w want, c claimant) {
		s.claims = append(s.claims, claimed{at: w.at, by: c})
		b.claims.Add(w.at, c)
		b.touchClaimants(w.at, s)
	}
	var addrs []netip.Addr
	quiet := &complaints{}
	switch {
	case s.host != nil:
		for _, h := range b.node.hostPorts(s, quiet) {
			c := claimant{s: s, host: true, one: !h.everywhere}
			for _, w := range h.wants {
				claim(w, c)
				w.at = onEveryAddress(w.at)
				claim(w, c)
			}
		}
	case proxied(s.obj):
		for _, w := range wants(s.obj, quiet) {
			claim(w, claimant{s: s, virtual: w.kind == ClusterIP, created: s.obj.CreationTimestamp.Time})
		}
		addrs = clusterIPs(s.obj, quiet)
	}
	if slices.Equal(addrs, s.addrs) {
		return
	}
	for _, a := range s.addrs {
		b.vips.remove(a, s, b.touch)
	}
	s.addrs = addrs
	for _, a := range s.addrs {
		b.vips.add(a, s, b.touch)
	}
}

// rebuild decides s again and calls set for each of its service ports that
// differs, with nil for removed ones.
func (b *Builder) rebuild(s *service, set func(Key, *ServicePort)) {
	ports, problems := b.decide(s)
	if !slices.Equal(b.problems[s.name], problems) {
		b.news[s.name] = true
		b.problems[s.name] = problems
		if len(problems) == 0 {
			delete(b.problems, s.name)
		}
	}
	for i, p := range ports {
		old := find(s.ports, p.Key())
		if old != nil && equalPorts(old, p) {
			ports[i] = old
			continue
		}
		set(p.Key(), p)
	}
	for _, old := range s.ports {
		if find(ports, old.Key()) == nil {
			set(old.Key(), nil)
		}
	}
	s.ports = ports
}

func find(ports []*ServicePort, k Key) *ServicePort {
	for _, p := range ports {
		if p.Key() == k {
			return p
		}
	}
	return nil
}

// NewProblems yields the Services whose problems the last Build changed, with
// what is wrong with them now: nothing, if all is well again.
func (b *Builder) NewProblems() iter.Seq2[svc.Name, []Problem] {
	return func(yield func(svc.Name, []Problem) bool) {
		for n := range b.news {
			if !yield(n, b.problems[n]) {
				return
			}
		}
	}
}

func equalPorts(a, b *ServicePort) bool {
	return a.ID == b.ID && a.Family == b.Family && a.Protocol == b.Protocol && a.Affinity == b.Affinity && a.Scheduler == b.Scheduler &&
		a.HealthCheckNodePort == b.HealthCheckNodePort && a.LocalReady == b.LocalReady &&
		slices.Equal(a.Serving, b.Serving) && slices.EqualFunc(a.Frontends, b.Frontends, equalFrontends)
}

func equalFrontends(a, b Frontend) bool {
	return a.Kind == b.Kind && a.Addr == b.Addr && a.Masquerade == b.Masquerade && a.Drop == b.Drop &&
		slices.Equal(a.Endpoints, b.Endpoints) && slices.Equal(a.Hops, b.Hops) &&
		(a.LocalClients == nil) == (b.LocalClients == nil) && slices.Equal(a.LocalClients, b.LocalClients) &&
		(a.SourceRanges == nil) == (b.SourceRanges == nil) && slices.Equal(a.SourceRanges, b.SourceRanges)
}

// UID returns the UID of a Service, or of the Pod that has the name in a Table; empty if
// it is not there.
func (b *Builder) UID(n svc.Name) types.UID {
	if s := b.hosts[n]; s != nil {
		return types.UID(s.host.UID)
	}
	if s := b.services[n]; s != nil && s.obj != nil {
		return s.obj.UID
	}
	return ""
}
