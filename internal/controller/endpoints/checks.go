package endpoints

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/placement"
	"github.com/fairlead/fairlead/internal/svc"
)

// endpointChecks writes into slices made by hand whether their endpoints answer the nodes that
// check them.
type endpointChecks struct {
	*kit.Kit
	loop *loop.Loop[svc.Name]

	mu      sync.Mutex
	nodes   map[string]bool          // nodes that are ready
	by      map[checks.Key][]string  // which of them check it; nil if they have changed
	reports map[string]checks.Report // by node
	texts   map[string]string        // they are as
	slices  map[svc.Name][]checks.Target
	owners  map[checks.Key]svc.Name
}

// NewChecks returns the controller that writes what nodes report of endpoints that they check into their slices.
func NewChecks(k *kit.Kit, name string) (kit.Task, error) {
	c := &endpointChecks{
		Kit: k, nodes: map[string]bool{}, reports: map[string]checks.Report{}, texts: map[string]string{},
		slices: map[svc.Name][]checks.Target{}, owners: map[checks.Key]svc.Name{},
	}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	set := func(e *discoveryv1.EndpointSlice) { c.setSlice(e, checks.Of(e)) }
	unset := func(e *discoveryv1.EndpointSlice) { c.setSlice(e, nil) }
	if err := k.Handle(k.Informers.Discovery().V1().EndpointSlices().Informer(), kit.Handlers(set, unset)); err != nil {
		return nil, err
	}
	leases := k.Narrow(corev1.NamespaceNodeLease, "").Coordination().V1().Leases().Informer()
	report := func(l *coordinationv1.Lease) { c.setReport(l.Name, l.Annotations[svc.ChecksAnnotation]) }
	if err := k.Handle(leases, kit.Handlers(report, func(l *coordinationv1.Lease) { c.setReport(l.Name, "") })); err != nil {
		return nil, err
	}
	node := func(n *corev1.Node) { c.setNode(n.Name, placement.IsReady(n)) }
	if err := k.Handle(k.Informers.Core().V1().Nodes().Informer(),
		kit.Handlers(node, func(n *corev1.Node) { c.setNode(n.Name, false) })); err != nil {
		return nil, err
	}
	return c.loop.Run, nil
}

// setSlice takes what of a slice is checked.
func (c *endpointChecks) setSlice(s *discoveryv1.EndpointSlice, targets []checks.Target) {
	name := svc.NameOf(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	had := c.slices[name]
	if len(had)+len(targets) == 0 {
		return
	}
	for _, t := range had {
		delete(c.owners, t.Key)
		delete(c.by, t.Key)
	}
	delete(c.slices, name)
	if len(targets) == 0 {
		return
	}
	c.slices[name] = targets
	for _, t := range targets {
		c.owners[t.Key] = name
	}
	c.loop.Queue.Add(name)
}

// setReport takes what a node reports; slices are looked at in which that differs.
func (c *endpointChecks) setReport(node, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.texts[node] == text {
		return
	}
	was, is := c.reports[node], checks.ParseReport(text)
	if c.reports[node], c.texts[node] = is, text; text == "" {
		delete(c.reports, node)
		delete(c.texts, node)
	}
	for key, ok := range is {
		if before, known := was[key]; !known || before != ok {
			if owner, has := c.owners[key]; has {
				c.loop.Queue.Add(owner)
			}
		}
	}
}

// setNode takes whether a Node is ready, and so checks.
func (c *endpointChecks) setNode(name string, ready bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nodes[name] == ready {
		return
	}
	if c.nodes[name] = ready; !ready {
		delete(c.nodes, name)
	}
	c.by = nil
	for owner := range c.slices {
		c.loop.Queue.Add(owner)
	}
}

// verdicts returns which endpoints of a slice are ready, by their index, and the nodes that
// check the others.
func (c *endpointChecks) verdicts(s *discoveryv1.EndpointSlice) (ready map[int]bool, by map[int][]string) {
	targets := checks.Of(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[checks.Key][]string{}
	}
	var sorted []string
	ready, by = map[int]bool{}, map[int][]string{}
	for _, t := range targets {
		nodes, known := c.by[t.Key]
		if !known {
			if sorted == nil {
				sorted = slices.Sorted(maps.Keys(c.nodes))
			}
			nodes = checks.By(t.Key, sorted)
			c.by[t.Key] = nodes
		}
		is := s.Endpoints[t.Index].Conditions.Ready
		ready[t.Index] = checks.Ready(t.Key, nodes, c.reports, is == nil || *is)
		by[t.Index] = nodes
	}
	return ready, by
}

func (c *endpointChecks) sync(ctx context.Context, name svc.Name) error {
	have, err := c.Informers.Discovery().V1().EndpointSlices().Lister().EndpointSlices(name.Namespace).Get(name.Name)
	if err != nil {
		return nil // it is gone
	}
	ready, by := c.verdicts(have)
	next := have.DeepCopy()
	var left, back []string
	for i, is := range ready {
		e := &next.Endpoints[i]
		if was := e.Conditions.Ready; was == nil && is || was != nil && *was == is {
			continue
		}
		e.Conditions.Ready, e.Conditions.Serving = &is, &is
		if is {
			back = append(back, e.Addresses[0])
		} else {
			left = append(left, fmt.Sprintf("%s (by %s)", e.Addresses[0], strings.Join(by[i], ", ")))
		}
	}
	if len(left)+len(back) == 0 {
		return nil
	}
	if _, err := c.Client.DiscoveryV1().EndpointSlices(name.Namespace).Update(ctx, next, metav1.UpdateOptions{}); err != nil {
		return kit.IgnoreReplaced(err) // the watch brings the current one
	}
	if len(left) > 0 {
		slices.Sort(left)
		c.Events.Event(have, corev1.EventTypeWarning, "EndpointCheckFailed",
			fmt.Sprintf("check %s fails, so these get no connections: %s", have.Annotations[svc.CheckAnnotation], some(left)))
	}
	if len(back) > 0 {
		slices.Sort(back)
		c.Events.Event(have, corev1.EventTypeNormal, "EndpointCheckPassed",
			fmt.Sprintf("check %s passes again: %s", have.Annotations[svc.CheckAnnotation], some(back)))
	}
	return nil
}

// some names the first three of a list.
func some(list []string) string {
	if len(list) > 3 {
		return fmt.Sprintf("%s and %d more", strings.Join(list[:3], ", "), len(list)-3)
	}
	return strings.Join(list, ", ")
}
