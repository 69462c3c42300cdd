package proxy

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/tracing"
)

// feed receives what the watches deliver and holds it until the loop takes it.
// An event costs one map write; many events on one object between two takes
// are one. There is no second copy of the objects: the Builder has the only
// one.
type feed struct {
	mu       sync.Mutex
	services pending[*corev1.Service]
	slices   pending[*discoveryv1.EndpointSlice]
	node     pending[*corev1.Node]
	// triggers are when endpoints changed, as their controller noted, for the
	// programming latency; at most maxTriggers.
	triggers []time.Time
	// oldest is when the first event arrived that was not taken yet.
	oldest time.Time
	synced chan struct{} // closed when all three have been listed

	// wake holds a token while there is something to take.
	wake loop.Signal
}

const maxTriggers = 1000

// pending is what happened to the objects of one kind.
type pending[T any] struct {
	set map[svc.Name]T // the zero T stands for a deleted object
	// replaced reports that set is complete: objects that are not in it were deleted.
	replaced bool
	listed   bool
	events   int
	// version is that up to which everything of the kind has been delivered.
	version uint64
}

// empty returns p with nothing to take.
func (p *pending[T]) empty() pending[T] {
	return pending[T]{set: map[svc.Name]T{}, listed: p.listed, version: p.version}
}

func newFeed() *feed {
	f := &feed{wake: loop.NewSignal(), synced: make(chan struct{})}
	f.services.set = map[svc.Name]*corev1.Service{}
	f.slices.set = map[svc.Name]*discoveryv1.EndpointSlice{}
	f.node.set = map[svc.Name]*corev1.Node{}
	return f
}

// signal is called with mu held.
func (f *feed) signal() {
	if f.oldest.IsZero() {
		f.oldest = time.Now()
	}
	f.wakeUp()
}

// wakeUp wakes the loop although there may be nothing to take.
func (f *feed) wakeUp() {
	f.wake.Set()
}

// batch is what the loop takes at once.
type batch struct {
	services pending[*corev1.Service]
	slices   pending[*discoveryv1.EndpointSlice]
	node     pending[*corev1.Node]
	triggers []time.Time
	oldest   time.Time
}

// take empties the feed.
func (f *feed) take() batch {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := batch{f.services, f.slices, f.node, f.triggers, f.oldest}
	f.services, f.slices, f.node = f.services.empty(), f.slices.empty(), f.node.empty()
	f.triggers, f.oldest = nil, time.Time{}
	return b
}

// into hands the batch to b and returns this machine's Node (nil: it is gone) if
// the batch says something of it.
func (p *batch) into(b *table.Builder, nodeName string) (node *corev1.Node, seen bool) {
	if p.services.replaced {
		for n := range b.Services() {
			if _, there := p.services.set[n]; !there {
				p.services.set[n] = nil
			}
		}
	}
	for n, s := range p.services.set {
		if s == nil {
			b.DeleteService(n)
		} else {
			b.SetService(s)
		}
	}
	if p.slices.replaced {
		for n := range b.Slices() {
			if _, there := p.slices.set[n]; !there {
				p.slices.set[n] = nil
			}
		}
	}
	for n, s := range p.slices.set {
		if s == nil {
			b.DeleteSlice(n)
		} else {
			b.SetSlice(s)
		}
	}
	node, seen = p.node.set[svc.Name{Name: nodeName}]
	if seen = seen || p.node.replaced; seen {
		b.SetNode(node)
	}
	return node, seen
}

// kind enters what a watch delivers of one kind into the feed.
type kind[T interface {
	comparable
	metav1.Object
}] struct {
	feed *feed
	into *pending[T] // guarded by feed.mu
	lean func(T) T   // may be nil
	seen func(T)     // called with feed.mu held for an event, not for a list; may be nil

	name   string           // of the kind, for traces
	traces *tracing.Pending // may be nil
}

func (k *kind[T]) sink() reflector.Sink[T] {
	return reflector.Sink[T]{Replace: k.replace, Set: k.set, Delete: k.delete, Version: k.version}
}

