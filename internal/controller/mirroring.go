package controller

import (
	"context"
	"errors"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// mirroring keeps slices that mirror the Endpoints users make for Services
// without a selector.
type mirroring struct {
	*shared
	loop  *loop[svc.Name]
	store *sliceStore
	notes *notes

	mu    sync.Mutex
	taken map[svc.Name][]string
}

func newMirroring(s *shared) (func(ctx context.Context), error) {
	c := &mirroring{shared: s, notes: newNotes(s), taken: map[svc.Name][]string{}}
	c.loop = newLoop(s, MirroringName, s.options.Workers, c.sync)
	add := func(o any) {
		c.loop.queue.Add(nameOf(o.(interface {
			GetNamespace() string
			GetName() string
		})))
	}
	gone := func(o any) {
		if e, ok := final[*corev1.Endpoints](o); ok {
			c.loop.queue.Add(nameOf(e))
		} else if service, ok := final[*corev1.Service](o); ok {
			c.loop.queue.Add(nameOf(service))
		}
	}
	if err := s.handle(s.informers.Core().V1().Endpoints().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc: add, UpdateFunc: func(_, o any) { add(o) }, DeleteFunc: gone,
	}); err != nil {
		return nil, err
	}
	if err := s.handle(s.informers.Core().V1().Services().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc: add, DeleteFunc: gone,
		UpdateFunc: func(old, o any) {
			if (len(old.(*corev1.Service).Spec.Selector) == 0) != (len(o.(*corev1.Service).Spec.Selector) == 0) {
				add(o)
			}
		},
	}); err != nil {
		return nil, err
	}
	var err error
	c.store, err = slicesOf(s, func(owner svc.Name) { c.loop.queue.Add(owner) })
	return c.loop.run, err
}

func (c *mirroring) sync(ctx context.Context, name svc.Name) error {
	service, err := c.informers.Core().V1().Services().Lister().Services(name.Namespace).Get(name.Name)
	if err != nil {
		service = nil
	}
	object, err := c.informers.Core().V1().Endpoints().Lister().Endpoints(name.Namespace).Get(name.Name)
	if err != nil {
		object = nil
	}
	present := c.store.managed(name, epslice.ManagedByMirroring)
	if !epslice.Mirrored(object, service) {
		c.notes.forget(name)
		c.mu.Lock()
		delete(c.taken, name)
		c.mu.Unlock()
		if len(present) == 0 {
			return nil
		}
		if service == nil {
			if gone, err := serviceGone(ctx, c.client, name); err != nil || !gone {
				return errors.Join(err, errAgain)
			}
		}
		return c.store.deleteAll(ctx, name, present)
	}
	c.mu.Lock()
	taken := c.taken[name]
	c.mu.Unlock()
	plan := epslice.Mirror(object, present, taken, 0)
	c.notes.tell(name, object, plan.Notes)
	if plan.Empty() {
		return nil
	}
	err = c.store.write(ctx, name, plan)
	if names := takenIn(err); len(names) > 0 {
		c.mu.Lock()
		c.taken[name] = append(c.taken[name], names...)
		c.mu.Unlock()
	}
	return err
}
