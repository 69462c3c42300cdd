package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/controller/kittest"
)

// taint sets the only taint of a Node, or removes it.
func (r *rig) taint(node string, taints ...corev1.Taint) {
	r.Helper()
	r.eventually("the taints of "+node, func() error {
		n, err := r.client.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.Spec.Taints = taints
		_, err = r.client.CoreV1().Nodes().Update(context.Background(), n, metav1.UpdateOptions{})
		return err
	})
}

// Pods leave a Node that is unreachable after the default time if something replaces them,
// and after the time that they say themselves; others stay. A taint of an administrator's
// takes all that do not tolerate it.
func TestTaintEviction(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: []string{TaintEvictionName}, UnreachableToleration: time.Second})
	ns := r.namespace("shop")
	r.node("n0")
	r.node("n1")
	yes, hour, none := true, int64(3600), int64(0)
	owner := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", UID: "u", Controller: &yes}}
	tolerates := func(seconds *int64) []corev1.Toleration {
		return []corev1.Toleration{{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists,
			Effect: corev1.TaintEffectNoExecute, TolerationSeconds: seconds}}
	}
	for _, p := range []struct {
		name        string
		owners      []metav1.OwnerReference
		tolerations []corev1.Toleration
	}{
		{"alone", nil, nil},
		{"of-a-set", owner, nil},
		{"for-an-hour", owner, tolerates(&hour)},
		{"for-good", owner, tolerates(nil)},
		{"at-once", nil, tolerates(&none)},
	} {
		pod := kittest.Pod(ns, p.name, "web", "n0")
		pod.OwnerReferences, pod.Spec.Tolerations = p.owners, p.tolerations
		_, err := r.client.CoreV1().Pods(ns).Create(context.Background(), pod, metav1.CreateOptions{})
		r.must(err)
	}
	leave := func(want ...string) {
		t.Helper()
		r.eventually(fmt.Sprintf("%s leave", want), func() error {
			list, err := r.client.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{})
			if err != nil {
				return err
			}
			var got []string
			for _, p := range list.Items {
				if p.DeletionTimestamp != nil {
					got = append(got, p.Name)
				}
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				return fmt.Errorf("leaving: %s", strings.Join(got, ", "))
			}
			return nil
		})
	}
	now := metav1.Now()
	r.taint("n0", corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute, TimeAdded: &now})
	leave("at-once", "of-a-set")
	r.taint("n0", corev1.Taint{Key: "maintenance", Effect: corev1.TaintEffectNoExecute})
	leave("alone", "at-once", "for-an-hour", "for-good", "of-a-set")
}
