package front

import (
	"context"
	"net/netip"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxAlone is how many Services of a namespace that rules lead to have a watch each, for their own EndpointSlices. With more, one
// watch is for all EndpointSlices of the namespace: a watch costs a node and the API server 140 KB together.
const maxAlone = 8

// target is a Service that rules lead to.
type target struct {
	stop   context.CancelFunc // of its own watch
	slices map[string]*discoveryv1.EndpointSlice
	listed bool
	addrs  map[gateway.Backend][]netip.AddrPort // for as long as nothing changes
}

func (t *target) end() { t.stop() }

// takeAll takes the slices of a Service over from the watch of its namespace.
func (t *target) takeAll(all map[string]*discoveryv1.EndpointSlice) {
	t.stop()
	t.slices, t.listed, t.addrs = all, true, nil
}

// sliceWatch is one watch for all EndpointSlices of a namespace.
type sliceWatch struct {
	stop   context.CancelFunc
	listed bool
	of     map[string]map[string]*discoveryv1.EndpointSlice // by the name of the Service
	owner  map[string]string                                // the name of a slice's Service, by the slice
}

func (w *sliceWatch) end() { w.stop() }

// set takes a slice over, nil if it has gone. It returns the Services that it is and was of.
func (w *sliceWatch) set(name string, o *discoveryv1.EndpointSlice) (changed []string) {
	if before, had := w.owner[name]; had {
		delete(w.of[before], name)
		delete(w.owner, name)
		changed = append(changed, before)
	}
	if o != nil {
		service := o.Labels[discoveryv1.LabelServiceName]
		o.ManagedFields = nil // nobody asks for them, and most of the slices are of other Services
		if w.of[service] == nil {
			w.of[service] = map[string]*discoveryv1.EndpointSlice{}
		}
		w.of[service][name], w.owner[name] = o, service
		changed = append(changed, service)
	}
	return changed
}

// followBackends follows the EndpointSlices of the named Services, and no others. The caller holds mu.
func (r *routing) followBackends(ctx context.Context, running *sync.WaitGroup, named map[svc.Name]bool) {
	number := map[string]int{}
	for n := range named {
		number[n.Namespace]++
	}
	wide := map[string]bool{}
	for namespace, n := range number {
		// A watch that is there stays until the namespace has no backend any more.
		if n > maxAlone || r.wide[namespace] != nil {
			wide[namespace] = true
		}
	}
	followNamed(r.wide, wide, func(namespace string) *sliceWatch { return r.followNamespace(ctx, running, namespace) })
	followNamed(r.backends, named, func(n svc.Name) *target {
		w := r.wide[n.Namespace]
		if w == nil {
			return r.followTarget(ctx, running, n)
		}
		t := &target{stop: func() {}}
		if w.listed {
			t.takeAll(w.of[n.Name])
		}
		return t
	})
}

// changedTargets has what leads to some Services built again. The caller holds mu.
func (r *routing) changedTargets(concerned func(gateway.Target) bool) {
	r.rebuild(concerned)
	r.meshing.rebuild(concerned)
}

// followNamespace follows all EndpointSlices of a namespace. Once they are listed, its targets have them from there.
func (r *routing) followNamespace(ctx context.Context, running *sync.WaitGroup, namespace string) *sliceWatch {
	w := &sliceWatch{of: map[string]map[string]*discoveryv1.EndpointSlice{}, owner: map[string]string{}}
	ctx, w.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(name string, o *discoveryv1.EndpointSlice) {
		r.changed(func() {
			for _, service := range w.set(name, o) {
				n := svc.Name{Namespace: namespace, Name: service}
				if t := r.backends[n]; t != nil && r.wide[namespace] == w {
					t.takeAll(w.of[service])
					r.changedTargets(func(t gateway.Target) bool { return t.Name == n })
				}
			}
		})
	}
	sink := reflector.Sink[*discoveryv1.EndpointSlice]{
		Replace: func(list []*discoveryv1.EndpointSlice) {
			r.changed(func() {
				w.listed = true
				clear(w.of)
				clear(w.owner)
				for _, o := range list {
					w.set(o.Name, o)
				}
				for n, t := range r.backends {
					if n.Namespace == namespace && r.wide[namespace] == w {
						t.takeAll(w.of[n.Name])
					}
				}
				r.changedTargets(func(t gateway.Target) bool { return t.Name.Namespace == namespace })
			})
		},
		Set:    func(o *discoveryv1.EndpointSlice) { change(o.Name, o) },
		Delete: func(o *discoveryv1.EndpointSlice) { change(o.Name, nil) },
	}
	from := reflector.From(r.client.DiscoveryV1().EndpointSlices(namespace), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName})
	running.Go(func() { reflector.Run(ctx, "lb-speaker/routed", from, sink) })
	return w
}

// followTarget follows the EndpointSlices of a Service that rules lead to.
func (r *routing) followTarget(ctx context.Context, running *sync.WaitGroup, n svc.Name) *target {
	own := map[string]*discoveryv1.EndpointSlice{} // a late event changes nothing after takeAll
	t := &target{slices: own}
	ctx, t.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(do func()) {
		r.changed(func() {
			do()
			t.addrs = nil
			r.changedTargets(func(t gateway.Target) bool { return t.Name == n })
		})
	}
	sink := reflector.Sink[*discoveryv1.EndpointSlice]{
		Replace: func(list []*discoveryv1.EndpointSlice) {
			change(func() {
				clear(own)
				for _, o := range list {
					own[o.Name] = o
				}
				t.listed = true
			})
		},
		Set:    func(o *discoveryv1.EndpointSlice) { change(func() { own[o.Name] = o }) },
		Delete: func(o *discoveryv1.EndpointSlice) { change(func() { delete(own, o.Name) }) },
	}
	from := reflector.From(r.client.DiscoveryV1().EndpointSlices(n.Namespace),
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + n.Name})
	running.Go(func() { reflector.Run(ctx, "lb-speaker/routed", from, sink) })
	return t
}
