package workloads

import (
	"fmt"
	"math"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reasons of the condition Progressing, which kubectl rollout status reads.
const (
	reasonAvailable = "NewReplicaSetAvailable"
	reasonUpdated   = "ReplicaSetUpdated"
	reasonTimedOut  = "ProgressDeadlineExceeded"
	reasonPaused    = "DeploymentPaused"
	reasonResumed   = "DeploymentResumed"
)

func (r *rollout) hasDeadline() bool {
	p := r.d.Spec.ProgressDeadlineSeconds
	return p != nil && *p != math.MaxInt32
}

func findCondition(s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	if i := slices.IndexFunc(s.Conditions, func(c appsv1.DeploymentCondition) bool { return c.Type == t }); i >= 0 {
		return &s.Conditions[i]
	}
	return nil
}

func (r *rollout) condition(t appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	return findCondition(&r.d.Status, t)
}

// setProgressing sets the condition Progressing of the status from which the decision begins.
func (r *rollout) setProgressing(status corev1.ConditionStatus, reason, message string) {
	r.setIn(&r.d.Status, appsv1.DeploymentProgressing, status, reason, message)
}

// setIn sets a condition unless it has that status and reason already.
func (r *rollout) setIn(
	s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType, status corev1.ConditionStatus, reason, message string,
) {
	now := metav1.NewTime(r.now)
	c := appsv1.DeploymentCondition{Type: t, Status: status, Reason: reason, Message: message, LastUpdateTime: now, LastTransitionTime: now}
	if before := findCondition(s, t); before != nil {
		if before.Status == status && before.Reason == reason {
			return
		}
		if before.Status == status {
			c.LastTransitionTime = before.LastTransitionTime
		}
	}
	removeCondition(s, t)
	s.Conditions = append(s.Conditions, c)
}

func removeCondition(s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType) {
	s.Conditions = slices.DeleteFunc(s.Conditions, func(c appsv1.DeploymentCondition) bool { return c.Type == t })
}

// checkPaused keeps the time of a pause out of the deadline.
func (r *rollout) checkPaused() {
	c := r.condition(appsv1.DeploymentProgressing)
	if !r.hasDeadline() || c != nil && c.Reason == reasonTimedOut {
		return
	}
	switch was := c != nil && c.Reason == reasonPaused; {
	case r.d.Spec.Paused && !was:
		r.setProgressing(corev1.ConditionUnknown, reasonPaused, "Deployment is paused")
	case !r.d.Spec.Paused && was:
		r.setProgressing(corev1.ConditionUnknown, reasonResumed, "Deployment is resumed")
	}
}

// terminating returns how many Pods of the ReplicaSets terminate, nil if one does not say.
func terminating(sets []*appsv1.ReplicaSet) *int32 {
	n := int32(0)
	for _, r := range sets {
		if r.Status.TerminatingReplicas == nil {
			return nil
		}
		n += *r.Status.TerminatingReplicas
	}
	return &n
}

// status counts the Pods that exist. A ReplicaSet that is to be created has nothing yet.
func (r *rollout) status() appsv1.DeploymentStatus {
	all := r.all()
	s := appsv1.DeploymentStatus{
		ObservedGeneration: r.d.Generation,
		Replicas:           sum(all, actual), ReadyReplicas: sum(all, readyOf), AvailableReplicas: sum(all, available),
		UnavailableReplicas: max(0, sum(all, wanted)-sum(all, available)),
		TerminatingReplicas: terminating(all),
		CollisionCount:      r.d.Status.CollisionCount,
		Conditions:          slices.Clone(r.d.Status.Conditions),
	}
	if r.current != nil {
		s.UpdatedReplicas = actual(r.current)
	}
	if _, unavailable := r.limits(); s.AvailableReplicas >= wantedBy(r.d)-unavailable {
		r.setIn(&s, appsv1.DeploymentAvailable, corev1.ConditionTrue, "MinimumReplicasAvailable", "Deployment has minimum availability.")
	} else {
		r.setIn(&s, appsv1.DeploymentAvailable, corev1.ConditionFalse, "MinimumReplicasUnavailable",
			"Deployment does not have minimum availability.")
	}
	return s
}

// complete reports whether a status is that of an ended rollout.
func (r *rollout) complete(s *appsv1.DeploymentStatus) bool {
	n := wantedBy(r.d)
	return s.UpdatedReplicas == n && s.Replicas == n && s.AvailableReplicas == n && s.ObservedGeneration >= r.d.Generation
}

// progress sets the status with the condition Progressing: ended, on its way, or nothing
// has moved for longer than the deadline.
func (r *rollout) progress() {
	s := r.status()
	before := r.condition(appsv1.DeploymentProgressing)
	if !r.hasDeadline() {
		removeCondition(&s, appsv1.DeploymentProgressing)
	} else if before == nil || before.Reason != reasonAvailable || s.Replicas != s.UpdatedReplicas {
		r.setProgress(&s, before)
	}
	removeCondition(&s, appsv1.DeploymentReplicaFailure)
	if c := r.failure(); c != nil {
		s.Conditions = append(s.Conditions, *c)
	}
	r.out.Status = s
	if c := findCondition(&s, appsv1.DeploymentProgressing); c != nil && !r.complete(&s) && c.Reason != reasonTimedOut && r.hasDeadline() {
		deadline := c.LastUpdateTime.Add(time.Duration(*r.d.Spec.ProgressDeadlineSeconds) * time.Second)
		r.out.After = max(time.Second, deadline.Sub(r.now)+time.Second)
	}
}

func (r *rollout) setProgress(s *appsv1.DeploymentStatus, before *appsv1.DeploymentCondition) {
	name := fmt.Sprintf("Deployment %q", r.d.Name)
	if r.current != nil {
		name = fmt.Sprintf("ReplicaSet %q", r.current.Name)
	}
	old := &r.d.Status
	switch {
	case r.complete(s):
		r.setIn(s, appsv1.DeploymentProgressing, corev1.ConditionTrue, reasonAvailable, name+" has successfully progressed.")
	case s.UpdatedReplicas > old.UpdatedReplicas || s.Replicas-s.UpdatedReplicas < old.Replicas-old.UpdatedReplicas ||
		s.ReadyReplicas > old.ReadyReplicas || s.AvailableReplicas > old.AvailableReplicas:
		now := metav1.NewTime(r.now)
		c := appsv1.DeploymentCondition{
			Type: appsv1.DeploymentProgressing, Status: corev1.ConditionTrue, Reason: reasonUpdated, Message: name + " is progressing.",
			LastUpdateTime: now, LastTransitionTime: now,
		}
		if before != nil && before.Status == corev1.ConditionTrue {
			c.LastTransitionTime = before.LastTransitionTime
		}
		removeCondition(s, appsv1.DeploymentProgressing)
		s.Conditions = append(s.Conditions, c)
	case before != nil && before.Reason != reasonAvailable && before.Reason != reasonTimedOut &&
		before.LastUpdateTime.Add(time.Duration(*r.d.Spec.ProgressDeadlineSeconds)*time.Second).Before(r.now):
		r.setIn(s, appsv1.DeploymentProgressing, corev1.ConditionFalse, reasonTimedOut, name+" has timed out progressing.")
	}
}

// failure returns what keeps a ReplicaSet from its Pods as a condition of the Deployment.
func (r *rollout) failure() *appsv1.DeploymentCondition {
	list := slices.Clone(r.old)
	if r.current != nil {
		list = slices.Insert(list, 0, r.current)
	}
	for _, rs := range list {
		for _, c := range rs.Status.Conditions {
			if c.Type == appsv1.ReplicaSetReplicaFailure {
				return &appsv1.DeploymentCondition{
					Type: appsv1.DeploymentReplicaFailure, Status: c.Status, Reason: c.Reason, Message: c.Message,
					LastTransitionTime: c.LastTransitionTime, LastUpdateTime: c.LastTransitionTime,
				}
			}
		}
	}
	return nil
}

// SetCreateError sets the condition of a Deployment whose ReplicaSet could not be created.
func SetCreateError(s *appsv1.DeploymentStatus, message string, now time.Time) {
	r := rollout{now: now}
	r.setIn(s, appsv1.DeploymentProgressing, corev1.ConditionFalse, "ReplicaSetCreateError", message)
}
