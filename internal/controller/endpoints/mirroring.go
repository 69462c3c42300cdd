package endpoints

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// mirroring keeps slices that mirror the Endpoints users make for Services
// without a selector.
type mirroring struct {
	*kit.Kit
	loop   *loop.Loop[svc.Name]
	store  *SliceStore
	events *planEvents
	taken  takenNames
}

// NewMirroring returns the controller that mirrors Endpoints into slices.
func NewMirroring(k *kit.Kit, name string, store *SliceStore) (kit.Task, error) {
	c := &mirroring{Kit: k, store: store, events: newPlanEvents(k.Events)}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	add := func(o metav1.Object) { c.loop.Queue.Add(svc.NameOf(o)) }
	if err := k.Handle(k.Informers.Core().V1().Endpoints().Informer(), kit.Handlers(add, add)); err != nil {
		return nil, err
	}
	services := kit.Handlers(add, add)
	services.UpdateFunc = func(old, o any) {
		if (len(old.(*corev1.Service).Spec.Selector) == 0) != (len(o.(*corev1.Service).Spec.Selector) == 0) {
			add(o.(*corev1.Service))
		}
	}
	if err := k.Handle(k.Informers.Core().V1().Services().Informer(), services); err != nil {
		return nil, err
	}
	c.store.Subscribe(c.loop.Queue.Add)
	return c.loop.Run, nil
}

func (c *mirroring) sync(ctx context.Context, name svc.Name) error {
	if err := c.store.settle(ctx, name); err != nil {
		return err
	}
	service, err := c.Informers.Core().V1().Services().Lister().Services(name.Namespace).Get(name.Name)
	if err != nil {
		service = nil
	}
	object, err := c.Informers.Core().V1().Endpoints().Lister().Endpoints(name.Namespace).Get(name.Name)
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
			if gone, err := serviceGone(ctx, c.Client, name); err != nil || !gone {
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
