package controller

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// mirroring keeps slices that mirror the Endpoints users make for Services
// without a selector.
type mirroring struct {
	*controllerContext
	loop   *loop.Loop[svc.Name]
	store  *sliceStore
	events *planEvents
	taken  takenNames
}

func newMirroring(s *controllerContext) (func(ctx context.Context), error) {
	c := &mirroring{controllerContext: s, events: newPlanEvents(s)}
	c.loop = loop.New(s.log, MirroringName, s.options.Workers, c.sync)
	add := func(o metav1.Object) { c.loop.Queue.Add(nameOf(o)) }
	if err := s.handle(s.informers.Core().V1().Endpoints().Informer(), handlers(add, add)); err != nil {
		return nil, err
	}
	services := handlers(add, add)
	services.UpdateFunc = func(old, o any) {
		if (len(old.(*corev1.Service).Spec.Selector) == 0) != (len(o.(*corev1.Service).Spec.Selector) == 0) {
			add(o.(*corev1.Service))
		}
	}
	if err := s.handle(s.informers.Core().V1().Services().Informer(), services); err != nil {
		return nil, err
	}
	var err error
	c.store, err = slicesOf(s, c.loop.Queue.Add)
	return c.loop.Run, err
}

func (c *mirroring) sync(ctx context.Context, name svc.Name) error {
	if err := c.store.settle(ctx, name); err != nil {
		return err
	}
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
		c.events.forget(name)
		c.taken.forget(name)
		if len(present) == 0 {
			return nil
		}
		if service == nil {
			if gone, err := serviceGone(ctx, c.client, name); err != nil || !gone {
				return errors.Join(err, errReplan)
			}
		}
		return c.store.deleteAll(ctx, name, present)
	}
	plan := epslice.Mirror(object, present, c.taken.of(name), 0)
	c.events.record(name, object, plan.Events)
	if plan.Empty() {
		return nil
	}
	err = c.store.write(ctx, name, plan)
	c.taken.add(name, err)
	return err
}
