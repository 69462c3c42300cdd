package nodes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// markUnreachable sets the condition and the taint of an unreachable Node, and
// takes its Pods and the endpoints on it out of service.
func (c *lifecycle) markUnreachable(ctx context.Context, node *corev1.Node, why *cause) error {
	return errors.Join(c.nodeUnknown(ctx, node, why), c.taint(ctx, node.Name, corev1.TaintNodeUnreachable),
		c.podsNotReady(ctx, node.Name, why.message), c.slicesNotReady(ctx, node.Name))
}

// podsNotReady takes the Pods of a Node out of service.
func (c *lifecycle) podsNotReady(ctx context.Context, node, message string) error {
	var errs []error
	for _, pod := range c.options.Index.PodsOn(node) {
		if epslice.Ready(pod) {
			errs = append(errs, c.PatchPodCondition(ctx, pod, corev1.PodCondition{
				Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: svc.ReasonNodeNotReady, Message: message,
			}))
		}
	}
	return errors.Join(errs...)
}

func (c *lifecycle) nodeUnknown(ctx context.Context, node *corev1.Node, why *cause) error {
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
	_, err = c.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("status of node %s: %w", node.Name, err)
	}
	c.Events.Event(node, corev1.EventTypeWarning, "NodeNotReady", why.message)
	c.Log.Warn("node is unreachable; its endpoints go out of service", "node", node.Name, "reason", why.message)
	return nil
}

// isUnknown reports whether the Node's condition Ready is Unknown.
func isUnknown(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(k corev1.NodeCondition) bool {
		return k.Type == corev1.NodeReady && k.Status == corev1.ConditionUnknown
	})
}

// isHealthTaint reports whether t is a taint that taint sets.
func isHealthTaint(t corev1.Taint) bool {
	return t.Key == corev1.TaintNodeUnreachable || t.Key == corev1.TaintNodeNotReady
}

func isUnreachableTaint(t corev1.Taint) bool { return t.Key == corev1.TaintNodeUnreachable }

// untaint removes the taints of a Node for which is returns true.
func (c *lifecycle) untaint(ctx context.Context, node *corev1.Node, is func(corev1.Taint) bool) error {
	if !slices.ContainsFunc(node.Spec.Taints, is) {
		return nil
	}
	return c.setTaint(ctx, node.Name, "", is)
}

// taint gives a Node the taint of that key, of unreachable Nodes or of Nodes that are not Ready, in both effects, in place
// of the other one.
func (c *lifecycle) taint(ctx context.Context, name, key string) error {
	return c.setTaint(ctx, name, key, isHealthTaint)
}

// setTaint gives a Node the taint of that key, "" for none, in both effects, in place of the others for which insteadOf returns
// true.
func (c *lifecycle) setTaint(ctx context.Context, name, key string, insteadOf func(corev1.Taint) bool) error {
	node, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("get node %s: %w", name, err)
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool { return insteadOf(t) && t.Key != key })
	changed := len(taints) < len(node.Spec.Taints)
	now := metav1.Now()
	for _, effect := range []corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute} {
		t := corev1.Taint{Key: key, Effect: effect, TimeAdded: &now}
		if key != "" && !slices.ContainsFunc(taints, func(has corev1.Taint) bool { return has.MatchTaint(&t) }) {
			taints, changed = append(taints, t), true
		}
	}
	if !changed {
		return nil
	}
	node.Spec.Taints = taints
	if _, err := c.Client.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("taints of node %s: %w", name, err)
	}
	if key == "" {
		c.Log.Info("removed the health taints of a node", "node", name)
	}
	return nil
}

// slicesNotReady takes the endpoints that live on the Node out of service.
func (c *lifecycle) slicesNotReady(ctx context.Context, node string) error {
	onNode := metav1.ListOptions{LabelSelector: svc.NodeLabel + "=" + svc.NodeLabelValue(node)}
	list, err := c.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, onNode)
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
		_, err := c.Client.DiscoveryV1().EndpointSlices(s.Namespace).Update(ctx, s, metav1.UpdateOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("EndpointSlice %s: %w", svc.NameOf(s), err))
		}
	}
	return errors.Join(errs...)
}
