package garbage

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// discoveryPeriod is how often the API server's kinds are read. After a
	// change of a CustomResourceDefinition they are read twice: soon, and when a
	// server of several has established it.
	discoveryPeriod = 30 * time.Second
	discoverySoon   = 500 * time.Millisecond
	discoveryLater  = 6 * time.Second
	// initialSync bounds the wait for the first lists. What is not there by then
	// is asked for, object by object.
	initialSync = 30 * time.Second
)

var definitions = schema.GroupResource{Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"}

// notCollected reports whether the objects of a resource are left out: Events end
// by themselves, and are the most.
func notCollected(r schema.GroupVersionResource) bool { return r.Resource == "events" }

// monitor is the watch of one resource.
type monitor struct {
	stop   context.CancelFunc
	synced chan struct{}
}

// run watches every resource that has objects to collect, and collects.
func (c *garbage) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	monitors := map[schema.GroupVersionResource]monitor{}
	changed := loop.NewSignal() // a definition did
	discover := func() {
		if err := c.discover(ctx, monitors, &wg, changed); err != nil {
			c.Log.Debug("cannot read the API server's kinds; retrying", "err", err, "retry", discoveryPeriod)
		}
	}
	discover()
	for limit := time.After(initialSync); len(monitors) == 0; discover() {
		select {
		case <-ctx.Done():
			return
		case <-limit:
			c.Log.Warn("cannot read the API server's kinds; still retrying", "controller", "garbage")
		case <-time.After(time.Second):
		}
	}
	c.waitSynced(ctx, monitors)
	wg.Go(func() { c.loop.Run(ctx) })
	next, later := time.NewTimer(discoveryPeriod), false
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			later = true
			next.Reset(discoverySoon)
		case <-next.C:
			discover()
			if later {
				later = false
				next.Reset(discoveryLater)
			} else {
				next.Reset(discoveryPeriod)
			}
		}
	}
}

func (c *garbage) waitSynced(ctx context.Context, monitors map[schema.GroupVersionResource]monitor) {
	limit := time.After(initialSync)
	for resource, m := range monitors {
		select {
		case <-m.synced:
		case <-ctx.Done():
			return
		case <-limit:
			c.Log.Warn("cannot list a resource; its objects are asked for one by one", "resource", resource)
			return
		}
	}
}

// discover starts watches of resources that are new and stops the watches of resources
// that are gone.
func (c *garbage) discover(
	ctx context.Context, monitors map[schema.GroupVersionResource]monitor, wg *sync.WaitGroup, changed loop.Signal,
) error {
	lists, err := discovery.ServerPreferredResourcesWithContext(ctx, discovery.ToDiscoveryInterfaceWithContext(c.Client.Discovery()))
	kinds := map[schema.GroupKind]servedKind{}
	watched := map[schema.GroupVersionResource]bool{}
	for _, list := range lists {
		version, invalid := schema.ParseGroupVersion(list.GroupVersion)
		if invalid != nil {
			continue
		}
		for i := range list.APIResources {
			r := &list.APIResources[i]
			at := version.WithResource(r.Name)
			kinds[version.WithKind(r.Kind).GroupKind()] = servedKind{at, r.Namespaced}
			if !notCollected(at) && supports(r.Verbs, "list", "watch", "delete") {
				watched[at] = true
			}
		}
	}
	c.serve(kinds, err != nil)
	for at := range watched {
		if _, ok := monitors[at]; !ok {
			monitors[at] = c.watch(ctx, at, wg, changed)
		}
	}
	if err != nil {
		return err // a group that does not answer is not gone
	}
	for at, m := range monitors {
		if !watched[at] {
			m.stop()
			delete(monitors, at)
			c.check(c.graph.forget(at))
		}
	}
	return nil
}

func supports(verbs metav1.Verbs, want ...string) bool {
	return !slices.ContainsFunc(want, func(v string) bool { return !slices.Contains(verbs, v) })
}

// serve sets the kinds that owners may be of, or with more adds to them, and
// checks what has waited for a new one.
func (c *garbage) serve(kinds map[schema.GroupKind]servedKind, more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isNew := false
	for k := range kinds {
		_, known := c.kinds[k]
		isNew = isNew || !known
	}
	if more {
		maps.Copy(c.kinds, kinds)
	} else {
		c.kinds = kinds
	}
	if isNew {
		for o := range c.unresolved {
			c.loop.Queue.Add(o)
		}
		clear(c.unresolved)
	}
}

func (c *garbage) watch(ctx context.Context, at schema.GroupVersionResource, wg *sync.WaitGroup, changed loop.Signal) monitor {
	ctx, cancel := context.WithCancel(ctx)
	m := monitor{cancel, make(chan struct{})}
	synced := sync.OnceFunc(func() { close(m.synced) })
	notify := func() {
		if at.GroupResource() == definitions {
			changed.Set()
		}
	}
	from := reflector.From(c.meta.Resource(at), metav1.ListOptions{}).Observed(func(err error) {
		if err != nil && ctx.Err() == nil {
			c.Log.Debug("cannot watch; retrying", "resource", at, "err", err)
		}
	})
	wg.Go(func() {
		reflector.Run(reflector.Silent(ctx), "garbage/"+at.Resource, from, reflector.Sink[*metav1.PartialObjectMetadata]{
			Replace: func(objs []*metav1.PartialObjectMetadata) {
				c.check(c.graph.replace(at, objs))
				synced()
			},
			Set: func(o *metav1.PartialObjectMetadata) {
				c.check(c.graph.set(at, o))
				notify()
			},
			Delete: func(o *metav1.PartialObjectMetadata) {
				c.check(c.graph.remove(o.UID))
				notify()
			},
		})
	})
	return m
}

func svcName(namespaced bool, dependent objectRef, r metav1.OwnerReference) svc.Name {
	if namespaced {
		return svc.Name{Namespace: dependent.name.Namespace, Name: r.Name}
	}
	return svc.Name{Name: r.Name}
}
