package controller

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// finalizer keeps a Service until its addresses are released. It has the name of
// Kubernetes' own service controller.
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// state is what the controller has seen and decided in one term: a record per Service, node and pool, and what follows
// from them. Reflectors write it by set and drop functions.
type state struct {
	byDefault bool           // Options.Default
	queue     func(svc.Name) // has a Service synced
	// wake is set when an address may have become free, tidy when a pool has changed, voters when a speaker or Node has
	// changed that votes, and covers when what speakers can announce has changed.
	wake, tidy, voters, covers loop.Signal
	begun                      chan struct{} // closed when everything has been listed

	mu       sync.Mutex // guards what follows
	unlisted int        // kinds that have not been listed yet
	live     bool       // begin has been called
	// services are load balancers, and Services that have our finalizer or a claim.
	services   map[svc.Name]*service
	claims     map[netip.Addr]*networkingv1.IPAddress
	pools      map[string]*poolRecord
	usable     []*usablePool // compiled from pools; the first ones are used first
	namespaces map[string]labels.Set
	nodes      nodes
	cidrs      map[string][]pool.Range // of ServiceCIDRs
	list       quorum.List             // of the voters; zero while it is not known
	coverage   *coverage
	alloc      *pool.Allocator
	waiting    waitingList
	freed      bool // an address may have become free since the last retryWaiting
	// foreign are addresses in pools that other programs' IPAddress objects claim.
	foreign map[netip.Addr]bool
}

// service is what the controller knows of a Service.
type service struct {
	object    *corev1.Service
	finalizer finalizerOwner
	problems  []string // recorded as Events
	recorded  []string // by this leader, the last ones, solved ones too
	// findings has what was recorded about annotations, by the reason of the Event, nil before that.
	findings map[string][]string
}

// finalizerOwner is who has added the finalizer of a Service.
type finalizerOwner int

const (
	unknownOwner finalizerOwner = iota
	ownFinalizer                // this process
	othersFinalizer
)

func newState(byDefault bool, queue func(svc.Name)) *state {
	return &state{
		byDefault: byDefault, queue: queue,
		wake: loop.NewSignal(), tidy: loop.NewSignal(), voters: loop.NewSignal(), covers: loop.NewSignal(), begun: make(chan struct{}),
		services: map[svc.Name]*service{}, claims: map[netip.Addr]*networkingv1.IPAddress{}, pools: map[string]*poolRecord{},
		namespaces: map[string]labels.Set{}, nodes: newNodes(), cidrs: map[string][]pool.Range{}, coverage: &coverage{},
		alloc: pool.New(), waiting: newWaitingList(), foreign: map[netip.Addr]bool{},
	}
}

// listed counts the kinds that have been listed, and begins when all are. The caller holds mu.
func (st *state) listed() {
	if st.unlisted--; st.unlisted > 0 {
		return
	}
	st.begin()
	close(st.begun)
}

// begin decides about everything that has been listed: claims first, since they are the
// truth, then Services without an address, the oldest first. The caller holds mu.
func (st *state) begin() {
	st.coverage = st.nodes.coverage(st.list)
	st.compile()
	for a := range st.nodes.addrs {
		st.alloc.Block(a, st.nodes.whose(a))
	}
	for addr, o := range st.claims {
		for _, name := range servicesOf(o) {
			st.alloc.Hold(addr, st.holderOf(name))
			st.queue(name)
		}
	}
	for name, s := range st.services {
		if st.isOurs(s.object) && len(st.alloc.Of(name)) == 0 {
			st.waiting.add(s.object)
		}
		st.queue(name)
	}
	st.live = true
	// Services keep the addresses in their status that have no claim, before others get any.
	for _, w := range st.waiting.list {
		r, problem := st.request(st.object(w.name))
		if problem == nil && len(r.Prefer) > 0 {
			r.AskedOnly, r.Pools = append(r.AskedOnly, r.Pools...), nil
			st.alloc.Assign(r)
		}
	}
	st.retryWaiting()
	st.tidy.Set()
}

// object returns the Service of a name, nil if it is unknown. The caller holds mu.
func (st *state) object(name svc.Name) *corev1.Service {
	if s := st.services[name]; s != nil {
		return s.object
	}
	return nil
}

