// Package endpoints writes the EndpointSlices and Endpoints of Services, mirrors Endpoints made by hand, and reports
// the checks of endpoints that are not Pods.
package endpoints

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpoints keeps the Endpoints objects of Services with a selector.
type endpoints struct {
	*kit.Kit
	loop     *loop.Loop[svc.Name]
	index    *selection.Index
	cache    *kit.AssumeCache[*corev1.Endpoints]
	triggers triggers
	pace     pace

	mu      sync.Mutex
	deleted map[svc.Name]bool // Services whose deletion was observed
}

// NewEndpoints returns the controller that keeps the Endpoints of Services with a selector.
func NewEndpoints(k *kit.Kit, name string, index *selection.Index) (kit.Task, error) {
	c := &endpoints{Kit: k, index: index, deleted: map[svc.Name]bool{}}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	c.index.Subscribe(func(ch selection.Change) {
		c.mu.Lock()
		if ch.Deleted {
			c.deleted[ch.Service] = true
		}
		c.mu.Unlock()
		c.triggers.add(ch.Service, ch.Trigger)
		c.loop.Queue.Add(ch.Service)
	})
	var err error
	c.cache, err = kit.NewCache(k, k.Informers.Core().V1().Endpoints().Informer(),
		func(e *corev1.Endpoints) (svc.Name, bool) { return svc.NameOf(e), true }, c.loop.Queue.Add)
	return kit.Together(c.loop.Run, func(ctx context.Context) { c.cache.ExpireLoop(ctx, c.loop.Queue.Add) }), err
}

func (c *endpoints) sync(ctx context.Context, name svc.Name) error {
	service := c.index.Service(name)
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
	want := epslice.Endpoints(service, c.index.Pods(service), current, trigger)
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
	if list := c.cache.List(name); len(list) > 0 {
		return list[0]
	}
	return nil
}

func (c *endpoints) write(ctx context.Context, current, want *corev1.Endpoints) error {
	api := c.Client.CoreV1().Endpoints(want.Namespace)
	name := svc.NameOf(want)
	var made *corev1.Endpoints
	var err error
	if current == nil {
		made, err = api.Create(ctx, want, metav1.CreateOptions{})
	} else {
		made, err = api.Update(ctx, want, metav1.UpdateOptions{})
	}
	switch {
	case err == nil:
		c.cache.Assume(made)
		return nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		now, err := api.Get(ctx, name.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			if current != nil {
				c.cache.AssumeDeleted(name, name, current.UID)
			}
			return errReplan
		}
		if err != nil {
			return fmt.Errorf("get Endpoints %s: %w", name, err)
		}
		c.cache.Assume(now)
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
		if gone, err := serviceGone(ctx, c.Client, name); err != nil || !gone {
			return errors.Join(err, errReplan)
		}
	}
	err := kit.IgnoreReplaced(c.Client.CoreV1().Endpoints(name.Namespace).Delete(ctx, name.Name, kit.OnlyUID(current.UID)))
	if err != nil {
		return fmt.Errorf("delete Endpoints %s: %w", name, err)
	}
	c.cache.AssumeDeleted(name, name, current.UID)
	c.mu.Lock()
	delete(c.deleted, name)
	c.mu.Unlock()
	return nil
}
