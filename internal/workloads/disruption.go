package workloads

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	pdbhelper "k8s.io/component-helpers/apps/poddisruptionbudget"
)

// deletionTimeout is how long an evicted Pod counts as one that goes.
const deletionTimeout = 2 * time.Minute

// Scale is how many Pods the controller of some Pods wants.
type Scale struct {
	Expected int32
	// Unmanaged are Pods that no controller has.
	Unmanaged []string
}

// PlanBudget returns the status of a budget that selects pods. scale tells how many there
// should be; an error of it is shown, and nothing may be evicted. after is when to look
// again, 0 for when something changes.
func PlanBudget(b *policyv1.PodDisruptionBudget, pods []*corev1.Pod, scale func() (Scale, error), now time.Time) (
	status policyv1.PodDisruptionBudgetStatus, unmanaged []string, after time.Duration,
) {
	out := b.DeepCopy()
	s := &out.Status
	s.ObservedGeneration = b.Generation
	expected, desired, unmanaged, err := expectedHealthy(b, len(pods), scale)
	if err != nil {
		s.DisruptionsAllowed = 0
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{
			Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason,
			Message: err.Error(), ObservedGeneration: b.Generation,
		})
		return *s, nil, 0
	}
	s.DisruptedPods = nil
	s.CurrentHealthy = 0
	for _, p := range pods {
		if p.DeletionTimestamp != nil {
			continue
		}
		if at, ok := b.Status.DisruptedPods[p.Name]; ok {
			if left := at.Add(deletionTimeout).Sub(now); left > 0 {
				if s.DisruptedPods == nil {
					s.DisruptedPods = map[string]metav1.Time{}
				}
				s.DisruptedPods[p.Name] = at
				if after == 0 || left < after {
					after = left
				}
				continue
			}
		}
		if IsReady(p) {
			s.CurrentHealthy++
		}
	}
	s.ExpectedPods, s.DesiredHealthy = expected, desired
	if s.DisruptionsAllowed = s.CurrentHealthy - desired; expected <= 0 || s.DisruptionsAllowed < 0 {
		s.DisruptionsAllowed = 0
	}
	pdbhelper.UpdateDisruptionAllowedCondition(out)
	return *s, unmanaged, after
}

// expectedHealthy returns how many Pods there should be, and how many of them healthy.
func expectedHealthy(b *policyv1.PodDisruptionBudget, pods int, scale func() (Scale, error)) (
	expected, desired int32, unmanaged []string, err error,
) {
	least, most := b.Spec.MinAvailable, b.Spec.MaxUnavailable
	switch {
	case least == nil && most == nil:
		return 0, 0, nil, nil
	case most == nil && least.Type == intstr.Int:
		return int32(pods), least.IntVal, nil, nil
	}
	all, err := scale()
	if err != nil {
		return 0, 0, nil, err
	}
	if most != nil {
		return all.Expected, max(0, all.Expected-int32(share(most, int(all.Expected), true))), all.Unmanaged, nil
	}
	return all.Expected, int32(share(least, int(all.Expected), true)), all.Unmanaged, nil
}
