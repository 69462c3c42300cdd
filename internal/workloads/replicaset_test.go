package workloads

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

var began = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// podOf makes a Pod of "web" that is ready since the given time ago; 0 is not ready.
func podOf(name, node string, ready time.Duration, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{"app": "web"},
			CreationTimestamp: metav1.NewTime(began.Add(-time.Hour))},
		Spec:   corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if ready > 0 {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: metav1.NewTime(began.Add(-ready))}}
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func replicaSet(n int32) *appsv1.ReplicaSet {
	r := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: "web", UID: "set"}}
	r.Spec.Replicas = &n
	r.Spec.Template.Labels = map[string]string{"app": "web"}
	return r
}

// https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#scaling-a-replicaset
func TestDeletionOrder(t *testing.T) {
	cost := func(n string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: n} }
	}
	list := []*corev1.Pod{ // the order in which they go
		podOf("unscheduled", "", 0, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
		podOf("pending", "a", 0, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
		podOf("unready-restarted", "a", 0, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 3}}
		}),
		podOf("unready-young", "a", 0, func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(began.Add(-time.Second)) }),
		podOf("unready-old", "a", 0),
		podOf("cheap", "b", time.Hour, cost("-5")),
		podOf("crowded", "a", time.Hour),
		podOf("ready-young", "b", time.Second),
		podOf("ready-old", "b", time.Hour),
		podOf("dear", "a", time.Second, cost("5")),
	}
	shuffled := slices.Clone(list)
	slices.Reverse(shuffled)
	slices.SortFunc(shuffled[2:], func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	plan := PlanReplicaSet(replicaSet(0), shuffled, func() []*corev1.Pod { return list }, nil, began)
	for i, p := range plan.Delete {
		if p != list[i] {
			// Of those on one node all are equally crowded but for the sums of list.
			t.Errorf("%d: %s goes, want %s", i, p.Name, list[i].Name)
		}
	}
	if len(plan.Delete) != len(list) {
		t.Errorf("%d go", len(plan.Delete))
	}
}

func TestReplicas(t *testing.T) {
	ended := func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }
	leaving := func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: began} }
	r := replicaSet(3)
	r.Spec.MinReadySeconds = 10
	pods := []*corev1.Pod{
		podOf("a", "n", time.Minute), podOf("b", "n", 4*time.Second), podOf("ended", "n", 0, ended), podOf("leaving", "n", time.Minute, leaving),
		podOf("deleted", "n", time.Minute),
	}
	plan := PlanReplicaSet(r, pods, nil, map[types.UID]bool{"deleted": true}, began)
	s := plan.Status
	if plan.Create != 1 || len(plan.Delete) > 0 || plan.After != 6*time.Second ||
		s.Replicas != 2 || s.ReadyReplicas != 2 || s.AvailableReplicas != 1 || s.FullyLabeledReplicas != 2 || *s.TerminatingReplicas != 2 {
		t.Errorf("%+v", plan)
	}
	if plan = PlanReplicaSet(replicaSet(10_000), nil, nil, nil, began); plan.Create != burst {
		t.Errorf("creates %d at a time", plan.Create)
	}
	r.DeletionTimestamp = &metav1.Time{Time: began}
	if plan = PlanReplicaSet(r, pods, nil, nil, began); plan.Create > 0 || len(plan.Delete) > 0 {
		t.Error("a ReplicaSet that is being deleted still acts")
	}

	SetReplicaFailure(&s, true, errors.New("no quota"), began)
	SetReplicaFailure(&s, true, errors.New("no quota either"), began)
	if len(s.Conditions) != 1 || s.Conditions[0].Reason != "FailedCreate" || s.Conditions[0].Message != "no quota" {
		t.Errorf("%+v", s.Conditions)
	}
	if SetReplicaFailure(&s, true, nil, began); len(s.Conditions) != 0 {
		t.Errorf("%+v", s.Conditions)
	}
}

func TestClaim(t *testing.T) {
	r := replicaSet(1)
	by := func(uid types.UID) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			yes := true
			p.OwnerReferences = []metav1.OwnerReference{{UID: uid, Controller: &yes}}
		}
	}
	other := func(p *corev1.Pod) { p.Labels = map[string]string{"app": "other"} }
	list := []*corev1.Pod{
		podOf("owned", "", 0, by("set")), podOf("adopt", "", 0), podOf("release", "", 0, by("set"), other),
		podOf("foreign", "", 0, by("else")), podOf("unrelated", "", 0, other),
		podOf("leaving", "", 0, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: began} }),
	}
	selector := labels.SelectorFromSet(labels.Set{"app": "web"})
	c := Claim(r, selector, list)
	names := func(list []*corev1.Pod) (out []string) {
		for _, p := range list {
			out = append(out, p.Name)
		}
		return out
	}
	if got := names(append(append(c.Owned, c.Adopt...), c.Release...)); !slices.Equal(got, []string{"owned", "adopt", "release"}) {
		t.Errorf("%v", got)
	}
	r.DeletionTimestamp = &metav1.Time{Time: began}
	if c = Claim(r, selector, list); len(c.Adopt)+len(c.Release) > 0 {
		t.Error("an owner that is being deleted adopts or releases")
	}
}
