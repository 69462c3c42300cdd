package policy_test

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// An eviction of a Pod that has been replaced by another of its name uses up nothing of the
// budget.
func TestEvictionOfAReplacedPod(t *testing.T) {
	ctx := context.Background()
	client := kubernetes.NewForConfigOrDie(process.API(t))
	pods, budgets := client.CoreV1().Pods("default"), client.PolicyV1().PodDisruptionBudgets("default")
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "example.com/c"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if pod, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	least := intstr.FromInt32(0)
	budget, err := budgets.Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &least, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, DisruptionsAllowed: 5, CurrentHealthy: 5}
	if _, err := budgets.UpdateStatus(ctx, budget, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	evict := func(uid types.UID, version string) error {
		e := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"}}
		e.DeleteOptions = &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
		if version != "" {
			e.DeleteOptions.Preconditions.ResourceVersion = &version
		}
		return pods.EvictV1(ctx, e)
	}
	allows := func(want int32) {
		t.Helper()
		b, err := budgets.Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := b.Status.DisruptionsAllowed; got != want {
			t.Errorf("the budget allows %d evictions, want %d", got, want)
		}
	}
	if err := evict("an-earlier-one", ""); !apierrors.IsConflict(err) {
		t.Errorf("another UID: %v", err)
	}
	if err := evict(pod.UID, "1"); !apierrors.IsConflict(err) {
		t.Errorf("another resourceVersion: %v", err)
	}
	allows(5)
	if err := evict(pod.UID, ""); err != nil {
		t.Errorf("the Pod itself: %v", err)
	}
	allows(4)
}

// A drain takes a registered program out of its Services until its node is uncordoned, and not for good. What is evicted from
// a node that is not cordoned, deleted, or registered by a file of its node does not come back.
func TestEvictionOfARegisteredProgram(t *testing.T) {
	ctx := t.Context()
	client := kubernetes.NewForConfigOrDie(process.API(t))
	pods := client.CoreV1().Pods("default")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "drained"}, Spec: corev1.NodeSpec{Unschedulable: true}}
	if _, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	register := func(name, file string) *corev1.Pod {
		t.Helper()
		s := registration.Spec{
			Name: name, Namespace: "default", Node: node.Name, Labels: map[string]string{"app": name}, Ports: []string{"db=5432"}, File: file,
		}
		p, err := s.Pod()
		if err == nil {
			p, err = pods.Create(ctx, p, metav1.CreateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	evict := func(name string, o metav1.DeleteOptions) {
		t.Helper()
		e := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}, DeleteOptions: &o}
		if err := pods.EvictV1(ctx, e); err != nil {
			t.Fatal(err)
		}
	}
	before := register("db", "")
	evict(before.Name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	if p, err := pods.Get(ctx, before.Name, metav1.GetOptions{}); err != nil || p.UID != before.UID {
		t.Errorf("after a dry run: %v, %v", p, err)
	}
	for _, o := range []metav1.DeleteOptions{{}, {GracePeriodSeconds: new(int64(30))}} {
		evict(before.Name, o)
		p, err := pods.Get(ctx, before.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if p.UID == before.UID || p.Annotations[svc.EvictedAnnotation] == "" || !registration.Same(p, before) || len(p.Status.Conditions) > 0 {
			t.Errorf("the registration in its place is %+v", p)
		}
		before = p
	}
	gone := func(name, what string) {
		t.Helper()
		if p, err := pods.Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) && p.DeletionTimestamp == nil {
			t.Errorf("%s: %v, %v", what, p, err)
		}
	}
	if err := pods.Delete(ctx, before.Name, metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	gone(before.Name, "deleted")
	file := register("file", "/etc/fairlead/services.d/file.yaml")
	evict(file.Name, metav1.DeleteOptions{})
	gone(file.Name, "of a file")
	other := register("other", "")
	patch := []byte(`{"spec":{"unschedulable":false}}`)
	if _, err := client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	evict(other.Name, metav1.DeleteOptions{})
	gone(other.Name, "of a node that is not cordoned")
}
