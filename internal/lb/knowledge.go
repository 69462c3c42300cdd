package lb

import (
	"cmp"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// finalizer keeps a Service until its addresses are released. It has the name of
// Kubernetes' own service controller.
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// knowledge is what the controller has seen and decided.
type knowledge struct {
	unlisted int  // kinds that have not been listed yet
	live     bool // begin has been called
	// services are those that are load balancers, or have our finalizer or a claim.
	services map[svc.Name]*corev1.Service
	// finalizers has, by UID, the Services to which this process has added the finalizer (true)
	// and those that have addresses of another controller (false).
	finalizers map[types.UID]bool
	claims     map[netip.Addr]*networkingv1.IPAddress
	pools      map[string]*v1.IPAddressPool
	compiled   []*usablePool // the first ones are used first
	namespaces map[string]labels.Set
	nodeAddrs  map[string][]netip.Addr
	nodePods   map[string][]pool.Range
	cidrs      map[string][]pool.Range // of ServiceCIDRs
	speakers   map[string]*v1.Speaker
	// outOfService has every Node, and whether it has the taint of that name.
	outOfService map[string]bool
	// silent has every Node, and whether nothing is heard of it.
	silent   map[string]bool
	coverage *coverage
	alloc    *pool.Allocator
	waiting  waitingList
	freed    bool // an address may have become free since the last retryWaiting
	// foreign are addresses in pools that other programs' IPAddress objects claim.
	foreign map[netip.Addr]bool
	// poolEvents has the messages of the last Events of each pool, by pool and reason: a pool
	// may have several conditions that hold at once.
	poolEvents map[string]map[string]string
}

func newKnowledge() *knowledge {
	return &knowledge{
		services: map[svc.Name]*corev1.Service{}, finalizers: map[types.UID]bool{}, claims: map[netip.Addr]*networkingv1.IPAddress{},
		pools: map[string]*v1.IPAddressPool{}, namespaces: map[string]labels.Set{}, nodeAddrs: map[string][]netip.Addr{},
		nodePods: map[string][]pool.Range{}, cidrs: map[string][]pool.Range{},
		speakers: map[string]*v1.Speaker{}, outOfService: map[string]bool{}, silent: map[string]bool{}, coverage: &coverage{},
		alloc: pool.New(), waiting: newWaitingList(),
		foreign: map[netip.Addr]bool{}, poolEvents: map[string]map[string]string{},
	}
}

func nameOf(o metav1.Object) svc.Name {
	return svc.Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// isOurs reports whether the controller gives addresses to s.
func (c *controller) isOurs(s *corev1.Service) bool {
	if s == nil || s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return false
	}
	if class := s.Spec.LoadBalancerClass; class != nil {
		return *class == v1.Class
	}
	// One that has an address keeps it when the default changes.
	return c.o.Default || len(c.alloc.Of(nameOf(s))) > 0
}

func (c *controller) setService(s *corev1.Service) {
	name := nameOf(s)
	relevant := s.Spec.Type == corev1.ServiceTypeLoadBalancer || slices.Contains(s.Finalizers, finalizer) || c.services[name] != nil
	if !relevant {
		return
	}
	c.keepService(s)
	if c.live {
		c.loop.Queue.Add(name)
	}
}

// keepService remembers s unless something newer of it is known.
func (c *controller) keepService(s *corev1.Service) {
	name := nameOf(s)
	if have := c.services[name]; have != nil && have.UID == s.UID && !isNewer(s, have) {
		return
	}
	slim := *s
	slim.ManagedFields = nil
	if _, has := s.Annotations[corev1.LastAppliedConfigAnnotation]; has {
		slim.Annotations = maps.Clone(s.Annotations)
		delete(slim.Annotations, corev1.LastAppliedConfigAnnotation)
	}
	c.services[name] = &slim
}

// slimClaim returns what is kept of a claim.
func slimClaim(claim *networkingv1.IPAddress) *networkingv1.IPAddress {
	slim := *claim
	slim.ManagedFields = nil
	return &slim
}

// isNewer reports whether a is a later state of an object than b. What cannot be compared
// counts as newer.
func isNewer(a, b metav1.Object) bool {
	n, err := resourceversion.CompareResourceVersion(a.GetResourceVersion(), b.GetResourceVersion())
	return err != nil || n > 0
}

func (c *controller) dropService(s metav1.Object) {
	name := nameOf(s)
	if have := c.services[name]; have == nil || have.UID != s.GetUID() {
		return
	}
	delete(c.services, name)
	delete(c.finalizers, s.GetUID())
	if c.live {
		c.loop.Queue.Add(name)
	}
}

// servicesOf returns the Services that a claim lists.
func servicesOf(claim *networkingv1.IPAddress) []svc.Name {
	var out []svc.Name
	for text := range strings.SplitSeq(claim.Annotations[ServicesAnnotation], ",") {
		if name, err := svc.ParseName(strings.TrimSpace(text)); err == nil && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	if ref := claim.Spec.ParentRef; len(out) == 0 && ref != nil {
		out = append(out, svc.Name{Namespace: ref.Namespace, Name: ref.Name})
	}
	return out
}

// setClaim records who has an address. A claim that another controller has made counts
// like our own.
func (c *controller) setClaim(claim *networkingv1.IPAddress) {
	addr, err := netip.ParseAddr(claim.Name)
	if err != nil {
		return
	}
	old := c.claims[addr]
	if old != nil && old.UID == claim.UID && !isNewer(claim, old) {
		return
	}
	claim = slimClaim(claim)
	c.claims[addr] = claim
	if !c.live {
		return
	}
	now := servicesOf(claim)
	if old != nil {
		for _, name := range servicesOf(old) {
			if !slices.Contains(now, name) {
				c.released(addr, name)
			}
		}
	}
	for _, name := range now {
		c.alloc.Hold(addr, c.holderOf(name))
		c.loop.Queue.Add(name)
	}
	signal(c.tidy)
}

func (c *controller) dropClaim(claim metav1.Object) {
	addr, err := netip.ParseAddr(claim.GetName())
	if err != nil {
		return
	}
	have := c.claims[addr]
	if have == nil || have.UID != claim.GetUID() {
		return
	}
	delete(c.claims, addr)
	if !c.live {
		return
	}
	for _, name := range servicesOf(have) {
		c.released(addr, name)
	}
}

// released records that a Service does not have addr any more.
func (c *controller) released(addr netip.Addr, name svc.Name) {
	c.alloc.Release(addr, name)
	c.loop.Queue.Add(name)
	c.freed = true
	signal(c.wake)
	signal(c.tidy)
}

func (c *controller) setNamespace(ns *corev1.Namespace) {
	old, seen := c.namespaces[ns.Name]
	c.namespaces[ns.Name] = ns.Labels
	selected := slices.ContainsFunc(c.compiled, func(p *usablePool) bool { return p.namespaces != nil })
	if c.live && selected && (!seen || !labels.Equals(old, ns.Labels)) {
		c.resyncAll()
	}
}

func (c *controller) dropNamespace(ns metav1.Object) { delete(c.namespaces, ns.GetName()) }

func (c *controller) setNode(n *corev1.Node) {
	var addrs []netip.Addr
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && (a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP) {
			addrs = append(addrs, ip.Unmap())
		}
	}
	c.changeNode(n.Name, addrs, prefixes(n.Spec.PodCIDRs))
	c.setNodeState(n)
}

func (c *controller) dropNode(n metav1.Object) {
	c.changeNode(n.GetName(), nil, nil)
	delete(c.outOfService, n.GetName())
	delete(c.silent, n.GetName())
	signal(c.voters)
	signal(c.covers)
}

// prefixes returns the ranges of those that can be parsed.
func prefixes(list []string) []pool.Range {
	var out []pool.Range
	for _, text := range list {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, pool.FromPrefix(p))
		}
	}
	return out
}

