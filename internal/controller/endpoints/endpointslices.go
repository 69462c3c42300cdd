package endpoints

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpointSlices keeps the slices of Services with a selector.
type endpointSlices struct {
	*kit.Kit
	loop         *loop.Loop[svc.Name]
	index        *selection.Index
	store        *SliceStore
	events       *planEvents
	triggers     triggers
	pace         pace
	topology     *topologyState
	maxEndpoints int

	taken takenNames

	mu    sync.Mutex
	empty map[svc.Name]time.Time // since when no Pod is selected
}

// emptyEventDelay is how long a selector may match nothing before it gets an
// Event: Services are often created before their Pods.
const emptyEventDelay = time.Minute

// SlicesOptions are what NewSlices needs beside a Kit.
type SlicesOptions struct {
	Index *selection.Index
	Store *SliceStore
	// MaxEndpoints is the limit of endpoints in a slice, 1 to 1000 (behaviour 28).
	MaxEndpoints int
}

// NewSlices returns the controller that keeps the EndpointSlices of Services with a selector.
func NewSlices(k *kit.Kit, name string, o SlicesOptions) (kit.Task, error) {
	c := &endpointSlices{
		Kit: k, index: o.Index, store: o.Store, maxEndpoints: o.MaxEndpoints, events: newPlanEvents(k.Events), empty: map[svc.Name]time.Time{},
	}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	c.index.Subscribe(c.changed)
	c.store.Subscribe(c.loop.Queue.Add)
	var err error
	c.topology, err = newTopologyState(k, c.loop.Queue.Add)
	return kit.Together(c.loop.Run, c.topology.run), err
}

func (c *endpointSlices) changed(ch selection.Change) {
	c.triggers.add(ch.Service, ch.Trigger)
	if ch.Removal {
		c.pace.removal(ch.Service)
	}
	c.loop.Queue.Add(ch.Service)
}

func (c *endpointSlices) sync(ctx context.Context, name svc.Name) error {
	if err := c.store.settle(ctx, name); err != nil {
		return err
	}
	service := c.index.Service(name)
	if service == nil {
		return c.serviceDeleted(ctx, name)
	}
	if len(service.Spec.Selector) == 0 || service.Spec.Type == corev1.ServiceTypeExternalName {
		return nil // existing slices stay, as in Kubernetes
	}
	left, removal := c.pace.wait(name)
	if left > 0 {
		c.loop.Queue.AddAfter(name, left)
		return nil
	}
	trigger := c.triggers.take(name)
	pods := c.index.Pods(service)
	plan := epslice.Slices(epslice.Input{
		Service: service, Pods: pods, Node: c.node,
		Present:    c.store.managed(name, epslice.ManagedBySelector),
		TakenNames: c.taken.of(name), MaxEndpoints: c.maxEndpoints, Trigger: trigger,
		Topology: c.topology.now(), Hinted: c.topology.hinted(name),
	})
	c.events.record(name, service,
		slices.Concat(plan.Events, c.emptyEvent(name, len(pods)), selection.OverlapEvents(service, c.index.Crossing(service))))
	if plan.Empty() {
		c.topology.planned(name, plan.Hints)
		return nil
	}
	began := time.Now()
	if err := c.store.write(ctx, name, plan); err != nil {
		c.triggers.add(name, trigger)
		c.taken.add(name, err)
		if removal {
			c.pace.removal(name)
		}
		return err
	}
	c.pace.wrote(name, began, removal)
	c.topology.planned(name, plan.Hints)
	return nil
}

func (c *endpointSlices) node(name string) *corev1.Node {
	node, err := c.Informers.Core().V1().Nodes().Lister().Get(name)
	if err != nil {
		return nil // the only error of a lister is NotFound
	}
	return node
}

// serviceDeleted deletes the slices of a Service that no longer exists.
func (c *endpointSlices) serviceDeleted(ctx context.Context, name svc.Name) error {
	c.triggers.take(name)
	c.pace.forget(name)
	c.events.forget(name)
	c.topology.planned(name, nil)
	c.taken.forget(name)
	c.mu.Lock()
	delete(c.empty, name)
	c.mu.Unlock()
	left := c.store.managed(name, epslice.ManagedBySelector)
	if len(left) == 0 {
		return nil
	}
	if gone, err := serviceGone(ctx, c.Client, name); err != nil || !gone {
		return errors.Join(err, errReplan)
	}
	return c.store.deleteAll(ctx, name, left)
}

// emptyEvent returns the Event for a selector that has matched nothing for
// emptyEventDelay.
func (c *endpointSlices) emptyEvent(name svc.Name, pods int) []epslice.Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	if pods > 0 {
		delete(c.empty, name)
		return nil
	}
	since, ok := c.empty[name]
	if !ok {
		c.empty[name] = time.Now()
		c.loop.Queue.AddAfter(name, emptyEventDelay+time.Second)
		return nil
	}
	if time.Since(since) < emptyEventDelay {
		return nil
	}
	return []epslice.Event{{Reason: "NoPodsSelected",
		Message: "no pod in the namespace matches spec.selector; compare it with the labels of the pods (case matters)"}}
}
