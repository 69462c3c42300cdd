package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/kittest"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// The time that a Pod tolerates a taint ends also where the taint has no time, and does not
// begin before the Pod is on the Node.
func TestTolerationCounts(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	minute := int64(60)
	pod := kittest.Pod("shop", "web", "web", "n0")
	pod.UID, pod.CreationTimestamp = "1", metav1.NewTime(at(0))
	pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists, TolerationSeconds: &minute}}
	plain := corev1.Taint{Key: "maintenance", Effect: corev1.TaintEffectNoExecute}
	c := &taintEviction{seen: map[svc.Name]seenTaints{}}
	left := func(taint corev1.Taint, now time.Time) time.Duration {
		d, _ := c.tolerated(pod, taint, c.since(pod, []corev1.Taint{taint}, now)[0], now)
		return d
	}
	expect := func(what string, got, want time.Duration) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s left, want %s", what, got, want)
		}
	}
	expect("first seen", left(plain, at(100)), time.Minute)
	expect("later", left(plain, at(140)), 20*time.Second)
	expect("at the end", left(plain, at(160)), 0)
	c.since(pod, nil, at(161))
	expect("added again", left(plain, at(170)), time.Minute)
	pod.UID = "2"
	expect("another Pod of the name", left(plain, at(180)), time.Minute)
	c.forget(svc.NameOf(pod))
	added, dated := metav1.NewTime(at(-3600)), plain
	dated.TimeAdded = &added
	expect("a Pod younger than the taint", left(dated, at(10)), 50*time.Second)
	pod.Status.Conditions = []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(at(30))},
	}
	expect("a Pod that waited for its Node", left(dated, at(40)), 50*time.Second)
	if len(c.seen) > 0 {
		t.Errorf("remembered in the end: %v", c.seen)
	}
}

// While most Nodes seem lost no Pod is taken from them.
func TestIsolatedServerEvictsNothing(t *testing.T) {
	lost := func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }
	for _, c := range []struct {
		nodes, lost int
		want        bool
	}{{1, 1, true}, {2, 1, false}, {2, 2, true}, {3, 2, false}, {5, 3, true}, {10, 5, false}, {10, 6, true}} {
		client, err := kubernetes.NewForConfig(&rest.Config{})
		if err != nil {
			t.Fatal(err)
		}
		k := &kit.Kit{Informers: informers.NewSharedInformerFactory(client, 0)}
		store := k.Informers.Core().V1().Nodes().Informer().GetStore()
		for i := range c.nodes {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i)}}
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
			if i < c.lost {
				lost(n)
			}
			if err := store.Add(n); err != nil {
				t.Fatal(err)
			}
		}
		if got := (&taintEviction{Kit: k}).isolated(); got != c.want {
			t.Errorf("%d of %d lost: %v", c.lost, c.nodes, got)
		}
	}
}

// A Pod is evicted once, though its watch does not know that yet; another one of its name is, too.
func TestEvictedOnce(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}}
	node.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoExecute}}
	pod := kittest.Pod("shop", "web-1", "web", "n0")
	pod.UID = "1"
	client := fake.NewClientset(pod, node)
	log := slog.New(slog.DiscardHandler)
	c := &taintEviction{Kit: &kit.Kit{
		Client: client, Log: log, Informers: informers.NewSharedInformerFactory(client, 0),
		Events: events.NewRecorder(client, corev1.EventSource{}, log),
	}, seen: map[svc.Name]seenTaints{}, evicted: map[svc.Name]types.UID{}}
	pods, nodes := c.Informers.Core().V1().Pods().Informer().GetStore(), c.Informers.Core().V1().Nodes().Informer().GetStore()
	name := svc.NameOf(pod)
	sync := func(p *corev1.Pod, want int) {
		t.Helper()
		if err := errors.Join(nodes.Add(node), pods.Add(p), c.sync(context.Background(), name)); err != nil {
			t.Fatal(err)
		}
		deleted := 0
		for _, a := range client.Actions() {
			if a.Matches("delete", "pods") {
				deleted++
			}
		}
		if deleted != want {
			t.Errorf("Pod %s: %d deletions, want %d", p.UID, deleted, want)
		}
	}
	sync(pod, 1)
	sync(pod, 1)
	other := pod.DeepCopy()
	other.UID = "2"
	if err := client.Tracker().Add(other); err != nil {
		t.Fatal(err)
	}
	sync(other, 2)
	if err := errors.Join(pods.Delete(other), c.sync(context.Background(), name)); err != nil || len(c.evicted) > 0 {
		t.Errorf("%v, and Pods that are gone are remembered: %v", err, c.evicted)
	}
}
