package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// nodeLifecycle marks Nodes as unreachable that have stopped renewing their
// Lease, so that their Pods leave the endpoints, and reverts that when they renew
// again. The grace period runs by this process's clock from when it saw the last
// renewal: clocks of machines differ, and after a start every Node has the whole
// grace period. What a leader before has marked stays so until a renewal. Nodes that others
// report as unreachable do not have the whole grace period (peers).
type nodeLifecycle struct {
	*controllerContext
	loop  *loop.Loop[string]
	index *selection
	gc    *podGC
	peers *loop.Loop[string] // of judgePeers; it has one key

	mu         sync.Mutex
	heartbeats map[string]*heartbeat
	jury       jury
}

// heartbeat is the last heartbeat of a Node.
type heartbeat struct {
	lease, status string    // the times in its Lease and in its status
	seen          time.Time // when this process saw one of them change
	renewed       bool      // one has changed since this process read it first
	condemned     *cause    // why it counts as unreachable since, nil if it does not
	marked        bool      // the Node has been marked as unreachable since
	version       string    // of its agent
}

// cause is why a Node is unreachable, in its condition, its Pods' and an Event.
type cause struct{ reason, message string }

var leaseExpired = cause{"NodeStatusUnknown", "the node's agent has stopped renewing its lease"}

func newNodeLifecycle(s *controllerContext) (func(ctx context.Context), error) {
	c := &nodeLifecycle{controllerContext: s, heartbeats: map[string]*heartbeat{}, jury: newJury()}
	c.loop = loop.New(s.log, NodeLifecycleName, min(4, s.options.Workers), c.sync)
	c.peers = loop.New(s.log, "nodelifecycle-peers", 1, func(ctx context.Context, _ string) error { return c.judgePeers(ctx) })
	var err error
	if c.index, err = selectionOf(s); err != nil {
		return nil, err
	}
	leases := s.factory(corev1.NamespaceNodeLease).Coordination().V1().Leases().Informer()
	if err := s.handle(leases, handlers(c.lease, c.leaseDeleted)); err != nil {
		return nil, err
	}
	if err := s.handle(s.informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { c.node(o.(*corev1.Node), true) },
		UpdateFunc: func(_, o any) { c.node(o.(*corev1.Node), false) },
		DeleteFunc: func(o any) {
			if node, ok := final[*corev1.Node](o); ok {
				c.mu.Lock()
				delete(c.heartbeats, node.Name)
				c.mu.Unlock()
				c.setPeer(node, true)
			}
		},
	}); err != nil {
		return nil, err
	}
	if c.gc, err = newPodGC(s, c.index); err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		var t tasks
		t.add(c.loop.Run)
		t.add(c.peers.Run)
		t.add(c.gc.run)
		t.run(ctx)
	}, nil
}

func (c *nodeLifecycle) lease(l *coordinationv1.Lease) {
	c.observe(l.Name, func(p *heartbeat) *string { return &p.lease }, renewal(l))
	c.setReport(l.Name, l.Annotations[svc.UnreachableAnnotation])
}

func (c *nodeLifecycle) leaseDeleted(l *coordinationv1.Lease) { c.setReport(l.Name, "") }

func renewal(l *coordinationv1.Lease) string {
	if l.Spec.RenewTime == nil {
		return ""
	}
	return l.Spec.RenewTime.UTC().String()
}

// node takes the heartbeat in the status as well: Nodes made by hand have no
// Lease.
func (c *nodeLifecycle) node(n *corev1.Node, first bool) {
	renewed := ""
	for i := range n.Status.Conditions {
		if k := &n.Status.Conditions[i]; k.Type == corev1.NodeReady && k.Status != corev1.ConditionUnknown {
			renewed = k.LastHeartbeatTime.UTC().String()
		}
	}
	c.observe(n.Name, func(p *heartbeat) *string { return &p.status }, renewed)
	c.versionOf(n)
	c.setPeer(n, false)
	_, suspected := n.Annotations[svc.SuspectedAnnotation]
	if _, changed := pressureTaints(n, metav1.Now()); first || changed || suspected || slices.ContainsFunc(n.Spec.Taints, isUnreachable) {
		c.loop.Queue.Add(n.Name)
	}
}

