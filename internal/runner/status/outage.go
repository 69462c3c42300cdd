package status

import (
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Outage is why other nodes cannot reach the Pods of this one, however ready the Pods are. The Publishers of a node share
// one. The zero Outage is none. It is safe for concurrent use.
type Outage struct{ why atomic.Pointer[string] }

// Set sets the reason, "" for no outage. The Publishers see it when they are nudged.
func (o *Outage) Set(why string) { o.why.Store(&why) }

// cover returns the status to write in place of want while base is in the API: during an outage a Pod is not ready. It
// leaves what the node life cycle controller wrote for the same reason, and dates the end of the outage.
func (o *Outage) cover(base, want *corev1.PodStatus, now time.Time) *corev1.PodStatus {
	i := conditionIndex(want.Conditions, corev1.PodReady)
	if o == nil || i < 0 || want.Conditions[i].Status != corev1.ConditionTrue {
		return want
	}
	why := ""
	if p := o.why.Load(); p != nil {
		why = *p
	}
	var marked *corev1.PodCondition
	if j := conditionIndex(base.Conditions, corev1.PodReady); j >= 0 && base.Conditions[j].Status == corev1.ConditionFalse &&
		base.Conditions[j].Reason == svc.ReasonNodeNotReady {
		marked = &base.Conditions[j]
	}
	if why == "" && marked == nil {
		return want
	}
	out := *want
	out.Conditions = slices.Clone(want.Conditions)
	ready := &out.Conditions[i]
	switch {
	case why == "":
		if ready.LastTransitionTime.Before(&marked.LastTransitionTime) {
			ready.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
		}
	case marked != nil:
		*ready = *marked
	default:
		ready.Status, ready.Reason, ready.Message = corev1.ConditionFalse, svc.ReasonNodeNotReady, why
		ready.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	}
	return &out
}
