// Package placement decides on which nodes a Pod may run, and which of them suits it
// best. It is pure: package controller feeds it and binds. The rules and the words are
// the numbers of kube-scheduler
// (https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/).
package placement

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Reasons why a node is none for a Pod.
const (
	ReasonNotReady      = "node(s) were not ready"
	ReasonUnschedulable = "node(s) were unschedulable"
	ReasonAffinity      = "node(s) didn't match Pod's node affinity/selector"
)

// misfit returns why a Pod cannot go to a node, as far as the two alone decide that, or "". nodes
// is what the Pod requires.
func misfit(pod *corev1.Pod, nodes NodeRequirement, node *corev1.Node) string {
	switch {
	case node.DeletionTimestamp != nil || !IsReady(node) && !tolerates(pod, corev1.TaintNodeNotReady):
		return ReasonNotReady
	case node.Spec.Unschedulable && !tolerates(pod, corev1.TaintNodeUnschedulable):
		return ReasonUnschedulable
	case !nodes.Matches(node):
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

// NodeRequirement is what the selector and the required affinity of a Pod ask of a node,
// compiled. The zero value asks for nothing.
type NodeRequirement struct {
	affinity *nodeaffinity.RequiredNodeAffinity
}

// RequirementOf compiles what a Pod with this spec asks of its node.
func RequirementOf(spec *corev1.PodSpec) NodeRequirement {
	if a := spec.Affinity; len(spec.NodeSelector) == 0 && (a == nil || a.NodeAffinity == nil) {
		return NodeRequirement{}
	}
	affinity := nodeaffinity.NewRequiredNodeAffinity(spec.NodeSelector, spec.Affinity)
	return NodeRequirement{&affinity}
}

// Matches reports whether a node has what is asked for.
func (r NodeRequirement) Matches(node *corev1.Node) bool {
	if r.affinity == nil {
		return true
	}
	ok, err := r.affinity.Match(node)
	return ok && err == nil
}

// namedNodes returns the nodes that the required affinity of a Pod names, as that of the Pods of
// DaemonSets does; named is false if it leaves others possible.
func namedNodes(spec *corev1.PodSpec) (names map[string]bool, named bool) {
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil {
		return nil, false
	}
	required := spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil || len(required.NodeSelectorTerms) == 0 {
		return nil, false
	}
	names = map[string]bool{}
	for _, term := range required.NodeSelectorTerms { // one of them has to match
		i := slices.IndexFunc(term.MatchFields, func(r corev1.NodeSelectorRequirement) bool {
			return r.Key == metav1.ObjectNameField && r.Operator == corev1.NodeSelectorOpIn
		})
		if i < 0 {
			return nil, false
		}
		for _, name := range term.MatchFields[i].Values {
			names[name] = true
		}
	}
	return names, true
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
