package sets

import (
	"log/slog"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/kittest"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Budgets are looked at when the scale of a set changes whose Pods they select, and not at each
// write of a status in their namespace.
func TestBudgetsFollowScale(t *testing.T) {
	factory := informers.NewSharedInformerFactory(kubernetes.NewForConfigOrDie(&rest.Config{}), 0)
	c := &disruption{Kit: &kit.Kit{Informers: factory}}
	c.loop = loop.New[svc.Name](slog.New(slog.DiscardHandler), "disruption", 1, nil)
	defer c.loop.Queue.ShutDown()
	for _, app := range []string{"web", "db"} {
		b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: app}}
		b.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
		if err := factory.Policy().V1().PodDisruptionBudgets().Informer().GetStore().Add(b); err != nil {
			t.Fatal(err)
		}
	}
	queued := func(what string, want int) {
		t.Helper()
		if n := c.loop.Queue.Len(); n != want {
			t.Errorf("%s: %d budgets queued, want %d", what, n, want)
		}
		for c.loop.Queue.Len() > 0 {
			name, _ := c.loop.Queue.Get()
			c.loop.Queue.Done(name)
		}
	}
	two, three := int32(2), int32(3)
	set := func(replicas *int32) *appsv1.ReplicaSet {
		r := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1", UID: "r"}}
		r.Spec.Replicas, r.Spec.Template.Labels = replicas, map[string]string{"app": "web"}
		return r
	}
	h := c.setHandlers()
	h.OnAdd(set(&two), false)
	queued("a new set", 1)
	status := set(&two)
	status.Status.ReadyReplicas = 1
	h.OnUpdate(set(&two), status)
	queued("a status", 0)
	h.OnUpdate(set(&two), set(&three))
	queued("a scale", 1)
	owned := set(&two)
	yes := true
	owned.OwnerReferences = []metav1.OwnerReference{{UID: "d", Controller: &yes}}
	h.OnUpdate(set(&two), owned)
	queued("an owner", 1)
	h.OnDelete(set(&two))
	queued("a deleted set", 1)

	pod := kittest.Pod("shop", "web-1-a", "web", "n0")
	ready, moved := pod.DeepCopy(), pod.DeepCopy()
	ready.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	moved.Labels = map[string]string{"app": "db"}
	c.podChanged(nil, pod)
	queued("a new Pod", 1)
	c.podChanged(pod, pod.DeepCopy())
	queued("an unchanged Pod", 0)
	c.podChanged(pod, ready)
	queued("a ready Pod", 1)
	c.podChanged(pod, moved)
	queued("a Pod that another budget selects now", 2)
	c.podChanged(moved, nil)
	queued("a Pod that is gone", 1)
}