// isOurs reports whether the controller gives addresses to s, which may be nil. The caller holds mu.
func (st *state) isOurs(s *corev1.Service) bool {
	if s == nil || s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return false
	}
	if class := s.Spec.LoadBalancerClass; class != nil {
		return *class == svc.LoadBalancerClass
	}
	// A Service that has an address keeps it when the default changes.
	return st.byDefault || len(st.alloc.Of(svc.NameOf(s))) > 0
}

// setService records a Service. The caller holds mu.
func (st *state) setService(s *corev1.Service) {
	name := svc.NameOf(s)
	relevant := s.Spec.Type == corev1.ServiceTypeLoadBalancer || slices.Contains(s.Finalizers, finalizer) || st.services[name] != nil
	if !relevant {
		return
	}
	st.keepService(s)
	if st.live {
		st.queue(name)
	}
}

// keepService remembers s unless a newer state of it is known. The caller holds mu.
func (st *state) keepService(s *corev1.Service) {
	name := svc.NameOf(s)
	record := st.services[name]
	switch {
	case record == nil:
		record = &service{}
		st.services[name] = record
	case record.object.UID != s.UID:
		record.finalizer = unknownOwner
	case !reflector.IsNewer(s, record.object):
		return
	}
	slim := *s
	slim.ManagedFields = nil
	if _, has := s.Annotations[corev1.LastAppliedConfigAnnotation]; has {
		slim.Annotations = maps.Clone(s.Annotations)
		delete(slim.Annotations, corev1.LastAppliedConfigAnnotation)
	}
	record.object = &slim
}

// dropService records that a Service is deleted. The caller holds mu.
func (st *state) dropService(s metav1.Object) {
	name := svc.NameOf(s)
	if have := st.object(name); have == nil || have.UID != s.GetUID() {
		return
	}
	delete(st.services, name)
	if st.live {
		st.queue(name)
	}
}

// servicesOf returns the Services that a claim lists.
func servicesOf(o *networkingv1.IPAddress) []svc.Name {
	c, _ := claim.Parse(o)
	return c.Services
}

// slimClaim returns what is kept of a claim.
func slimClaim(o *networkingv1.IPAddress) *networkingv1.IPAddress {
	slim := *o
	slim.ManagedFields = nil
	return &slim
}

// setClaim records who has an address. A claim that another controller has made counts
// like our own. The caller holds mu.
func (st *state) setClaim(o *networkingv1.IPAddress) {
	addr, ok := claim.Addr(o)
	if !ok {
		return
	}
	old := st.claims[addr]
	if old != nil && old.UID == o.UID && !reflector.IsNewer(o, old) {
		return
	}
	st.claims[addr] = slimClaim(o)
	if !st.live {
		return
	}
	now := servicesOf(o)
	if old != nil {
		for _, name := range servicesOf(old) {
			if !slices.Contains(now, name) {
				st.released(addr, name)
			}
		}
	}
	for _, name := range now {
		st.alloc.Hold(addr, st.holderOf(name))
		st.queue(name)
	}
	for _, name := range st.alloc.Displaced(addr, now) {
		st.released(addr, name) // the Services that the claim lists were first
	}
	st.tidy.Set()
}

// dropClaim records that a claim is deleted. The caller holds mu.
func (st *state) dropClaim(o metav1.Object) {
	addr, ok := claim.Addr(o)
	if !ok {
		return
	}
	have := st.claims[addr]
	if have == nil || have.UID != o.GetUID() {
		return
	}
	delete(st.claims, addr)
	if !st.live {
		return
	}
	for _, name := range servicesOf(have) {
		st.released(addr, name)
	}
}

// released records that a Service does not have addr any more. The caller holds mu.
func (st *state) released(addr netip.Addr, name svc.Name) {
	st.alloc.Release(addr, name)
	st.queue(name)
	st.addressFreed()
}

// addressFreed has the Services that wait looked at, since an address may have become free. The caller holds mu.
func (st *state) addressFreed() {
	st.freed = true
	st.wake.Set()
	st.tidy.Set()
}

