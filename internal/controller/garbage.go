package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/svc"
)

// garbage deletes objects whose owners are gone: EndpointSlices, Leases of Nodes
// and Pods whose owner references name a Service, an Endpoints, a Node or a Pod
// that no longer exists. What has an owner of another kind is left alone.
type garbage struct {
	*controllerContext
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

func newGarbage(s *controllerContext) (func(ctx context.Context), error) {
	c := &garbage{controllerContext: s, dependents: map[types.UID]map[owned]bool{}}
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
			AddFunc: func(o any) { c.add(w.kind, o.(metav1.Object)) },
			UpdateFunc: func(old, o any) {
				// An agent writes its first Lease before it knows its Node.
				if before, now := old.(metav1.Object), o.(metav1.Object); before.GetUID() != now.GetUID() ||
					!slices.EqualFunc(before.GetOwnerReferences(), now.GetOwnerReferences(), sameOwner) {
					c.forget(w.kind, before)
					c.add(w.kind, now)
				}
			},
			DeleteFunc: func(o any) {
				if object, ok := final[metav1.Object](o); ok {
					c.ownerDeleted(w.kind, object)
				}
			},
		})
		if err != nil {
			return nil, err
		}
	}
	return c.loop.run, nil
}

// owners returns the owners if all are of the kinds that this controller
// watches, else nil.
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

func (c *garbage) add(kind string, o metav1.Object) {
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
	// The owner may have been deleted before this process started.
	c.loop.queue.Add(me)
}

func sameOwner(a, b metav1.OwnerReference) bool {
	return a.APIVersion == b.APIVersion && a.Kind == b.Kind && a.Name == b.Name && a.UID == b.UID
}

// forget drops an object's entries at its owners.
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

func (c *garbage) ownerDeleted(kind string, o metav1.Object) {
	c.forget(kind, o)
	c.mu.Lock()
	orphans := slices.Collect(maps.Keys(c.dependents[o.GetUID()]))
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
	for _, r := range refs { // the watch may lag
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

// live asks the API server for the UID of an owner: "" if it does not exist.
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
		return "", errors.New("unknown kind of owner: " + kind)
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
	options := onlyUID(d.uid)
	var err error
	switch d.kind {
	case "EndpointSlice":
		err = c.client.DiscoveryV1().EndpointSlices(d.name.Namespace).Delete(ctx, d.name.Name, options)
	case "Lease":
		err = c.client.CoordinationV1().Leases(d.name.Namespace).Delete(ctx, d.name.Name, options)
	case "Pod":
		err = c.client.CoreV1().Pods(d.name.Namespace).Delete(ctx, d.name.Name, options)
	}
	if err := ignoreReplaced(err); err != nil {
		return fmt.Errorf("delete %s %s: %w", d.kind, d.name, err)
	}
	return nil
}
