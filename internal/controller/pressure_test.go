package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/fairlead/fairlead/internal/controller/kittest"
)

// A Node under pressure gets the taint, and no new Pods, until it is over; other taints stay.
func TestPressureTaints(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("pressed"), context.Background()
	own := corev1.Taint{Key: "own", Effect: corev1.TaintEffectPreferNoSchedule}
	r.node("n0", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{own} })
	r.run(Options{Controllers: []string{SchedulerName, NodeLifecycleName}})
	set := func(kind corev1.NodeConditionType, status corev1.ConditionStatus) {
		t.Helper()
		r.must(retry.RetryOnConflict(retry.DefaultRetry, func() error {
			n, err := r.client.CoreV1().Nodes().Get(ctx, "n0", metav1.GetOptions{})
			if err != nil {
				return err
			}
			n.Status.Conditions = slices.DeleteFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == kind })
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: kind, Status: status})
			_, err = r.client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
			return err
		}))
	}
	tainted := func(keys ...string) {
		t.Helper()
		r.eventually(fmt.Sprintf("taints %v", keys), func() error {
			n, err := r.client.CoreV1().Nodes().Get(ctx, "n0", metav1.GetOptions{})
			if err != nil {
				return err
			}
			var have []string
			for _, taint := range n.Spec.Taints {
				have = append(have, taint.Key)
			}
			if !slices.Equal(have, append([]string{"own"}, keys...)) {
				return fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return nil
		})
	}
	set(corev1.NodeDiskPressure, corev1.ConditionTrue)
	tainted(corev1.TaintNodeDiskPressure)
	set(corev1.NodeMemoryPressure, corev1.ConditionTrue)
	tainted(corev1.TaintNodeDiskPressure, corev1.TaintNodeMemoryPressure)
	_, err := r.client.CoreV1().Pods(ns).Create(ctx, kittest.Pod(ns, "waits", "web", ""), metav1.CreateOptions{})
	r.must(err)
	r.wantEvent(ns, "waits", "FailedScheduling")
	set(corev1.NodeDiskPressure, corev1.ConditionFalse)
	tainted(corev1.TaintNodeMemoryPressure)
	set(corev1.NodeMemoryPressure, corev1.ConditionFalse)
	tainted()
	r.eventually("the Pod is bound", func() error {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "waits", metav1.GetOptions{})
		if err == nil && p.Spec.NodeName == "" {
			err = errors.New("no node")
		}
		return err
	})
}
