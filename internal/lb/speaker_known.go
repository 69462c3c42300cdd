package lb

import (
	"context"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// known is what a speaker knows from the API, written by reflectors. Of each object
// it keeps what an announcement depends on.
type known struct {
	node     string
	proxying *proxying
	// wake holds a token after something has changed.
	wake chan struct{}

	// needSlices is closed when there is a Service of policy Local: before, it is not
	// needed where endpoints are.
	needSlices chan struct{}
	needed     sync.Once

	mu       sync.Mutex
	claims   map[netip.Addr]claim
	services map[svc.Name]*announced
	slices   map[svc.Name]sliceNodes
	pools    map[string]poolWay
	self     *corev1.Node
	list     quorum.List
	unlisted int // kinds that have not been listed yet
	// all is true if every address may be concerned by what has changed; dirty are
	// those that are.
	all   bool
	dirty map[netip.Addr]struct{}
	bySvc map[svc.Name]map[svc.Name]struct{} // slices of a Service
}

// claim is an IPAddress object of ours.
type claim struct {
	pool     string
	services []svc.Name
	made     time.Time // when it was first seen, zero if it was there before the speaker
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

// poolWay is how a pool's addresses are announced.
type poolWay struct {
	interfaces []string
	object     *v1.IPAddressPool
}

// address is everything that decides who may announce an address.
type address struct {
	addr     netip.Addr
	services []svc.Name // that have it
	refs     []corev1.ObjectReference
	ports    []svc.PortName
	ways     poolWay
	fresh    bool // no node had it before, as far as is known
	// local is true if nodes alone may announce it: those with an endpoint of every
	// Service of policy Local.
	local bool
	nodes []string
}

func newKnown(node string, p *proxying) *known {
	k := &known{
		node: node, proxying: p, wake: make(chan struct{}, 1), needSlices: make(chan struct{}),
		claims: map[netip.Addr]claim{}, services: map[svc.Name]*announced{},
		slices: map[svc.Name]sliceNodes{}, pools: map[string]poolWay{}, dirty: map[netip.Addr]struct{}{},
		bySvc: map[svc.Name]map[svc.Name]struct{}{},
	}
	p.listed = k.listed
	return k
}

// poke wakes the loop.
func (k *known) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// change calls f with the lock held, and wakes the loop.
func (k *known) change(f func()) {
	k.mu.Lock()
	f()
	k.mu.Unlock()
	k.poke()
}

// touch records that the addresses of a Service are concerned.
func (k *known) touch(n svc.Name) {
	if s := k.services[n]; s != nil {
		for _, a := range s.addrs {
			k.dirty[a] = struct{}{}
		}
	}
}

// follow starts a reflector for each kind.
func (k *known) follow(ctx context.Context, running *sync.WaitGroup, client kubernetes.Interface, lb *v1.Client) {
	ctx = reflector.Quiet(ctx)
	named := func(name string) metav1.ListOptions {
		return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()}
	}
	ours := metav1.ListOptions{LabelSelector: networkingv1.LabelManagedBy + "=" + ManagedBy}
	run(ctx, running, "claims", reflector.From(client.NetworkingV1().IPAddresses(), ours), sink(k, k.setClaim, k.dropClaim))
	run(ctx, running, "services", reflector.From(client.CoreV1().Services(""), metav1.ListOptions{}), sink(k, k.setService, k.dropService))
	running.Go(func() {
		select {
		case <-ctx.Done():
		case <-k.needSlices:
			from := reflector.From(client.DiscoveryV1().EndpointSlices(""), metav1.ListOptions{})
			reflector.Run(ctx, "lb-speaker/endpointslices", from, sink(k, k.setSlice, k.dropSlice))
		}
	})
	run(ctx, running, "pools", reflector.From(lb.Pools, metav1.ListOptions{}), sink(k, k.setPool, k.dropPool))
	run(ctx, running, "node", reflector.From(client.CoreV1().Nodes(), named(k.node)),
		sink(k, k.setNode, func(svc.Name) { k.setNode(nil) }))
	run(ctx, running, "voters", reflector.From(client.CoreV1().ConfigMaps(Namespace), named(VotersName)),
		sink(k, func(m *corev1.ConfigMap) {
			if l, err := readLists(m); err == nil && l.Current.Version > k.list.Version {
				k.list = l.Current
			}
		}, func(svc.Name) {}))
}

func run[T any](ctx context.Context, running *sync.WaitGroup, name string, from reflector.Source, to reflector.Sink[T]) {
	running.Go(func() { reflector.Run(ctx, "lb-speaker/"+name, from, to) })
}

// sink returns a Sink that calls set and drop with the lock held.
func sink[T metav1.Object](k *known, set func(T), drop func(svc.Name)) reflector.Sink[T] {
	have := map[svc.Name]struct{}{}
	k.mu.Lock()
	k.unlisted++
	k.mu.Unlock()
	first := sync.OnceFunc(func() {
		if k.unlisted--; k.unlisted == 0 {
			signal(k.proxying.wake)
		}
	})
	name := func(o T) svc.Name { return svc.Name{Namespace: o.GetNamespace(), Name: o.GetName()} }
	return reflector.Sink[T]{
		Replace: func(objs []T) {
			k.change(func() {
				next := make(map[svc.Name]struct{}, len(objs))
				for _, o := range objs {
					next[name(o)] = struct{}{}
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
				have[name(o)] = struct{}{}
				set(o)
			})
		},
		Delete: func(o T) {
			k.change(func() {
				delete(have, name(o))
				drop(name(o))
			})
		},
	}
}

func (k *known) setClaim(o *networkingv1.IPAddress) {
	addr, err := netip.ParseAddr(o.Name)
	if err != nil {
		return
	}
	c := claim{pool: o.Annotations[PoolAnnotation]}
	if old, had := k.claims[addr]; had {
		c.made = old.made
	} else if k.unlisted == 0 {
		c.made = time.Now()
	}
	for text := range strings.SplitSeq(o.Annotations[ServicesAnnotation], ",") {
		if n, err := svc.ParseName(text); err == nil {
			c.services = append(c.services, n)
		}
	}
	k.claims[addr] = c
	k.dirty[addr] = struct{}{}
	k.proxying.setClaim(addr, c.services)
}

func (k *known) dropClaim(n svc.Name) {
	if addr, err := netip.ParseAddr(n.Name); err == nil {
		delete(k.claims, addr)
		k.dirty[addr] = struct{}{}
		k.proxying.setClaim(addr, nil)
	}
}

func (k *known) setNode(o *corev1.Node) {
	k.self = o
	k.proxying.setNode(o)
}

func (k *known) setService(o *corev1.Service) {
	n := svc.Name{Namespace: o.Namespace, Name: o.Name}
	k.touch(n)
	if o.Spec.Type != corev1.ServiceTypeLoadBalancer {
		k.proxying.dropService(n)
		delete(k.services, n)
		return
	}
	k.proxying.setService(o)
	a := &announced{uid: o.UID, local: o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal}
	if a.local {
		k.needed.Do(func() { close(k.needSlices) })
	}
	for _, in := range o.Status.LoadBalancer.Ingress {
		if addr, err := netip.ParseAddr(in.IP); err == nil && (in.IPMode == nil ||
			*in.IPMode == corev1.LoadBalancerIPModeVIP || k.proxying.serves(n)) {
			a.addrs = append(a.addrs, addr)
		}
	}
	for _, p := range o.Spec.Ports {
		a.ports = append(a.ports, svc.PortName{Name: n, Port: p.Name})
	}
	k.services[n] = a
	k.touch(n)
}

func (k *known) dropService(n svc.Name) {
	k.touch(n)
	k.proxying.dropService(n)
	delete(k.services, n)
}

func (k *known) setSlice(o *discoveryv1.EndpointSlice) {
	n := svc.Name{Namespace: o.Namespace, Name: o.Name}
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

func (k *known) dropSlice(n svc.Name) {
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

func (k *known) setPool(o *v1.IPAddressPool) {
	old, had := k.pools[o.Name]
	if had && slices.Equal(old.interfaces, o.Spec.Interfaces) && reflect.DeepEqual(old.object.Spec.BGP, o.Spec.BGP) {
		return
	}
	k.pools[o.Name] = poolWay{interfaces: o.Spec.Interfaces, object: o}
	k.all = true
}

func (k *known) dropPool(n svc.Name) {
	delete(k.pools, n.Name)
	k.all = true
}

func (k *known) setList(l quorum.List) {
	k.change(func() {
		if l.Version > k.list.Version {
			k.list = l
		}
	})
}

// take returns the addresses that are concerned by what has changed since the last
// call, all of them if all is true. Those that have been released have no services.
func (k *known) take(all bool) (out []address) {
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

// every returns all addresses, and leaves what take returns as it is.
func (k *known) every() (out []address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for a := range k.claims {
		out = append(out, k.get(a))
	}
	return out
}

// listed reports whether every kind has been listed.
func (k *known) listed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unlisted == 0
}

// get returns what is known of an address.
func (k *known) get(addr netip.Addr) address {
	c := k.claims[addr]
	a := address{addr: addr, ways: k.pools[c.pool], fresh: time.Since(c.made) < newFor}
	for _, n := range c.services {
		s := k.services[n]
		if s == nil || !slices.Contains(s.addrs, addr) {
			continue
		}
		a.services = append(a.services, n)
		a.refs = append(a.refs, corev1.ObjectReference{
			Kind: "Service", APIVersion: "v1", Namespace: n.Namespace, Name: n.Name, UID: s.uid,
		})
		a.ports = append(a.ports, s.ports...)
		if !s.local {
			continue
		}
		nodes := map[string]struct{}{}
		for slice := range k.bySvc[n] {
			for _, node := range k.slices[slice].nodes {
				nodes[node] = struct{}{}
			}
		}
		if a.local {
			a.nodes = slices.DeleteFunc(a.nodes, func(n string) bool { _, has := nodes[n]; return !has })
		} else {
			a.nodes = slices.Sorted(maps.Keys(nodes))
		}
		a.local = true
	}
	return a
}

// one returns what is known of an address.
func (k *known) one(addr netip.Addr) address {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.get(addr)
}

// interfaces returns the names of the interfaces that pools name, sorted.
func (k *known) interfaces() (names []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.pools {
		names = append(names, p.interfaces...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// own returns this node's object and the list of voters.
func (k *known) own() (*corev1.Node, quorum.List) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.self, k.list
}
