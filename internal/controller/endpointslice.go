package controller

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpointSlices keeps the slices of Services with a selector.
type endpointSlices struct {
	*shared
	loop     *loop[svc.Name]
	index    *selection
	store    *sliceStore
	notes    *notes
	triggers triggers
	pace     pace
	topology *topologyState

	mu    sync.Mutex
	taken map[svc.Name][]string  // names that new slices may not have
	empty map[svc.Name]time.Time // since when no Pod is selected
}

// emptyNoteAfter is how long a selector may match nothing before its user is
// told: Services often come before their Pods.
const emptyNoteAfter = time.Minute

func newEndpointSlices(s *shared) (func(ctx context.Context), error) {
	c := &endpointSlices{shared: s, notes: newNotes(s), taken: map[svc.Name][]string{}, empty: map[svc.Name]time.Time{}}
	c.loop = newLoop(s, EndpointSliceName, s.options.Workers, c.sync)
	var err error
	if c.index, err = selectionOf(s); err != nil {
		return nil, err
	}
	c.index.subscribe(func(ch change) {
		c.triggers.note(ch.service, ch.trigger)
		c.loop.queue.Add(ch.service)
	})
	if c.store, err = slicesOf(s, func(owner svc.Name) { c.loop.queue.Add(owner) }); err != nil {
		return nil, err
	}
	if c.topology, err = newTopologyState(s, c.loop.queue.Add); err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		var t tasks
		t.add(c.loop.run)
		t.add(c.topology.run)
		t.run(ctx)
	}, nil
}

func (c *endpointSlices) sync(ctx context.Context, name svc.Name) error {
	service := c.index.service(name)
	if service == nil {
		return c.gone(ctx, name)
	}
	if len(service.Spec.Selector) == 0 || service.Spec.Type == corev1.ServiceTypeExternalName {
		return nil // what is there stays, as in Kubernetes
	}
	if left := c.pace.wait(name); left > 0 {
		c.loop.queue.AddAfter(name, left)
		return nil
	}
	trigger := c.triggers.take(name)
	pods := c.index.pods(service)
	plan := epslice.Slices(epslice.Input{
		Service: service, Pods: pods, Node: c.node,
		Present:    c.store.managed(name, epslice.ManagedBySelector),
		TakenNames: c.takenNames(name), MaxEndpoints: c.options.MaxEndpointsPerSlice, Trigger: trigger,
		Topology: c.topology.now(), Hinted: c.topology.hinted(name),
	})
	c.notes.tell(name, service, slices.Concat(plan.Notes, c.emptyNote(name, len(pods)), overlapNotes(service, c.index.crossing(service))))
	if plan.Empty() {
		c.topology.planned(name, plan.Hints)
		return nil
	}
	began := time.Now()
	if err := c.store.write(ctx, name, plan); err != nil {
		c.triggers.note(name, trigger)
		c.learn(name, err)
		return err
	}
	c.pace.wrote(name, began)
	c.topology.planned(name, plan.Hints)
	return nil
}

func (c *endpointSlices) node(name string) *corev1.Node {
	node, err := c.informers.Core().V1().Nodes().Lister().Get(name)
	if err != nil {
		return nil // a lister fails only by not finding
	}
	return node
}

// gone deletes what a Service that no longer exists has left.
func (c *endpointSlices) gone(ctx context.Context, name svc.Name) error {
	c.triggers.take(name)
	c.pace.forget(name)
	c.notes.forget(name)
	c.topology.planned(name, nil)
	c.mu.Lock()
	delete(c.taken, name)
	delete(c.empty, name)
	c.mu.Unlock()
	left := c.store.managed(name, epslice.ManagedBySelector)
	if len(left) == 0 {
		return nil
	}
	if gone, err := serviceGone(ctx, c.client, name); err != nil || !gone {
		return errors.Join(err, errAgain)
	}
	return c.store.deleteAll(ctx, name, left)
}

func (c *endpointSlices) takenNames(name svc.Name) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.taken[name]
}

// learn remembers names that turned out to be taken.
func (c *endpointSlices) learn(name svc.Name, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taken[name] = append(c.taken[name], takenIn(err)...)
}

func takenIn(err error) []string {
	var names []string
	var taken *takenError
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			names = append(names, takenIn(e)...)
		}
	} else if errors.As(err, &taken) {
		names = append(names, taken.name)
	}
	return names
}

// emptyNote tells of a selector that matches nothing, after a while.
func (c *endpointSlices) emptyNote(name svc.Name, pods int) []epslice.Note {
	c.mu.Lock()
	defer c.mu.Unlock()
	if pods > 0 {
		delete(c.empty, name)
		return nil
	}
	since, ok := c.empty[name]
	if !ok {
		c.empty[name] = time.Now()
		c.loop.queue.AddAfter(name, emptyNoteAfter+time.Second)
		return nil
	}
	if time.Since(since) < emptyNoteAfter {
		return nil
	}
	return []epslice.Note{{Reason: "NoPodsSelected",
		Message: "no pod of the namespace has the labels of spec.selector; compare them with the labels of the pods (case matters)"}}
}
