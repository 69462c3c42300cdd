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
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpoints keeps the Endpoints objects of Services with a selector.
type endpoints struct {
	*controllerContext
	loop     *loop.Loop[svc.Name]
	index    *selection
	cache    *assumeCache[*corev1.Endpoints]
	triggers triggers
	pace     pace

	mu      sync.Mutex
	deleted map[svc.Name]bool // Services whose deletion was observed
}

func newEndpoints(s *controllerContext) (func(ctx context.Context), error) {
	c := &endpoints{controllerContext: s, deleted: map[svc.Name]bool{}}
	c.loop = loop.New(s.log, EndpointsName, s.options.Workers, c.sync)
	var err error
	if c.index, err = selectionOf(s); err != nil {
		return nil, err
	}
	c.index.subscribe(func(ch change) {
		c.mu.Lock()
		if ch.deleted {
			c.deleted[ch.service] = true
		}
		c.mu.Unlock()
		c.triggers.add(ch.service, ch.trigger)
		c.loop.Queue.Add(ch.service)
	})
	informer := s.informers.Core().V1().Endpoints().Informer()
	c.cache = newAssumeCache(func(e *corev1.Endpoints) (svc.Name, bool) { return nameOf(e), true }, storedIn(informer))
	if err := s.handle(informer, cacheHandler(c.cache, c.loop.Queue.Add)); err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		var t tasks
		t.add(c.loop.Run)
		t.add(func(ctx context.Context) { c.cache.expireLoop(ctx, c.loop.Queue.Add) })
		t.run(ctx)
	}, nil
}

func (c *endpoints) sync(ctx context.Context, name svc.Name) error {
	service := c.index.service(name)
	if service == nil {
		return c.serviceDeleted(ctx, name)
	}
	c.mu.Lock()
	delete(c.deleted, name)
	c.mu.Unlock()
	if len(service.Spec.Selector) == 0 || service.Spec.Type == corev1.ServiceTypeExternalName {
		return nil // existing Endpoints are the user's, or stay as in Kubernetes
	}
	if left, _ := c.pace.wait(name); left > 0 {
		c.loop.Queue.AddAfter(name, left)
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
		c.triggers.add(name, trigger)
		return err
	}
	c.pace.wrote(name, began, false)
	return nil
}

func (c *endpoints) current(name svc.Name) *corev1.Endpoints {
	if list := c.cache.list(name); len(list) > 0 {
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
		c.cache.assume(made)
		return nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		now, err := api.Get(ctx, name.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			if current != nil {
				c.cache.assumeDeleted(name, name, current.UID)
			}
			return errReplan
		}
		if err != nil {
			return fmt.Errorf("get Endpoints %s: %w", name, err)
		}
		c.cache.assume(now)
		return errReplan
	}
	return fmt.Errorf("write Endpoints %s: %w", name, err)
}

// serviceDeleted deletes the Endpoints of a Service that was deleted. Those that
// never had a Service are left alone, and so are records of leader elections.
func (c *endpoints) serviceDeleted(ctx context.Context, name svc.Name) error {
	c.triggers.take(name)
	c.pace.forget(name)
	current := c.current(name)
	c.mu.Lock()
	deleted := c.deleted[name]
	if current == nil {
		delete(c.deleted, name)
	}
	c.mu.Unlock()
	if current == nil || epslice.LeaderElection(current) {
		return nil
	}
	if !deleted {
		if current.Labels[epslice.LabelEndpointsManagedBy] != epslice.EndpointsManagedBy {
			return nil
		}
		if gone, err := serviceGone(ctx, c.client, name); err != nil || !gone {
			return errors.Join(err, errReplan)
		}
	}
	err := ignoreReplaced(c.client.CoreV1().Endpoints(name.Namespace).Delete(ctx, name.Name, onlyUID(current.UID)))
	if err != nil {
		return fmt.Errorf("delete Endpoints %s: %w", name, err)
	}
	c.cache.assumeDeleted(name, name, current.UID)
	c.mu.Lock()
	delete(c.deleted, name)
	c.mu.Unlock()
	return nil
}
