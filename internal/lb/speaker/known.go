package speaker

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Known is what a speaker knows from the API, written by reflectors. Of each object
// it only keeps what an announcement depends on.
type Known struct {
	node  string
	front Front
	wake  loop.Signal // is set after a change

	// endpoints are needed once there is a Service of policy Local: without one the nodes of endpoints do not matter.
	// otherNodes are needed once a pool selects nodes.
	endpoints, otherNodes onDemand

	mu       sync.Mutex
	claims   map[netip.Addr]claimed
	services map[svc.Name]*announced
	slices   map[svc.Name]sliceNodes
	pools    map[string]poolWay
	labels   map[string]labels.Set // of Nodes, by name: of this one at least
	self     *corev1.Node
	list     quorum.List
	spread   string // claim.RebalanceAnnotation of the list
	unlisted int    // kinds that have not been listed yet
	pooled   bool   // the pools have been listed: nothing of a pool is announced before
	// all is true if every address may have changed; dirty are the addresses that have.
	all   bool
	dirty map[netip.Addr]struct{}
	bySvc map[svc.Name]map[svc.Name]struct{} // slices of a Service
}

// claimed is who has an address.
type claimed struct {
	claim.Claim
	made time.Time // when it was first seen, zero if it is older than the speaker
}

// newFor is how long an address is new after its claim was made. Later a node that takes it
// is likely to take it over.
const newFor = 10 * time.Second

// announced is a Service.
type announced struct {
	uid   types.UID
	addrs []netip.Addr
	local bool
	ports []svc.PortName
}

// sliceNodes are the nodes with a ready endpoint in an EndpointSlice.
type sliceNodes struct {
	service svc.Name
	nodes   []string
}

// address is everything that decides who may announce an address.
type address struct {
	addr     netip.Addr
	services []svc.Name // that have it
	refs     []corev1.ObjectReference
	ports    []svc.PortName
	ways     poolWay
	fresh    bool // no node had it before, as far as is known
	// restricted is true if only nodes may announce it: the nodes with an endpoint of every Service of policy Local, of those that
	// its pool selects.
	restricted bool
	nodes      []string
}

// NewKnown returns a Known that follows nothing yet. It reports Services, claims and the node to front.
func NewKnown(node string, front Front) *Known {
	return &Known{
		node: node, front: front, wake: loop.NewSignal(), endpoints: newOnDemand(), otherNodes: newOnDemand(), labels: map[string]labels.Set{},
		claims: map[netip.Addr]claimed{}, services: map[svc.Name]*announced{},
		slices: map[svc.Name]sliceNodes{}, pools: map[string]poolWay{}, dirty: map[netip.Addr]struct{}{},
		bySvc: map[svc.Name]map[svc.Name]struct{}{},
	}
}

// change calls f with the lock held, and wakes the loop.
func (k *Known) change(f func()) {
	k.mu.Lock()
	f()
	k.mu.Unlock()
	k.wake.Set()
}

// touch records that the addresses of a Service may have changed. The caller holds mu.
func (k *Known) touch(n svc.Name) {
	if s := k.services[n]; s != nil {
		for _, a := range s.addrs {
			k.dirty[a] = struct{}{}
		}
	}
}

// named selects the object of a name.
func named(name string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
}

// FollowServed follows the kinds that the front needs, until ctx ends.
func (k *Known) FollowServed(ctx context.Context, running *sync.WaitGroup, client kubernetes.Interface) {
	ctx = reflector.Quiet(ctx)
	core := client.CoreV1()
	claims := metav1.ListOptions{LabelSelector: claim.Selector}
	run(ctx, running, "claims", reflector.From(client.NetworkingV1().IPAddresses(), claims), sink(k, k.setClaim, k.dropClaim))
	run(ctx, running, "services", reflector.From(core.Services(""), metav1.ListOptions{}), sink(k, k.setService, k.dropService))
	run(ctx, running, "node", reflector.From(core.Nodes(), named(k.node)), sink(k, k.setNode, func(svc.Name) { k.setNode(nil) }))
}

// follow follows every kind until ctx ends.
func (k *Known) follow(ctx context.Context, running *sync.WaitGroup, client kubernetes.Interface, lb *v1.Client) {
	pools := sink(k, k.setPool, k.dropPool, func() { k.pooled, k.all = true, true })
	voters := sink(k, func(m *corev1.ConfigMap) {
		k.spread = m.Annotations[claim.RebalanceAnnotation]
		if l, err := claim.ReadVoters(m); err == nil && l.Current.Version > k.list.Version {
			k.list = l.Current
		}
	}, func(svc.Name) {})
	k.FollowServed(ctx, running, client)
	ctx = reflector.Quiet(ctx)
	onceNeeded(ctx, running, &k.endpoints, "endpointslices",
		reflector.From(client.DiscoveryV1().EndpointSlices(""), metav1.ListOptions{}), sinkOf(k, k.setSlice, k.dropSlice))
	onceNeeded(ctx, running, &k.otherNodes, "nodes",
		reflector.From(client.CoreV1().Nodes(), metav1.ListOptions{}), sinkOf(k, k.setLabels, k.dropLabels))
	run(ctx, running, "pools", reflector.From(lb.Pools, metav1.ListOptions{}).Defined(), pools)
	run(ctx, running, "voters", reflector.From(client.CoreV1().ConfigMaps(svc.SystemNamespace), named(svc.VotersConfigMap)), voters)
}