// observe takes the time of the last renewal, as one kind of heartbeat has it.
func (c *nodeLifecycle) observe(node string, kind func(*heartbeat) *string, renewed string) {
	c.mu.Lock()
	p := c.heartbeatLocked(node)
	last := kind(p)
	alive := renewed != "" && *last != renewed
	returned := alive && *last != "" && (p.condemned != nil || !p.renewed)
	if alive {
		p.renewed = p.renewed || *last != ""
		*last, p.seen, p.condemned, p.marked = renewed, time.Now(), nil, false
	}
	c.mu.Unlock()
	if returned {
		c.loop.Queue.Add(node)
	}
}

func (c *nodeLifecycle) sync(ctx context.Context, name string) error {
	node, err := c.informers.Core().V1().Nodes().Lister().Get(name)
	if err != nil {
		return nil
	}
	p := c.heartbeat(name)
	switch {
	case p.marked:
		return nil
	case p.condemned != nil: // the last attempt to mark it has failed
		return c.mark(ctx, node, p.condemned)
	}
	if remaining, _ := c.judge(name); remaining > 0 {
		c.loop.Queue.AddAfter(name, remaining)
		if !p.renewed && isUnknown(node) {
			return nil // marked by a leader before this one, and not back yet
		}
		return errors.Join(c.untaint(ctx, node), c.taintPressure(ctx, node), c.unsuspect(ctx, node))
	}
	// The watch may lag: ask before marking a Node as unreachable.
	lease, err := c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		c.lease(lease)
	case !apierrors.IsNotFound(err):
		c.restart(name) // the Node cannot renew while the API server is down
		return fmt.Errorf("get lease of node %s: %w", name, err)
	}
	remaining, why := c.condemn(name)
	if remaining > 0 {
		c.loop.Queue.AddAfter(name, remaining)
		return nil
	}
	return c.mark(ctx, node, why)
}

// judge returns how long the Node may still take to renew its Lease, and if that is over why it
// is unreachable.
func (c *nodeLifecycle) judge(name string) (remaining time.Duration, why *cause) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.judgeLocked(name)
}

func (c *nodeLifecycle) judgeLocked(name string) (time.Duration, *cause) {
	p := c.heartbeatLocked(name)
	remaining := c.options.NodeGracePeriod - time.Since(p.seen)
	if remaining <= 0 {
		return 0, &leaseExpired
	}
	if left, why := c.jury.verdict(name, p, c.freshLocked); why != nil || left > 0 {
		return min(left, remaining), why
	}
	return remaining, nil
}

// condemn is judge, and records why the Node is unreachable if it is: until it renews.
func (c *nodeLifecycle) condemn(name string) (remaining time.Duration, why *cause) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if remaining, why = c.judgeLocked(name); why != nil {
		c.heartbeatLocked(name).condemned = why
	}
	return remaining, why
}

// mark marks the Node as unreachable.
func (c *nodeLifecycle) mark(ctx context.Context, node *corev1.Node, why *cause) error {
	if err := c.markUnreachable(ctx, node, why); err != nil {
		return err
	}
	c.mu.Lock()
	if p := c.heartbeats[node.Name]; p != nil && p.condemned != nil {
		p.marked = true
	} else {
		c.loop.Queue.Add(node.Name) // it has come back meanwhile
	}
	c.mu.Unlock()
	return nil
}

// heartbeat returns what is known of the Node's heartbeats now.
func (c *nodeLifecycle) heartbeat(name string) heartbeat {
	c.mu.Lock()
	defer c.mu.Unlock()
	return *c.heartbeatLocked(name)
}

func (c *nodeLifecycle) heartbeatLocked(name string) *heartbeat {
	p := c.heartbeats[name]
	if p == nil {
		p = &heartbeat{seen: time.Now()}
		c.heartbeats[name] = p
	}
	return p
}

