package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/svc"
)

// garbage deletes what has lost its owner, in the background: EndpointSlices,
// Leases of Nodes and Pods whose owner references name a Service, an Endpoints,
// a Node or a Pod that is no longer there. Owners of other kinds are not known
// to this server; what they own is left alone.
type garbage struct {
	*shared
	loop *loop[owned]

	mu         sync.Mutex
	dependents map[types.UID]map[owned]bool // by owner
}

// owned is one object that has owners.
type owned struct {
	kind string
	name svc.Name
	uid  types.UID
}

func newGarbage(s *shared) (func(ctx context.Context), error) {
	c := &garbage{shared: s, dependents: map[types.UID]map[owned]bool{}}
	c.loop = newLoop(s, GarbageName, min(2, s.options.Workers), c.sync)
	core := s.informers.Core().V1()
	watch := []struct {
		kind     string
		informer cache.SharedIndexInformer
	}{
		{"EndpointSlice", s.informers.Discovery().V1().EndpointSlices().Informer()},
		{"Lease", s.factory(corev1.NamespaceNodeLease).Coordination().V1().Leases().Informer()},
		{"Pod", core.Pods().Informer()},
		{"Service", core.Services().Informer()},
		{"Endpoints", core.Endpoints().Informer()},
		{"Node", core.Nodes().Informer()},
	}
	for _, w := range watch {
		err := s.handle(w.informer, cache.ResourceEventHandlerFuncs{
			AddFunc: func(o any) { c.seen(w.kind, o.(metav1.Object)) },
			UpdateFunc: func(old, o any) {
				// An agent's first Lease is older than what it knows of its Node.
				if before, now := old.(metav1.Object), o.(metav1.Object); before.GetUID() != now.GetUID() ||
					!slices.EqualFunc(before.GetOwnerReferences(), now.GetOwnerReferences(), sameOwner) {
					c.forget(w.kind, before)
					c.seen(w.kind, now)
				}
			},
			DeleteFunc: func(o any) {
				if object, ok := final[metav1.Object](o); ok {
					c.lost(w.kind, object)
				}
			},
		})
		if err != nil {
			return nil, err
		}
	}
	return c.loop.run, nil
}

// owners returns the owners of kinds this controller knows, or nil if one is of
// another kind.
func owners(o metav1.Object) []metav1.OwnerReference {
	refs := o.GetOwnerReferences()
	for _, r := range refs {
		switch r.Kind {
		case "Service", "Endpoints", "Node", "Pod":
			if r.APIVersion == "v1" {
				continue
			}
		}
		return nil
	}
	return refs
}

func (c *garbage) seen(kind string, o metav1.Object) {
	refs := owners(o)
	if len(refs) == 0 {
		return
	}
	me := owned{kind, nameOf(o), o.GetUID()}
	c.mu.Lock()
	for _, r := range refs {
		if c.dependents[r.UID] == nil {
			c.dependents[r.UID] = map[owned]bool{}
		}
		c.dependents[r.UID][me] = true
	}
	c.mu.Unlock()
	// An owner that went while nobody looked is found by looking once.
	c.loop.queue.Add(me)
}

func sameOwner(a, b metav1.OwnerReference) bool {
	return a.APIVersion == b.APIVersion && a.Kind == b.Kind && a.Name == b.Name && a.UID == b.UID
}

// forget drops what is known of the object's owners.
func (c *garbage) forget(kind string, o metav1.Object) {
	me := owned{kind, nameOf(o), o.GetUID()}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range o.GetOwnerReferences() {
		delete(c.dependents[r.UID], me)
		if len(c.dependents[r.UID]) == 0 {
			delete(c.dependents, r.UID)
		}
	}
}

func (c *garbage) lost(kind string, o metav1.Object) {
	c.forget(kind, o)
	c.mu.Lock()
	var orphans []owned
	for d := range c.dependents[o.GetUID()] {
		orphans = append(orphans, d)
	}
	c.mu.Unlock()
	for _, d := range orphans {
		c.loop.queue.Add(d)
	}
}

func (c *garbage) sync(ctx context.Context, d owned) error {
	object := c.cached(d.kind, d.name)
	if object == nil || object.GetUID() != d.uid || object.GetDeletionTimestamp() != nil {
		return nil
	}
	refs := owners(object)
	if len(refs) == 0 {
		return nil
	}
	for _, r := range refs {
		if there := c.cached(r.Kind, ownerName(object, r)); there != nil && there.GetUID() == r.UID {
			return nil
		}
	}
	for _, r := range refs { // the watch may lag behind
		uid, err := c.live(ctx, r.Kind, ownerName(object, r))
		if err != nil || uid == r.UID {
			return err
		}
	}
	return c.delete(ctx, d)
}

func ownerName(o metav1.Object, r metav1.OwnerReference) svc.Name {
	if r.Kind == "Node" {
		return svc.Name{Name: r.Name}
	}
	return svc.Name{Namespace: o.GetNamespace(), Name: r.Name}
}

func (c *garbage) cached(kind string, name svc.Name) metav1.Object {
	core := c.informers.Core().V1()
	var store cache.Store
	key := name.String()
	switch kind {
	case "EndpointSlice":
		store = c.informers.Discovery().V1().EndpointSlices().Informer().GetStore()
	case "Lease":
		store = c.factory(corev1.NamespaceNodeLease).Coordination().V1().Leases().Informer().GetStore()
	case "Pod":
		store = core.Pods().Informer().GetStore()
	case "Service":
		store = core.Services().Informer().GetStore()
	case "Endpoints":
		store = core.Endpoints().Informer().GetStore()
	case "Node":
		store, key = core.Nodes().Informer().GetStore(), name.Name
	}
	o, ok, err := store.GetByKey(key)
	if !ok || err != nil {
		return nil
	}
	return o.(metav1.Object)
}

// live asks the API for the uid of an owner; none if it is not there.
func (c *garbage) live(ctx context.Context, kind string, name svc.Name) (types.UID, error) {
	var o metav1.Object
	var err error
	core := c.client.CoreV1()
	switch kind {
	case "Service":
		o, err = core.Services(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	case "Endpoints":
		o, err = core.Endpoints(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	case "Node":
		o, err = core.Nodes().Get(ctx, name.Name, metav1.GetOptions{})
	case "Pod":
		o, err = core.Pods(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	default:
		return "", errors.New("no such kind of owner: " + kind)
	}
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("get %s %s: %w", kind, name, err)
	}
	return o.GetUID(), nil
}

func (c *garbage) delete(ctx context.Context, d owned) error {
	options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &d.uid}}
	var err error
	switch d.kind {
	case "EndpointSlice":
		err = c.client.DiscoveryV1().EndpointSlices(d.name.Namespace).Delete(ctx, d.name.Name, options)
	case "Lease":
		err = c.client.CoordinationV1().Leases(d.name.Namespace).Delete(ctx, d.name.Name, options)
	case "Pod":
		err = c.client.CoreV1().Pods(d.name.Namespace).Delete(ctx, d.name.Name, options)
	}
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return fmt.Errorf("delete %s %s: %w", d.kind, d.name, err)
}