func (k *kind[T]) set(o T) {
	k.traces.Seen(k.name, o, false)
	k.feed.mu.Lock()
	defer k.feed.mu.Unlock()
	if k.lean != nil {
		o = k.lean(o)
	}
	k.into.set[svc.NameOf(o)] = o
	k.into.version = barrier.Of(o)
	k.into.events++
	if k.seen != nil {
		k.seen(o)
	}
	k.feed.signal()
}

func (k *kind[T]) delete(o T) {
	var none T
	k.traces.Seen(k.name, o, true)
	k.feed.mu.Lock()
	defer k.feed.mu.Unlock()
	k.into.set[svc.NameOf(o)] = none
	k.into.version = barrier.Of(o)
	k.into.events++
	k.feed.signal()
}

func (k *kind[T]) replace(list []T) {
	set := make(map[svc.Name]T, len(list))
	k.feed.mu.Lock()
	defer k.feed.mu.Unlock()
	for _, o := range list {
		if k.lean != nil {
			o = k.lean(o)
		}
		set[svc.NameOf(o)] = o
	}
	k.into.set, k.into.replaced = set, true
	k.into.events += len(list)
	first := !k.into.listed
	k.into.listed = true
	if first && k.feed.services.listed && k.feed.slices.listed && k.feed.node.listed {
		close(k.feed.synced)
	}
	k.feed.signal()
}

// version is called after each of the others, too; it is news of lists and bookmarks.
func (k *kind[T]) version(text string) {
	k.feed.mu.Lock()
	defer k.feed.mu.Unlock()
	if v := barrier.Parse(text); v != k.into.version {
		k.into.version = v
		k.feed.wakeUp()
	}
}

// run watches all three kinds until ctx ends.
func (f *feed) run(ctx context.Context, o *Options) {
	client := o.Client
	ours := metav1.ListOptions{LabelSelector: barrier.ProxySelector}
	self := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, o.NodeName).String()}
	services := kind[*corev1.Service]{feed: f, into: &f.services, lean: leanService, name: tracing.Service, traces: o.Traces}
	slices := kind[*discoveryv1.EndpointSlice]{feed: f, into: &f.slices, seen: f.trigger, name: tracing.EndpointSlice, traces: o.Traces}
	node := kind[*corev1.Node]{feed: f, into: &f.node, lean: leanNode}
	slicesSink := slices.sink()
	if o.FollowSlices != nil {
		slicesSink = o.FollowSlices(slicesSink)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		reflector.Run(ctx, "proxy/services", reflector.From(client.CoreV1().Services(""), ours), services.sink())
	})
	wg.Go(func() {
		reflector.Run(ctx, "proxy/endpointslices", reflector.From(client.DiscoveryV1().EndpointSlices(""), ours), slicesSink)
	})
	wg.Go(func() {
		reflector.Run(ctx, "proxy/node", reflector.From(client.CoreV1().Nodes(), self), node.sink())
	})
	wg.Wait()
}

// trigger remembers when the endpoints of a slice changed.
func (f *feed) trigger(s *discoveryv1.EndpointSlice) {
	text, ok := s.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if !ok || len(f.triggers) >= maxTriggers {
		return
	}
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		f.triggers = append(f.triggers, t)
	}
}

// nextHopsWait is how long the first Table waits for the ways to other nodes.
const nextHopsWait = 2 * time.Second

// awaitNextHops waits until the ways to other nodes are known, but not for long, and reports whether they are. A first Table without
// them would translate what the process before passed on, and end its connections.
func (f *feed) awaitNextHops(ctx context.Context, o *Options) bool {
	limit := time.NewTimer(nextHopsWait)
	defer limit.Stop()
	defer f.wakeUp() // for what arrives in the meantime
	for o.NextHops() == nil {
		select {
		case <-ctx.Done():
			return false
		case <-limit.C:
			o.Log.Warn("the ways to other nodes are not known yet; translating what Services with direct return get until they are")
			return false
		case <-f.wake:
		}
	}
	return true
}