// restart gives the Node the whole grace period again, or as long to answer a suspicion as at first.
func (c *nodeLifecycle) restart(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.heartbeatLocked(name)
	if time.Since(p.seen) >= c.options.NodeGracePeriod {
		p.seen = time.Now()
	}
	if s := c.jury.suspicions[name]; s != nil && s.asked {
		s.until = time.Now().Add(c.options.refuteWithin)
	}
}

// markUnreachable sets the condition and the taint of an unreachable Node, and
// takes its Pods and the endpoints on it out of service.
func (c *nodeLifecycle) markUnreachable(ctx context.Context, node *corev1.Node, why *cause) error {
	errs := []error{c.nodeUnknown(ctx, node, why), c.taint(ctx, node.Name, true)}
	for _, pod := range c.index.podsOn(node.Name) {
		if epslice.Ready(pod) {
			errs = append(errs, patchPodCondition(ctx, c.controllerContext, pod, corev1.PodCondition{
				Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "NodeNotReady", Message: why.message,
			}))
		}
	}
	errs = append(errs, c.slicesNotReady(ctx, node.Name))
	return errors.Join(errs...)
}

func (c *nodeLifecycle) nodeUnknown(ctx context.Context, node *corev1.Node, why *cause) error {
	condition := map[string]any{
		"type": corev1.NodeReady, "status": corev1.ConditionUnknown, "reason": why.reason,
		"message": why.message, "lastTransitionTime": metav1.Now(),
	}
	if isUnknown(node) {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{condition}}})
	if err != nil {
		return err
	}
	_, err = c.client.CoreV1().Nodes().Patch(ctx, node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("status of node %s: %w", node.Name, err)
	}
	c.events.Event(node, corev1.EventTypeWarning, "NodeNotReady", why.message)
	c.log.Warn("node is unreachable; its endpoints go out of service", "node", node.Name, "reason", why.message)
	return nil
}

// isUnknown reports whether the Node's condition Ready is Unknown.
func isUnknown(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(k corev1.NodeCondition) bool {
		return k.Type == corev1.NodeReady && k.Status == corev1.ConditionUnknown
	})
}

func isUnreachable(t corev1.Taint) bool { return t.Key == corev1.TaintNodeUnreachable }

func (c *nodeLifecycle) untaint(ctx context.Context, node *corev1.Node) error {
	if !slices.ContainsFunc(node.Spec.Taints, isUnreachable) {
		return nil
	}
	return c.taint(ctx, node.Name, false)
}

// taint sets or removes the taint of unreachable Nodes, in both effects.
func (c *nodeLifecycle) taint(ctx context.Context, name string, on bool) error {
	node, err := c.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("get node %s: %w", name, err)
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), isUnreachable)
	has := len(taints) < len(node.Spec.Taints)
	if has == on {
		return nil
	}
	if on {
		now := metav1.Now()
		for _, effect := range []corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute} {
			taints = append(taints, corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: effect, TimeAdded: &now})
		}
	}
	node.Spec.Taints = taints
	if _, err := c.client.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("taints of node %s: %w", name, err)
	}
	if !on {
		c.log.Info("node is reachable again", "node", name)
	}
	return nil
}

// slicesNotReady takes the endpoints that live on the Node out of service.
func (c *nodeLifecycle) slicesNotReady(ctx context.Context, node string) error {
	onNode := metav1.ListOptions{LabelSelector: svc.NodeLabel + "=" + svc.NodeLabelValue(node)}
	list, err := c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, onNode)
	if err != nil {
		return fmt.Errorf("list EndpointSlices of node %s: %w", node, err)
	}
	no := false
	var errs []error
	for i := range list.Items {
		s, changed := &list.Items[i], false
		for j := range s.Endpoints {
			k := &s.Endpoints[j].Conditions
			if k.Ready == nil || *k.Ready || k.Serving != nil && *k.Serving {
				k.Ready, k.Serving, changed = &no, &no, true
			}
		}
		if !changed {
			continue
		}
		_, err := c.client.DiscoveryV1().EndpointSlices(s.Namespace).Update(ctx, s, metav1.UpdateOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("EndpointSlice %s: %w", nameOf(s), err))
		}
	}
	return errors.Join(errs...)
}
