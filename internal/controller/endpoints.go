package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpoints keeps the Endpoints objects of Services with a selector.
type endpoints struct {
	*shared
	loop     *loop[svc.Name]
	index    *selection
	view     *view[*corev1.Endpoints]
	triggers triggers
	pace     pace

	mu   sync.Mutex
	lost map[svc.Name]bool // Services seen to be deleted
}

func newEndpoints(s *shared) (func(ctx context.Context), error) {
	c := &endpoints{shared: s, lost: map[svc.Name]bool{}}
	c.loop = newLoop(s, EndpointsName, s.options.Workers, c.sync)
	var err error
	if c.index, err = selectionOf(s); err != nil {
		return nil, err
	}
	c.index.subscribe(func(ch change) {
		c.mu.Lock()
		if ch.deleted {
			c.lost[ch.service] = true
		}
		c.mu.Unlock()
		c.triggers.note(ch.service, ch.trigger)
		c.loop.queue.Add(ch.service)
	})
	informer := s.informers.Core().V1().Endpoints().Informer()
	c.view = newView(func(e *corev1.Endpoints) (svc.Name, bool) { return nameOf(e), true }, func(name svc.Name) bool {
		_, ok, err := informer.GetStore().GetByKey(name.String())
		return ok && err == nil
	})
	again := func(name svc.Name) { c.loop.queue.Add(name) }
	if err := s.handle(informer, viewHandler(c.view, again)); err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		var t tasks
		t.add(c.loop.run)
		t.add(func(ctx context.Context) { c.view.audit(ctx, again) })
		t.run(ctx)
	}, nil
}

func (c *endpoints) sync(ctx context.Context, name svc.Name) error {
	service := c.index.service(name)
	if service == nil {
		return c.gone(ctx, name)
	}
	c.mu.Lock()
	delete(c.lost, name)
	c.mu.Unlock()
	if len(service.Spec.Selector) == 0 || service.Spec.Type == corev1.ServiceTypeExternalName {
		return nil // what is there is the user's, or stays as in Kubernetes
	}
	if left := c.pace.wait(name); left > 0 {
		c.loop.queue.AddAfter(name, left)
		return nil
	}
	trigger := c.triggers.take(name)
	current := c.current(name)
	want := epslice.Endpoints(service, c.index.pods(service), current, trigger)
	if want == nil {
		return nil
	}
	began := time.Now()
	err := c.write(ctx, current, want)
	if err != nil {
		c.triggers.note(name, trigger)
		return err
	}
	c.pace.wrote(name, began)
	return nil
}

func (c *endpoints) current(name svc.Name) *corev1.Endpoints {
	if list := c.view.list(name); len(list) > 0 {
		return list[0]
	}
	return nil
}

func (c *endpoints) write(ctx context.Context, current, want *corev1.Endpoints) error {
	api := c.client.CoreV1().Endpoints(want.Namespace)
	name := nameOf(want)
	var made *corev1.Endpoints
	var err error
	if current == nil {
		made, err = api.Create(ctx, want, metav1.CreateOptions{})
	} else {
		made, err = api.Update(ctx, want, metav1.UpdateOptions{})
	}
	switch {
	case err == nil:
		c.view.wrote(made)
		return nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		now, err := api.Get(ctx, name.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			if current != nil {
				c.view.deleted(name, name, current.UID)
			}
			return errAgain
		}
		if err != nil {
			return fmt.Errorf("get Endpoints %s: %w", name, err)
		}
		c.view.wrote(now)
		return errAgain
	}
	return fmt.Errorf("write Endpoints %s: %w", name, err)
}

// gone deletes the Endpoints of a Service that was deleted. Those that
// somebody made without ever making a Service are left alone, and so are the
// records of leader elections.
func (c *endpoints) gone(ctx context.Context, name svc.Name) error {
	c.triggers.take(name)
	c.pace.forget(name)
	current := c.current(name)
	c.mu.Lock()
	lost := c.lost[name]
	if current == nil {
		delete(c.lost, name)
	}
	c.mu.Unlock()
	if current == nil || epslice.LeaderElection(current) {
		return nil
	}
	if !lost {
		if current.Labels[epslice.LabelEndpointsManagedBy] != epslice.EndpointsManagedBy {
			return nil
		}
		if gone, err := serviceGone(ctx, c.client, name); err != nil || !gone {
			return errors.Join(err, errAgain)
		}
	}
	err := c.client.CoreV1().Endpoints(name.Namespace).Delete(ctx, name.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &current.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete Endpoints %s: %w", name, err)
	}
	c.view.deleted(name, name, current.UID)
	c.mu.Lock()
	delete(c.lost, name)
	c.mu.Unlock()
	return nil
}
