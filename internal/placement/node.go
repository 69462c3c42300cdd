// Package placement decides on which nodes a Pod may run, and which of them suits it
// best. It is pure: package controller feeds it and binds. The rules and the words are
// those of kube-scheduler
// (https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/).
package placement

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Reasons why a node is none for a Pod.
const (
	ReasonNotReady      = "node(s) were not ready"
	ReasonUnschedulable = "node(s) were unschedulable"
	ReasonAffinity      = "node(s) didn't match Pod's node affinity/selector"
)

// Misfit returns why a Pod cannot go to a node, as far as the two alone decide that, or "".
func Misfit(pod *corev1.Pod, node *corev1.Node) string {
	switch {
	case node.DeletionTimestamp != nil || !IsReady(node) && !tolerates(pod, corev1.TaintNodeNotReady):
		return ReasonNotReady
	case node.Spec.Unschedulable && !tolerates(pod, corev1.TaintNodeUnschedulable):
		return ReasonUnschedulable
	case !MatchesNode(pod, node):
		return ReasonAffinity
	}
	for i := range node.Spec.Taints {
		t := &node.Spec.Taints[i]
		if t.Effect != corev1.TaintEffectPreferNoSchedule && !Tolerates(pod.Spec.Tolerations, t) {
			return fmt.Sprintf("node(s) had untolerated taint {%s: %s}", t.Key, t.Value)
		}
	}
	return ""
}

// IsReady reports whether a node's condition Ready is true.
func IsReady(node *corev1.Node) bool {
	for i := range node.Status.Conditions {
		if c := &node.Status.Conditions[i]; c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// MatchesNode reports whether a node has what the selector and the required affinity of a
// Pod ask for.
func MatchesNode(pod *corev1.Pod, node *corev1.Node) bool {
	if a := pod.Spec.Affinity; len(pod.Spec.NodeSelector) == 0 && (a == nil || a.NodeAffinity == nil) {
		return true
	}
	ok, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	return ok && err == nil
}

// Tolerates reports whether one of the tolerations is for the taint.
func Tolerates(list []corev1.Toleration, t *corev1.Taint) bool {
	for i := range list {
		if list[i].ToleratesTaint(klog.Background(), t, false) {
			return true
		}
	}
	return false
}

func tolerates(pod *corev1.Pod, key string) bool {
	return Tolerates(pod.Spec.Tolerations, &corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
}
