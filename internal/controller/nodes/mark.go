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
	errs := []error{c.nodeUnknown(ctx, node, why), c.taint(ctx, node.Name, true)}
	for _, pod := range c.options.Index.PodsOn(node.Name) {
		if epslice.Ready(pod) {
			errs = append(errs, c.PatchPodCondition(ctx, pod, corev1.PodCondition{
				Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "NodeNotReady", Message: why.message,
			}))
		}
	}
	errs = append(errs, c.slicesNotReady(ctx, node.Name))
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

func isUnreachable(t corev1.Taint) bool { return t.Key == corev1.TaintNodeUnreachable }

func (c *lifecycle) untaint(ctx context.Context, node *corev1.Node) error {
	if !slices.ContainsFunc(node.Spec.Taints, isUnreachable) {
		return nil
	}
	return c.taint(ctx, node.Name, false)
}

// taint sets or removes the taint of unreachable Nodes, in both effects.
func (c *lifecycle) taint(ctx context.Context, name string, on bool) error {
	node, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
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
	if _, err := c.Client.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("taints of node %s: %w", name, err)
	}
	if !on {
		c.Log.Info("node is reachable again", "node", name)
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