func (c *controller) changeNode(name string, addrs []netip.Addr, pods []pool.Range) {
	old, oldPods := c.nodeAddrs[name], c.nodePods[name]
	c.nodeAddrs[name], c.nodePods[name] = addrs, pods
	if len(addrs) == 0 {
		delete(c.nodeAddrs, name)
	}
	if len(pods) == 0 {
		delete(c.nodePods, name)
	}
	if !c.live {
		return
	}
	if !slices.Equal(oldPods, pods) {
		c.recompile()
	}
	if slices.Equal(old, addrs) {
		return
	}
	for _, a := range old {
		if !c.ofSomeNode(a) {
			c.alloc.Unblock(a)
			c.freed = true
		}
	}
	c.block(addrs...)
	for _, a := range append(old, addrs...) {
		for _, service := range c.alloc.Holders(a) {
			c.loop.Queue.Add(service)
		}
	}
	signal(c.wake)
	signal(c.tidy)
}

func (c *controller) ofSomeNode(a netip.Addr) bool {
	for _, addrs := range c.nodeAddrs {
		if slices.Contains(addrs, a) {
			return true
		}
	}
	return false
}

func (c *controller) setServiceCIDR(s *networkingv1.ServiceCIDR) {
	now := prefixes(s.Spec.CIDRs)
	if old, seen := c.cidrs[s.Name]; seen && slices.Equal(old, now) {
		return
	}
	c.cidrs[s.Name] = now
	if c.live {
		c.recompile()
	}
}

