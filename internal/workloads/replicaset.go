package workloads

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

// burst is how many Pods of a ReplicaSet are created or deleted at a time.
const burst = 500

// Replicas is what is to be done for a ReplicaSet.
type Replicas struct {
	// Create is how many Pods are missing.
	Create int
	// Delete are Pods that are too many.
	Delete []*corev1.Pod
	// Status is the new status; its condition ReplicaFailure is that of before.
	Status appsv1.ReplicaSetStatus
	// After is when to look again, 0 for when something changes.
	After time.Duration
}

// PlanReplicaSet decides for r, which has the Pods owned. related are the Pods of all
// ReplicaSets of its Deployment, asked for only if some are too many. deleted are Pods owned that
// have been deleted already.
func PlanReplicaSet(r *appsv1.ReplicaSet, owned []*corev1.Pod, related func() []*corev1.Pod, deleted map[types.UID]bool, now time.Time,
) Replicas {
	var running []*corev1.Pod
	terminating := int32(0)
	for _, p := range owned {
		switch {
		case active(p, deleted):
			running = append(running, p)
		case !ended(p):
			terminating++
		}
	}
	out := Replicas{Status: replicaStatus(r, running, now)}
	out.Status.TerminatingReplicas = &terminating
	if r.Spec.MinReadySeconds > 0 {
		for _, p := range running {
			if wait, ok := availableIn(p, r.Spec.MinReadySeconds, now); ok && wait > 0 && (out.After == 0 || wait < out.After) {
				out.After = wait
			}
		}
	}
	if r.DeletionTimestamp != nil {
		return out
	}
	switch surplus := len(running) - int(deref(r.Spec.Replicas)); {
	case surplus < 0:
		out.Create = min(-surplus, burst)
	case surplus > 0:
		surplus = min(surplus, burst)
		byNode := map[string]int{}
		for _, p := range related() {
			if active(p, deleted) {
				byNode[p.Spec.NodeName]++
			}
		}
		slices.SortFunc(running, func(a, b *corev1.Pod) int { return compareForDeletion(a, b, byNode, now) })
		out.Delete = running[:surplus]
	}
	return out
}

func replicaStatus(r *appsv1.ReplicaSet, running []*corev1.Pod, now time.Time) appsv1.ReplicaSetStatus {
	s := *r.Status.DeepCopy()
	s.Replicas, s.FullyLabeledReplicas, s.ReadyReplicas, s.AvailableReplicas = int32(len(running)), 0, 0, 0
	template := labels.SelectorFromSet(r.Spec.Template.Labels)
	for _, p := range running {
		if template.Matches(labels.Set(p.Labels)) {
			s.FullyLabeledReplicas++
		}
		if wait, ok := availableIn(p, r.Spec.MinReadySeconds, now); ok {
			s.ReadyReplicas++
			if wait == 0 {
				s.AvailableReplicas++
			}
		}
	}
	s.ObservedGeneration = r.Generation
	return s
}

// SetReplicaFailure sets the condition ReplicaFailure of a ReplicaSet whose Pods could not
// all be created or deleted, or removes it if err is nil.
func SetReplicaFailure(s *appsv1.ReplicaSetStatus, creating bool, err error, now time.Time) {
	isFailure := func(c appsv1.ReplicaSetCondition) bool { return c.Type == appsv1.ReplicaSetReplicaFailure }
	i := slices.IndexFunc(s.Conditions, isFailure)
	switch {
	case err == nil && i >= 0:
		s.Conditions = slices.DeleteFunc(s.Conditions, isFailure)
	case err != nil && i < 0: // the first one stays until all is well
		reason := "FailedCreate"
		if !creating {
			reason = "FailedDelete"
		}
		s.Conditions = append(s.Conditions, appsv1.ReplicaSetCondition{
			Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now),
			Reason: reason, Message: err.Error(),
		})
	}
}

// compareForDeletion orders Pods as ReplicaSets delete them, the first first: what costs
// least (https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#scaling-a-replicaset).
// byNode counts the related Pods of each node.
func compareForDeletion(a, b *corev1.Pod, byNode map[string]int, now time.Time) int {
	readyA, readyB := readySince(a), readySince(b)
	c := cmp.Or(
		falseFirst(a.Spec.NodeName != "", b.Spec.NodeName != ""),
		cmp.Compare(phaseOrder(a), phaseOrder(b)),
		falseFirst(!readyA.IsZero(), !readyB.IsZero()),
		cmp.Compare(deletionCost(a), deletionCost(b)),
		-cmp.Compare(byNode[a.Spec.NodeName], byNode[b.Spec.NodeName]),
	)
	if c != 0 {
		return c
	}
	if !readyA.IsZero() && !readyA.Equal(readyB) {
		return byAge(a, b, readyA, readyB, now)
	}
	if c := -cmp.Compare(restarts(a), restarts(b)); c != 0 {
		return c
	}
	if a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return strings.Compare(string(a.UID), string(b.UID))
	}
	return byAge(a, b, a.CreationTimestamp.Time, b.CreationTimestamp.Time, now)
}

// byAge has the younger first, but ages count by their order of magnitude: among Pods of
// about one age the UID decides, so that not all of the newest node go.
func byAge(a, b *corev1.Pod, sinceA, sinceB, now time.Time) int {
	rank := func(since time.Time) int { return int(math.Log2(float64(max(1, now.Sub(since).Nanoseconds())))) }
	return cmp.Or(cmp.Compare(rank(sinceA), rank(sinceB)), strings.Compare(string(a.UID), string(b.UID)))
}

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

func phaseOrder(p *corev1.Pod) int {
	switch p.Status.Phase {
	case corev1.PodPending:
		return 0
	case corev1.PodUnknown:
		return 1
	case corev1.PodRunning:
		return 2
	}
	return 0
}

// deletionCost is the annotation controller.kubernetes.io/pod-deletion-cost, 0 if it is
// none.
func deletionCost(p *corev1.Pod) int32 {
	n, err := strconv.ParseInt(p.Annotations[corev1.PodDeletionCost], 10, 32)
	if err != nil {
		return 0
	}
	return int32(n)
}

// restarts is how often the container of a Pod that was restarted most was.
func restarts(p *corev1.Pod) (n int32) {
	for i := range p.Status.ContainerStatuses {
		n = max(n, p.Status.ContainerStatuses[i].RestartCount)
	}
	return n
}