// setNamespace records the labels of a Namespace. The caller holds mu.
func (st *state) setNamespace(ns *corev1.Namespace) {
	old, seen := st.namespaces[ns.Name]
	st.namespaces[ns.Name] = ns.Labels
	selected := slices.ContainsFunc(st.usable, func(p *usablePool) bool { return p.namespaces != nil })
	if st.live && selected && (!seen || !labels.Equals(old, ns.Labels)) {
		st.resyncAll()
	}
}

// changeNode records what a Node shows, and does what follows from the change. The caller holds mu.
func (st *state) changeNode(name string, now nodeFacts) {
	was := st.nodes.set(name, now)
	if was.exists != now.exists || was.outOfService != now.outOfService || was.silent != now.silent {
		st.voters.Set()
	}
	if was.exists != now.exists || was.silent != now.silent || !labels.Equals(was.labels, now.labels) {
		st.covers.Set()
	}
	if !st.live {
		return
	}
	if !slices.Equal(was.pods, now.pods) {
		st.recompile()
	}
	if !slices.Equal(was.others, now.others) {
		st.tidy.Set()
	}
	if slices.Equal(was.addrs, now.addrs) {
		return
	}
	for _, a := range slices.Concat(was.addrs, now.addrs) {
		if st.nodes.has(a) {
			st.alloc.Block(a, st.nodes.whose(a))
		} else {
			st.alloc.Unblock(a)
			st.freed = true
		}
		for _, name := range st.alloc.Holders(a) {
			st.queue(name)
		}
	}
	st.wake.Set()
	st.tidy.Set()
}

// setSpeaker records the Speaker of a node. The caller holds mu.
func (st *state) setSpeaker(s *v1.Speaker) {
	old := st.nodes.setSpeaker(s.Name, s)
	if old == nil || old.Status.VoterVersion != s.Status.VoterVersion ||
		old.Status.VoterList != s.Status.VoterList || !slices.Equal(old.Status.Endpoints, s.Status.Endpoints) {
		st.voters.Set()
	}
	if old == nil || coverageChanged(old, s) {
		st.covers.Set()
	}
}

// dropSpeaker records that a Speaker is deleted. The caller holds mu.
func (st *state) dropSpeaker(s metav1.Object) {
	st.nodes.setSpeaker(s.GetName(), nil)
	st.voters.Set()
	st.covers.Set()
}

// setServiceCIDR records a range of cluster IPs. The caller holds mu.
func (st *state) setServiceCIDR(s *networkingv1.ServiceCIDR) {
	now := prefixes(s.Spec.CIDRs)
	if old, seen := st.cidrs[s.Name]; seen && slices.Equal(old, now) {
		return
	}
	st.cidrs[s.Name] = now
	if st.live {
		st.recompile()
	}
}

// dropServiceCIDR records that a ServiceCIDR is deleted. The caller holds mu.
func (st *state) dropServiceCIDR(s metav1.Object) {
	delete(st.cidrs, s.GetName())
	if st.live {
		st.recompile()
	}
}

// setPool records a pool. The caller holds mu.
func (st *state) setPool(p *v1.IPAddressPool) {
	record := st.pools[p.Name]
	if record == nil {
		record = &poolRecord{}
		st.pools[p.Name] = record
	}
	old := record.object
	if old != nil && old.UID == p.UID && !reflector.IsNewer(p, old) {
		return
	}
	record.object = p
	if !st.live {
		return
	}
	if old == nil || old.UID != p.UID || !reflect.DeepEqual(old.Spec, p.Spec) {
		st.recompile()
	}
	st.tidy.Set()
}

// dropPool records that a pool is deleted. The caller holds mu.
func (st *state) dropPool(p metav1.Object) {
	delete(st.pools, p.GetName())
	if st.live {
		st.recompile()
	}
}

// recompile uses the changed pools, which may concern every Service. The caller holds mu.
func (st *state) recompile() {
	st.compile()
	st.resyncAll()
}

// resyncAll has every Service synced. The caller holds mu.
func (st *state) resyncAll() {
	for name := range st.services {
		st.queue(name)
	}
	st.addressFreed()
}
