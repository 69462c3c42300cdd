package sched

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/controller/kittest"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/placement"
	"github.com/fairlead/fairlead/internal/svc"
)

// Waiting Pods are looked at when a node has room for them, and, if they have rules about other
// Pods, when one is placed; many events within wakePause are one.
func TestWaitingPodsWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &scheduler{placed: map[svc.Name]assignment{}, ports: heldPorts{}, waiting: map[svc.Name]waitingPod{}}
		c.cluster = placement.NewCluster(func(string) labels.Set { return nil })
		c.loop = loop.New[svc.Name](slog.New(slog.DiscardHandler), "scheduler", 1, nil)
		defer c.loop.Queue.ShutDown()
		for _, name := range []string{"n0", "n1"} {
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
			n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2")}
			c.nodeChanged(n)
		}
		pod := func(name, cpu string) *corev1.Pod {
			p := kittest.Pod("shop", name, name, "")
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}
			return p
		}
		placed := func(p *corev1.Pod, node string) *corev1.Pod {
			p.Spec.NodeName = node
			c.podChanged(p)
			return p
		}
		large, small := placed(pod("large", "2"), "n0"), placed(pod("small", "1"), "n1")
		placed(pod("other", "1"), "n1")
		apart := pod("apart", "2")
		apart.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{}}
		daemon := pod("daemon", "2")
		daemon.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{}}
		for _, p := range []*corev1.Pod{pod("wants-1", "1"), pod("wants-2", "2"), apart, daemon} {
			if node, why := c.choose(p); node != "" {
				t.Fatalf("%s goes to %s: %s", p.Name, node, why)
			}
		}
		woken := func(wait time.Duration, what, want string) {
			t.Helper()
			time.Sleep(wait)
			synctest.Wait()
			var got []string
			for c.loop.Queue.Len() > 0 {
				name, _ := c.loop.Queue.Get()
				c.loop.Queue.Done(name)
				got = append(got, name.Name)
			}
			slices.Sort(got)
			if strings.Join(got, " ") != want {
				t.Errorf("%s wakes %q, want %q", what, got, want)
			}
		}
		woken(2*wakePause, "nothing", "")
		placed(pod("tiny", "0"), "n1")
		woken(2*wakePause, "a placement", "apart")
		c.podDeleted(small)
		woken(2*wakePause, "room for one", "apart wants-1")
		c.podDeleted(large)
		woken(2*wakePause, "room for two", "apart daemon wants-1 wants-2")
		ready := placed(pod("tiny", "0"), "n1").DeepCopy()
		woken(2*wakePause, "the same again", "")
		ready.Status.Phase = corev1.PodRunning
		c.podChanged(ready)
		woken(2*wakePause, "a status", "")

		c.podDeleted(ready)
		woken(wakePause/4, "the first of many events", "apart wants-1")
		for range 100 {
			c.podDeleted(placed(pod("tiny", "0"), "n1"))
		}
		woken(wakePause/4, "the next of them", "")
		woken(wakePause, "the end of the pause", "apart wants-1")
	})
}

func TestReasonsWithoutCounts(t *testing.T) {
	a := withoutCounts("0/5 nodes are available: 3 Insufficient cpu, 2 node(s) had untolerated taint {size: 5}.")
	for other, same := range map[string]bool{
		"0/6 nodes are available: 5 Insufficient cpu, 1 node(s) had untolerated taint {size: 5}.": true,
		"0/5 nodes are available: 3 Insufficient cpu, 2 node(s) had untolerated taint {size: 6}.": false,
		"0/5 nodes are available: 5 Insufficient cpu.":                                            false,
	} {
		if got := withoutCounts(other); (got == a) != same {
			t.Errorf("%q and %q", a, got)
		}
	}
}
