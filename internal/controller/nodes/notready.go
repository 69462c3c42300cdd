package nodes

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// readyCondition returns the condition Ready of a Node, nil if it has none.
func readyCondition(node *corev1.Node) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if k := &node.Status.Conditions[i]; k.Type == corev1.NodeReady {
			return k
		}
	}
	return nil
}

// isNotReady reports whether the Node's condition Ready is False, as only its agent writes it.
func isNotReady(node *corev1.Node) bool {
	k := readyCondition(node)
	return k != nil && k.Status == corev1.ConditionFalse
}

// followReady gives a Node that is alive the taint of its condition Ready. If that has been False for svc.NotReadyHold, it
// takes the Node's Pods out of service, once: fairlead's agents keep them so, and other agents may know better.
func (c *lifecycle) followReady(ctx context.Context, node *corev1.Node) error {
	left, is, withdrawn := c.live.notReady(node.Name)
	switch {
	case readyCondition(node) == nil:
		if !c.live.state(node.Name).renewed {
			return nil // tainted by an earlier leader, and no renewal yet
		}
		return c.untaint(ctx, node, isUnreachableTaint) // whether it is ready is not known
	case !is:
		return c.untaint(ctx, node, isHealthTaint)
	case left > 0:
		c.loop.Queue.AddAfter(node.Name, left)
		return nil
	}
	if err := c.taint(ctx, node.Name, corev1.TaintNodeNotReady); err != nil || withdrawn {
		return err
	}
	message := "the node is not Ready"
	if k := readyCondition(node); k != nil && k.Message != "" {
		message += ": " + k.Message
	}
	if err := c.podsNotReady(ctx, node.Name, message); err != nil {
		return err
	}
	if c.live.setWithdrawn(node.Name) {
		c.Events.Event(node, corev1.EventTypeWarning, svc.ReasonNodeNotReady, message+"; its Pods go out of service")
		c.Log.Warn("node is not ready; its pods go out of service", "node", node.Name, "reason", message)
	}
	return nil
}

// setNotReady records whether a Node reports itself as not Ready. It reports whether that is new.
func (l *liveness) setNotReady(name string, is bool) (changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodeLocked(name)
	if n.notReadySince.IsZero() != is {
		return false
	}
	n.notReadySince, n.withdrawn = time.Time{}, false
	if is {
		n.notReadySince = time.Now()
	}
	return true
}

// notReady reports whether a Node reports itself as not Ready, how long that does not count yet, and whether its Pods have been
// withdrawn.
func (l *liveness) notReady(name string) (left time.Duration, is, withdrawn bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodeLocked(name)
	if n.notReadySince.IsZero() {
		return 0, false, false
	}
	return svc.NotReadyHold - time.Since(n.notReadySince), true, n.withdrawn
}

// setWithdrawn records that the Pods of a Node that is not Ready have been taken out of service. It reports false if the Node
// has become Ready in between.
func (l *liveness) setWithdrawn(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodeLocked(name)
	n.withdrawn = !n.notReadySince.IsZero()
	return n.withdrawn
}
