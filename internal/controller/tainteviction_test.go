package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// taint sets the only taint of a Node, or removes it.
func (r *rig) taint(node string, taints ...corev1.Taint) {
	r.Helper()
	r.eventually("the taints of "+node, func() error {
		n, err := r.client.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.Spec.Taints = taints
		_, err = r.client.CoreV1().Nodes().Update(context.Background(), n, metav1.UpdateOptions{})
		return err
	})
}

// Pods leave a Node that is unreachable after the default time if something replaces them,
// and after the time that they say themselves; others stay. A taint of an administrator's
// takes all that do not tolerate it.
func TestTaintEviction(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: []string{TaintEvictionName}, UnreachableToleration: time.Second})
	ns := r.namespace("shop")
	r.node("n0")
	r.node("n1")
	yes, hour, none := true, int64(3600), int64(0)
	owner := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", UID: "u", Controller: &yes}}
	tolerates := func(seconds *int64) []corev1.Toleration {
		return []corev1.Toleration{{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists,
			Effect: corev1.TaintEffectNoExecute, TolerationSeconds: seconds}}
	}
	for _, p := range []struct {
		name        string
		owners      []metav1.OwnerReference
		tolerations []corev1.Toleration
	}{
		{"alone", nil, nil},
		{"of-a-set", owner, nil},
		{"for-an-hour", owner, tolerates(&hour)},
		{"for-good", owner, tolerates(nil)},
		{"at-once", nil, tolerates(&none)},
	} {
		pod := podObject(ns, p.name, "web", "n0")
		pod.OwnerReferences, pod.Spec.Tolerations = p.owners, p.tolerations
		_, err := r.client.CoreV1().Pods(ns).Create(context.Background(), pod, metav1.CreateOptions{})
		r.must(err)
	}
	leave := func(want ...string) {
		t.Helper()
		r.eventually(fmt.Sprintf("%s leave", want), func() error {
			list, err := r.client.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{})
			if err != nil {
				return err
			}
			var got []string
			for _, p := range list.Items {
				if p.DeletionTimestamp != nil {
					got = append(got, p.Name)
				}
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				return fmt.Errorf("leaving: %s", strings.Join(got, ", "))
			}
			return nil
		})
	}
	now := metav1.Now()
	r.taint("n0", corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute, TimeAdded: &now})
	leave("at-once", "of-a-set")
	r.taint("n0", corev1.Taint{Key: "maintenance", Effect: corev1.TaintEffectNoExecute})
	leave("alone", "at-once", "for-an-hour", "for-good", "of-a-set")
}

// The time that a Pod tolerates a taint ends also where the taint has no time, and does not
// begin before the Pod is on the Node.
func TestTolerationCounts(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	minute := int64(60)
	pod := podObject("shop", "web", "web", "n0")
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
	c.forget(nameOf(pod))
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
		s := &controllerContext{informers: informers.NewSharedInformerFactory(client, 0)}
		store := s.informers.Core().V1().Nodes().Informer().GetStore()
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
		if got := (&taintEviction{controllerContext: s}).isolated(); got != c.want {
			t.Errorf("%d of %d lost: %v", c.lost, c.nodes, got)
		}
	}
}

// A Pod is evicted once, though its watch does not know that yet; another one of its name is, too.
func TestEvictedOnce(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}}
	node.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoExecute}}
	pod := podObject("shop", "web-1", "web", "n0")
	pod.UID = "1"
	client := fake.NewClientset(pod, node)
	log := slog.New(slog.DiscardHandler)
	c := &taintEviction{controllerContext: &controllerContext{
		client: client, log: log, informers: informers.NewSharedInformerFactory(client, 0), options: &Options{},
		events: events.NewRecorder(client, corev1.EventSource{}, log),
	}, seen: map[svc.Name]seenTaints{}, evicted: map[svc.Name]types.UID{}}
	pods, nodes := c.informers.Core().V1().Pods().Informer().GetStore(), c.informers.Core().V1().Nodes().Informer().GetStore()
	name := nameOf(pod)
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
