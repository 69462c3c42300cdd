package nodes

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
)

// pressures are the conditions that keep new Pods from a Node, with their taints, as in
// kube-controller-manager.
var pressures = []struct {
	condition corev1.NodeConditionType
	taint     string
}{
	{corev1.NodeMemoryPressure, corev1.TaintNodeMemoryPressure}, {corev1.NodeDiskPressure, corev1.TaintNodeDiskPressure},
}

// pressureTaints returns the taints of n as its conditions want them, and whether that
// changes them. A condition of which nothing is known changes nothing.
func pressureTaints(n *corev1.Node, now metav1.Time) (taints []corev1.Taint, changed bool) {
	taints = slices.Clone(n.Spec.Taints)
	for _, p := range pressures {
		i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == p.condition })
		if i < 0 || n.Status.Conditions[i].Status == corev1.ConditionUnknown {
			continue
		}
		is := func(t corev1.Taint) bool { return t.Key == p.taint && t.Effect == corev1.TaintEffectNoSchedule }
		has, want := slices.ContainsFunc(taints, is), n.Status.Conditions[i].Status == corev1.ConditionTrue
		switch {
		case want && !has:
			taints = append(taints, corev1.Taint{Key: p.taint, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &now})
			changed = true
		case has && !want:
			taints = slices.DeleteFunc(taints, is)
			changed = true
		}
	}
	return taints, changed
}

// taintPressure gives a Node the taints of its conditions.
func (c *lifecycle) taintPressure(ctx context.Context, node *corev1.Node) error {
	if _, changed := pressureTaints(node, metav1.Now()); !changed {
		return nil
	}
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		now, err := c.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		taints, changed := pressureTaints(now, metav1.Now())
		if !changed {
			return nil
		}
		now.Spec.Taints = taints
		_, err = c.Client.CoreV1().Nodes().Update(ctx, now, metav1.UpdateOptions{})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("taints of node %s: %w", node.Name, err)
	}
	return nil
}