func run[T any](ctx context.Context, running *sync.WaitGroup, name string, from reflector.Source, to reflector.Sink[T]) {
	running.Go(func() { reflector.Run(ctx, "lb-speaker/"+name, from, to) })
}

func onceNeeded[T any](ctx context.Context, running *sync.WaitGroup, kind *onDemand, name string, from reflector.Source,
	to reflector.Sink[T],
) {
	running.Go(func() {
		select {
		case <-ctx.Done():
		case <-kind.needed:
			reflector.Run(ctx, "lb-speaker/"+name, from, to)
		}
	})
}

// sink is sinkOf for a kind that is followed from the start.
func sink[T metav1.Object](k *Known, set func(T), drop func(svc.Name), listed ...func()) reflector.Sink[T] {
	k.mu.Lock()
	k.unlisted++
	k.mu.Unlock()
	return sinkOf(k, set, drop, listed...)
}

// sinkOf returns a Sink that calls set and drop, and listed after all that was listed first, with the lock held.
func sinkOf[T metav1.Object](k *Known, set func(T), drop func(svc.Name), listed ...func()) reflector.Sink[T] {
	have := map[svc.Name]struct{}{}
	first := sync.OnceFunc(func() {
		for _, f := range listed {
			f()
		}
		if k.unlisted--; k.unlisted == 0 {
			k.front.Listed()
		}
	})
	return reflector.Sink[T]{
		Replace: func(objs []T) {
			k.change(func() {
				next := make(map[svc.Name]struct{}, len(objs))
				for _, o := range objs {
					next[svc.NameOf(o)] = struct{}{}
					set(o)
				}
				for n := range have {
					if _, still := next[n]; !still {
						drop(n)
					}
				}
				have = next
				first()
			})
		},
		Set: func(o T) {
			k.change(func() {
				have[svc.NameOf(o)] = struct{}{}
				set(o)
			})
		},
		Delete: func(o T) {
			k.change(func() {
				delete(have, svc.NameOf(o))
				drop(svc.NameOf(o))
			})
		},
	}
}

// setClaim records who has an address. The caller holds mu.
func (k *Known) setClaim(o *networkingv1.IPAddress) {
	parsed, ok := claim.Parse(o)
	if !ok {
		return
	}
	c := claimed{Claim: parsed}
	if old, had := k.claims[c.Addr]; had {
		c.made = old.made
	} else if k.unlisted == 0 {
		c.made = time.Now()
	}
	k.claims[c.Addr] = c
	k.dirty[c.Addr] = struct{}{}
	k.front.SetClaim(c.Addr, c.Services)
}

// dropClaim records that the claim of an address is deleted. The caller holds mu.
func (k *Known) dropClaim(n svc.Name) {
	if addr, err := netip.ParseAddr(n.Name); err == nil {
		delete(k.claims, addr)
		k.dirty[addr] = struct{}{}
		k.front.SetClaim(addr, nil)
	}
}

// setNode records this Node, nil if it is deleted. The caller holds mu.
func (k *Known) setNode(o *corev1.Node) {
	if k.self = o; o != nil {
		k.setLabels(o)
	}
	k.front.SetNode(o)
}

// setService records a Service. The caller holds mu.
func (k *Known) setService(o *corev1.Service) {
	n := svc.NameOf(o)
	if n == names.MeshService() {
		k.front.SetMesh()
	}
	k.touch(n)
	if o.Spec.Type != corev1.ServiceTypeLoadBalancer {
		k.front.DropService(n)
		delete(k.services, n)
		return
	}
	k.front.SetService(o)
	a := &announced{uid: o.UID, local: claim.IsLocal(o)}
	if a.local {
		k.need(&k.endpoints)
	}
	for _, in := range o.Status.LoadBalancer.Ingress {
		if addr, err := netip.ParseAddr(in.IP); err == nil && (in.IPMode == nil ||
			*in.IPMode == corev1.LoadBalancerIPModeVIP || k.front.Serves(n)) {
			a.addrs = append(a.addrs, addr)
		}
	}
	for _, p := range o.Spec.Ports {
		a.ports = append(a.ports, svc.PortName{Name: n, Port: p.Name})
	}
	k.services[n] = a
	k.touch(n)
}