func (c *controller) dropServiceCIDR(s metav1.Object) {
	delete(c.cidrs, s.GetName())
	if c.live {
		c.recompile()
	}
}

func (c *controller) setPool(p *v1.IPAddressPool) {
	old := c.pools[p.Name]
	if old != nil && old.UID == p.UID && !isNewer(p, old) {
		return
	}
	c.pools[p.Name] = p
	if !c.live {
		return
	}
	if old == nil || old.UID != p.UID || !reflect.DeepEqual(old.Spec, p.Spec) {
		c.recompile()
	}
	signal(c.tidy)
}

func (c *controller) dropPool(p metav1.Object) {
	delete(c.pools, p.GetName())
	delete(c.poolEvents, p.GetName())
	if c.live {
		c.recompile()
	}
}

// recompile takes over pools that have changed, which may concern every Service.
func (c *controller) recompile() {
	c.compile()
	c.resyncAll()
}

func (c *controller) resyncAll() {
	for name := range c.services {
		c.loop.Queue.Add(name)
	}
	c.freed = true
	signal(c.wake)
	signal(c.tidy)
}

// waitingList has the Services that wait for an address, the oldest first.
type waitingList struct {
	list []waitingService
	in   map[svc.Name]waitingService
}

type waitingService struct {
	name  svc.Name
	since int64 // creation, in seconds
}

func newWaitingList() waitingList { return waitingList{in: map[svc.Name]waitingService{}} }

func (w waitingService) compare(o waitingService) int {
	return cmp.Or(cmp.Compare(w.since, o.since), w.name.Compare(o.name))
}

func (w *waitingList) add(s *corev1.Service) {
	item := waitingService{nameOf(s), s.CreationTimestamp.Unix()}
	if have, is := w.in[item.name]; is {
		if have == item {
			return
		}
		w.remove(item.name)
	}
	w.in[item.name] = item
	i, _ := slices.BinarySearchFunc(w.list, item, waitingService.compare)
	w.list = slices.Insert(w.list, i, item)
}

func (w *waitingList) remove(name svc.Name) {
	item, is := w.in[name]
	if !is {
		return
	}
	delete(w.in, name)
	if i, found := slices.BinarySearchFunc(w.list, item, waitingService.compare); found {
		w.list = slices.Delete(w.list, i, i+1)
	}
}
