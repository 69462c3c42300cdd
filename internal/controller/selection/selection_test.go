package selection

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

func drawLabels(t *rapid.T, least int) map[string]string {
	out := map[string]string{}
	for range rapid.IntRange(least, 3).Draw(t, "labels") {
		out[rapid.SampledFrom([]string{"app", "tier", "env"}).Draw(t, "key")] = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "value")
	}
	return out
}

// behaviours 17, 18: the index finds what a scan over everything finds, in both
// directions, and tells of every Service that a change of a Pod concerns.
func TestSelectionFindsWhatAScanFinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := NewIndex()
		told := map[svc.Name]bool{}
		x.Subscribe(func(c Change) { told[c.Service] = true })
		services, pods := map[string]*corev1.Service{}, map[string]*corev1.Pod{}
		matching := func(p *corev1.Pod) []string {
			var out []string
			for name, s := range services {
				if p != nil && len(s.Spec.Selector) > 0 && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(p.Labels)) {
					out = append(out, name)
				}
			}
			return out
		}
		for i := range 30 {
			clear(told)
			switch rapid.SampledFrom([]string{"pod", "pod", "service", "pod gone", "service gone"}).Draw(t, "step") {
			case "pod":
				name := fmt.Sprintf("p%d", rapid.IntRange(0, 5).Draw(t, "pod"))
				p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: drawLabels(t, 0)}}
				p.Spec.NodeName = rapid.SampledFrom([]string{"", "n0", "n1"}).Draw(t, "node")
				p.Status.PodIP = fmt.Sprintf("10.0.0.%d", i)
				want := append(matching(pods[name]), matching(p)...)
				x.SetPod(p)
				pods[name] = p
				for _, s := range want {
					if !told[svc.Name{Namespace: "ns", Name: s}] {
						t.Fatalf("no event for Service %s", s)
					}
				}
				if len(told) > len(want) {
					t.Fatalf("told of %v, concerned are %v", told, want)
				}
			case "service":
				name := fmt.Sprintf("s%d", rapid.IntRange(0, 4).Draw(t, "service"))
				s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
				s.Spec.Selector = drawLabels(t, 0)
				x.SetService(s)
				services[name] = s
			case "pod gone":
				for _, name := range slices.Sorted(maps.Keys(pods)) {
					want := matching(pods[name])
					x.DeletePod(pods[name])
					delete(pods, name)
					for _, s := range want {
						if !told[svc.Name{Namespace: "ns", Name: s}] {
							t.Fatalf("no event for Service %s", s)
						}
					}
					break
				}
			case "service gone":
				for _, name := range slices.Sorted(maps.Keys(services)) {
					x.DeleteService(services[name])
					delete(services, name)
					break
				}
			}
			checkSelection(t, x, services, pods)
		}
		for _, p := range pods {
			x.DeletePod(p)
		}
		for _, s := range services {
			x.DeleteService(s)
		}
		if len(x.spaces) != 0 || len(x.nodes) != 0 {
			t.Fatalf("%d namespaces and %d nodes are left of nothing", len(x.spaces), len(x.nodes))
		}
	})
}

func checkSelection(t *rapid.T, x *Index, services map[string]*corev1.Service, pods map[string]*corev1.Pod) {
	t.Helper()
	for name, s := range services {
		var want, got []string
		for _, p := range pods {
			if len(s.Spec.Selector) > 0 && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(p.Labels)) {
				want = append(want, p.Name+p.Status.PodIP)
			}
		}
		for _, p := range x.Pods(s) {
			got = append(got, p.Name+p.Status.PodIP)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(want, got) {
			t.Fatalf("Service %s selects %v, want %v", name, got, want)
		}
	}
	checkCrossing(t, x, services, pods)
	for _, node := range []string{"n0", "n1"} {
		want := 0
		for _, p := range pods {
			if p.Spec.NodeName == node {
				want++
			}
		}
		if got := len(x.PodsOn(node)); got != want {
			t.Fatalf("%d pods on %s, want %d", got, node, want)
		}
	}
}

// checkCrossing compares with what looking at every pair of Services and every
// Pod finds: selectors that cross and have a Pod in common.
func checkCrossing(t *rapid.T, x *Index, services map[string]*corev1.Service, pods map[string]*corev1.Pod) {
	t.Helper()
	has := func(labels, sel map[string]string) bool {
		for k, v := range sel {
			if labels[k] != v {
				return false
			}
		}
		return len(sel) > 0
	}
	for _, a := range services {
		var want, got []string
		for _, b := range services {
			if a.Name <= b.Name || has(a.Spec.Selector, b.Spec.Selector) || has(b.Spec.Selector, a.Spec.Selector) {
				continue
			}
			for _, p := range pods {
				if has(p.Labels, a.Spec.Selector) && has(p.Labels, b.Spec.Selector) {
					want = append(want, b.Name)
					break
				}
			}
		}
		for _, b := range x.Crossing(a) {
			got = append(got, b.Name)
		}
		slices.Sort(want)
		if !slices.Equal(want, got) {
			t.Fatalf("selector of Service %s crosses those of %v, want %v", a.Name, got, want)
		}
	}
}

// The index costs the same however many Services the namespace has.
func BenchmarkSelectionFlip(b *testing.B) {
	for _, n := range []int{100, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			x := NewIndex()
			var pod *corev1.Pod
			for i := range n {
				s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("s", i)}}
				s.Spec.Selector = map[string]string{"app": fmt.Sprint("a", i), "env": "prod"}
				x.SetService(s)
				pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("p", i),
					Labels: map[string]string{"app": fmt.Sprint("a", i), "env": "prod", "x": "y"}}}
				pod.Status.PodIP = "10.0.0.1"
				x.SetPod(pod)
			}
			service := x.Service(svc.Name{Namespace: "ns", Name: fmt.Sprint("s", n-1)})
			for i := 0; b.Loop(); i++ {
				p := *pod
				p.Status.PodIP = fmt.Sprintf("10.0.0.%d", i%2)
				x.SetPod(&p)
				if len(x.Pods(service)) != 1 {
					b.Fatal("not one pod")
				}
			}
		})
	}
}
