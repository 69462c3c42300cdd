// Package nodes follows the health of Nodes: it marks and taints Nodes that are not alive, evicts their Pods, and gives
// each Node its Pod ranges.
package nodes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// LifecycleOptions are what NewLifecycle needs beside a Kit.
type LifecycleOptions struct {
	Index *selection.Index
	// GracePeriod is how long after the last renewal of its Lease a Node is dead.
	GracePeriod time.Duration
	// PeerWatch declares Nodes dead sooner if most of the agents that watch their machines get no answer.
	PeerWatch bool
	// RefuteWithin is how long a suspect has to renew its Lease (default 1.5 s).
	RefuteWithin time.Duration
	// PodGCDelay is how long Pods outlive their Node, TerminatedPodLimit how many finished Pods are kept.
	PodGCDelay         time.Duration
	TerminatedPodLimit int
	// Version is the server's, which agents' versions are compared with.
	Version string
}

// lifecycle marks dead Nodes as unreachable, so that their Pods leave the endpoints, and reverts that
// when they renew their Lease again. What an earlier leader marked stays marked until a renewal.
type lifecycle struct {
	*kit.Kit
	options  LifecycleOptions
	loop     *loop.Loop[string] // Nodes
	suspects *loop.Loop[string] // of reviewSuspects; it has one key
	live     *liveness
}

// NewLifecycle returns the controller of the life cycle of Nodes, and of Pods that no agent will remove.
func NewLifecycle(k *kit.Kit, name string, o LifecycleOptions) (kit.Task, error) {
	if o.RefuteWithin == 0 {
		o.RefuteWithin = refuteWithin
	}
	c := &lifecycle{Kit: k, options: o, live: newLiveness(o.GracePeriod, o.RefuteWithin)}
	c.loop = loop.New(k.Log, name, min(4, k.Workers), c.sync)
	c.suspects = loop.New(k.Log, name+"-peers", 1, func(ctx context.Context, _ string) error { return c.reviewSuspects(ctx) })
	leases := k.Narrow(corev1.NamespaceNodeLease, "").Coordination().V1().Leases().Informer()
	if err := k.Handle(leases, kit.Handlers(c.lease, c.leaseDeleted)); err != nil {
		return nil, err
	}
	if err := k.Handle(k.Informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { c.nodeChanged(o.(*corev1.Node), true) },
		UpdateFunc: func(_, o any) { c.nodeChanged(o.(*corev1.Node), false) },
		DeleteFunc: func(o any) {
			if node, ok := kit.Final[*corev1.Node](o); ok {
				c.live.forget(node.Name)
				c.setMember(node, true)
			}
		},
	}); err != nil {
		return nil, err
	}
	gc, err := newPodGC(k, podGCOptions{Index: o.Index, Delay: o.PodGCDelay, TerminatedPodLimit: o.TerminatedPodLimit})
	if err != nil {
		return nil, err
	}
	return kit.Together(c.loop.Run, c.suspects.Run, gc.run), nil
}

func (c *lifecycle) lease(l *coordinationv1.Lease) {
	c.heartbeat(l.Name, fromLease, kit.Renewal(l))
	c.setReport(l.Name, l.Annotations[svc.UnreachableAnnotation])
}

func (c *lifecycle) leaseDeleted(l *coordinationv1.Lease) { c.setReport(l.Name, "") }

// heartbeat takes the time of a Node's last heartbeat, "" for none.
func (c *lifecycle) heartbeat(node string, from source, at string) {
	if c.live.heartbeat(node, from, at) {
		c.loop.Queue.Add(node)
	}
}

// nodeChanged takes a Node. Its status is a heartbeat, too: Nodes made by hand have no Lease.
func (c *lifecycle) nodeChanged(n *corev1.Node, first bool) {
	at := ""
	for i := range n.Status.Conditions {
		k := &n.Status.Conditions[i]
		if k.Type == corev1.NodeReady && k.Status != corev1.ConditionUnknown {
			at = k.LastHeartbeatTime.UTC().String()
		}
	}
	c.heartbeat(n.Name, fromStatus, at)
	c.checkVersion(n)
	c.setMember(n, false)
	_, suspected := n.Annotations[svc.SuspectedAnnotation]
	_, pressed := pressureTaints(n, metav1.Now())
	turned := c.live.setNotReady(n.Name, isNotReady(n))
	if first || pressed || suspected || turned || slices.ContainsFunc(n.Spec.Taints, isHealthTaint) {
		c.loop.Queue.Add(n.Name)
	}
}

func (c *lifecycle) sync(ctx context.Context, name string) error {
	node, err := c.Informers.Core().V1().Nodes().Lister().Get(name)
	if err != nil {
		return nil // deleted
	}
	state := c.live.state(name)
	switch {
	case state.marked:
		return nil
	case state.dead != nil: // the last attempt to mark it failed
		return c.mark(ctx, node, state.dead)
	}
	if remaining, _ := c.live.check(name); remaining > 0 {
		c.loop.Queue.AddAfter(name, remaining)
		if !state.renewed && isUnknown(node) {
			return nil // marked by an earlier leader, and no renewal yet
		}
		return errors.Join(c.followReady(ctx, node), c.taintPressure(ctx, node), c.unsuspect(ctx, node))
	}
	return c.confirm(ctx, node)
}

// confirm marks a Node as unreachable whose time is over, unless the API server has a newer Lease: the watch may lag.
func (c *lifecycle) confirm(ctx context.Context, node *corev1.Node) error {
	lease, err := c.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, node.Name, metav1.GetOptions{})
	switch {
	case err == nil:
		c.lease(lease)
	case !apierrors.IsNotFound(err):
		c.live.restart(node.Name) // the Node cannot renew while the API server is down
		return fmt.Errorf("get lease of node %s: %w", node.Name, err)
	}
	remaining, why := c.live.declare(node.Name)
	if why == nil {
		c.loop.Queue.AddAfter(node.Name, remaining)
		return nil
	}
	return c.mark(ctx, node, why)
}

// mark marks a dead Node as unreachable.
func (c *lifecycle) mark(ctx context.Context, node *corev1.Node, why *cause) error {
	if err := c.markUnreachable(ctx, node, why); err != nil {
		return err
	}
	if !c.live.setMarked(node.Name) {
		c.loop.Queue.Add(node.Name) // it has renewed its Lease in between
	}
	return nil
}