// dropService records that a Service is deleted. The caller holds mu.
func (k *Known) dropService(n svc.Name) {
	k.touch(n)
	k.front.DropService(n)
	delete(k.services, n)
}

// setSlice records on which nodes an EndpointSlice has ready endpoints. The caller holds mu.
func (k *Known) setSlice(o *discoveryv1.EndpointSlice) {
	n := svc.NameOf(o)
	s := sliceNodes{service: svc.Name{Namespace: o.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]}}
	for i := range o.Endpoints {
		e := &o.Endpoints[i]
		if node := e.NodeName; node != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) && !slices.Contains(s.nodes, *node) {
			s.nodes = append(s.nodes, *node)
		}
	}
	slices.Sort(s.nodes)
	if old, had := k.slices[n]; had && old.service == s.service && slices.Equal(old.nodes, s.nodes) {
		return
	}
	k.dropSlice(n)
	k.slices[n] = s
	if k.bySvc[s.service] == nil {
		k.bySvc[s.service] = map[svc.Name]struct{}{}
	}
	k.bySvc[s.service][n] = struct{}{}
	k.touch(s.service)
}

// dropSlice records that an EndpointSlice is deleted. The caller holds mu.
func (k *Known) dropSlice(n svc.Name) {
	s, had := k.slices[n]
	if !had {
		return
	}
	delete(k.slices, n)
	if of := k.bySvc[s.service]; of != nil {
		if delete(of, n); len(of) == 0 {
			delete(k.bySvc, s.service)
		}
	}
	k.touch(s.service)
}

// setList records the list of voters, unless it is older than the last one.
func (k *Known) setList(l quorum.List) {
	k.change(func() {
		if l.Version > k.list.Version {
			k.list = l
		}
	})
}

// take returns the addresses that have changed since the last call, all addresses if all
// is true. A released address has no services.
func (k *Known) take(all bool) (out []address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if all || k.all {
		for a := range k.claims {
			k.dirty[a] = struct{}{}
		}
	}
	for a := range k.dirty {
		out = append(out, k.get(a))
	}
	k.all = false
	clear(k.dirty)
	return out
}

// every returns all addresses. It does not change what take returns.
func (k *Known) every() (out []address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for a := range k.claims {
		out = append(out, k.get(a))
	}
	return out
}

// Listed reports whether every kind has been listed.
func (k *Known) Listed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unlisted == 0
}

// get returns everything about an address. The caller holds mu.
func (k *Known) get(addr netip.Addr) address {
	c := k.claims[addr]
	a := address{addr: addr, ways: k.pools[c.Pool], fresh: time.Since(c.made) < newFor}
	for _, n := range c.Services {
		s := k.services[n]
		if s == nil || !slices.Contains(s.addrs, addr) {
			continue
		}
		a.services = append(a.services, n)
		a.refs = append(a.refs, corev1.ObjectReference{
			Kind: "Service", APIVersion: "v1", Namespace: n.Namespace, Name: n.Name, UID: s.uid,
		})
		a.ports = append(a.ports, s.ports...)
		if s.local {
			a.restrict(k.nodesOf(n))
		}
	}
	if a.ways.selects != nil {
		a.restrict(a.ways.nodes)
	}
	if c.Pool != "" && !k.pooled {
		a.restrict(nil)
	}
	return a
}

// restrict leaves only nodes that are listed, which is sorted.
func (a *address) restrict(to []string) {
	if !a.restricted {
		a.restricted, a.nodes = true, to
		return
	}
	a.nodes = slices.DeleteFunc(slices.Clone(a.nodes), func(n string) bool { _, has := slices.BinarySearch(to, n); return !has })
}

// permits reports whether a node may announce the address, by its endpoints and its labels.
func (a *address) permits(node string) bool { return !a.restricted || slices.Contains(a.nodes, node) }

// nodesOf returns the nodes with a ready endpoint of a Service, sorted. The caller holds mu.
func (k *Known) nodesOf(n svc.Name) []string {
	nodes := map[string]struct{}{}
	for slice := range k.bySvc[n] {
		for _, node := range k.slices[slice].nodes {
			nodes[node] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(nodes))
}

// one returns everything about an address.
func (k *Known) one(addr netip.Addr) address {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.get(addr)
}

// interfaces returns the names of the interfaces that pools name, sorted.
func (k *Known) interfaces() (names []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.pools {
		names = append(names, p.interfaces...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// rebalanced returns the last request of 'fairlead lb rebalance', empty if there is none. ok is false before it is known.
func (k *Known) rebalanced() (request string, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.spread, k.unlisted == 0
}

// own returns this node's object and the list of voters.
func (k *Known) own() (*corev1.Node, quorum.List) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.self, k.list
}
