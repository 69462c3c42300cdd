package workloads

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func daemonSet(surge, unavailable string) *appsv1.DaemonSet {
	s, u := intstr.Parse(surge), intstr.Parse(unavailable)
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "agent", UID: "agent", Generation: 1}}
	d.Spec.Template.Labels = map[string]string{"app": "agent"}
	d.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{
		Type:          appsv1.RollingUpdateDaemonSetStrategyType,
		RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxSurge: &s, MaxUnavailable: &u},
	}
	return d
}

func nodesNamed(names string) (out []*corev1.Node) {
	for name := range strings.FieldsSeq(names) {
		name, taint, tainted := strings.Cut(name, "!")
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if tainted {
			n.Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffect(taint)}}
		}
		out = append(out, n)
	}
	return out
}

// daemonPods reads "NODE:REVISION[STATE]": "+" ready, "-" not, "x" failed, "~" deleted, "!" both.
func daemonPods(text string) (out []*corev1.Pod, deleted map[types.UID]bool) {
	deleted = map[types.UID]bool{}
	for i, word := range strings.Fields(text) {
		node, rest, _ := strings.Cut(word, ":")
		revision, state := rest[:len(rest)-1], rest[len(rest)-1:]
		ready := time.Duration(0)
		if state == "+" {
			ready = time.Minute
		}
		p := podOf(fmt.Sprintf("%s-%s", node, revision), node, ready)
		p.UID = types.UID(fmt.Sprint(i))
		p.Labels[appsv1.ControllerRevisionHashLabelKey] = revision
		switch state {
		case "x":
			p.Status.Phase = corev1.PodFailed
		case "!":
			p.Status.Phase = corev1.PodFailed
			deleted[p.UID] = true
		case "~":
			deleted[p.UID] = true
		}
		out = append(out, p)
	}
	return out, deleted
}

// The rules of https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/ and of
// its rolling updates. The current revision is 2.
func TestPlanDaemonSet(t *testing.T) {
	for _, c := range []struct {
		name, nodes, pods, surge, unavailable string
		create, remove                        string
	}{
		{"new", "a b", "", "0", "1", "a b", ""},
		{"a new node", "a b c", "a:2+ b:2+", "0", "1", "c", ""},
		{"all is well", "a b", "a:2+ b:2+", "0", "1", "", ""},
		{"a taint keeps new ones away", "a b!NoSchedule", "a:2+", "0", "1", "", ""},
		{"and leaves those that run", "a b!NoSchedule", "a:2+ b:2+", "0", "1", "", ""},
		{"a taint that drives them away", "a b!NoExecute", "a:2+ b:2+", "0", "1", "", "b-2"},
		{"too many", "a", "a:2+ a:2+", "0", "1", "", "a-2"},
		{"a failed one", "a", "a:2x", "0", "1", "", "a-2"},
		{"one that goes is waited for", "a", "a:2~", "0", "1", "", ""},
		{"one that goes and has ended is replaced", "a", "a:2!", "0", "1", "a", ""},
		{"an update, one at a time", "a b c", "a:1+ b:1+ c:1+", "0", "1", "", "a-1"},
		{"the new one is not ready", "a b c", "a:2- b:1+ c:1+", "0", "1", "", ""},
		{"the next", "a b c", "a:2+ b:1+ c:1+", "0", "1", "", "b-1"},
		{"two at a time", "a b c", "a:1+ b:1+ c:1+", "0", "2", "", "a-1 b-1"},
		{"half, rounded up", "a b c", "a:1+ b:1+ c:1+", "0", "50%", "", "a-1 b-1"},
		{"old ones that are not ready go first", "a b c", "a:1+ b:1- c:1+", "0", "1", "", "b-1"},
		{"a surge", "a b", "a:1+ b:1+", "1", "0", "a", ""},
		{"of one that is not ready", "a b", "a:1+ a:2- b:1+", "1", "0", "", ""},
		{"the old one goes when the new one is available", "a b", "a:1+ a:2+ b:1+", "1", "0", "", "a-1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pods, deleted := daemonPods(c.pods)
			plan := PlanDaemonSet(daemonSet(c.surge, c.unavailable), "2", pods, nodesNamed(c.nodes), deleted, began)
			var remove []string
			for _, p := range plan.Delete {
				remove = append(remove, p.Name)
			}
			slices.Sort(remove)
			if got := strings.Join(plan.Create, " "); got != c.create {
				t.Errorf("creates on %q, want %q", got, c.create)
			}
			if got := strings.Join(remove, " "); got != c.remove {
				t.Errorf("deletes %q, want %q", got, c.remove)
			}
		})
	}
}

// The template is copied and compiled once for all nodes.
func TestCostOfDaemonsIsLinear(t *testing.T) {
	d := daemonSet("0", "1")
	d.Spec.Template.Spec.NodeSelector = map[string]string{"disk": "ssd"}
	for i := range 50 {
		d.Spec.Template.Spec.Containers = append(d.Spec.Template.Spec.Containers, corev1.Container{
			Name: fmt.Sprint(i), Args: []string{"a"}, Env: []corev1.EnvVar{{Name: "A"}}, Ports: []corev1.ContainerPort{{ContainerPort: 1}},
		})
	}
	nodes := nodesNamed(strings.Repeat("n ", 300))
	n := testing.AllocsPerRun(3, func() { PlanDaemonSet(d, "2", nil, nodes, nil, began) })
	if n > 300*20 {
		t.Errorf("%g allocations for 300 nodes", n)
	}
}

func TestDaemonSetStatusAndPods(t *testing.T) {
	pods, deleted := daemonPods("a:2+ b:1+ c:2- d:2+")
	d := daemonSet("0", "1")
	s := PlanDaemonSet(d, "2", pods, nodesNamed("a b c d!NoSchedule e"), deleted, began).Status
	want := appsv1.DaemonSetStatus{
		DesiredNumberScheduled: 4, CurrentNumberScheduled: 3, NumberMisscheduled: 1, NumberReady: 2, NumberAvailable: 2,
		NumberUnavailable: 2, UpdatedNumberScheduled: 2, ObservedGeneration: 1,
	}
	if fmt.Sprint(s) != fmt.Sprint(want) {
		t.Errorf("%+v, want %+v", s, want)
	}
	d.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
	if plan := PlanDaemonSet(d, "2", pods[:1], nodesNamed("a"), nil, began); len(plan.Delete) > 0 {
		t.Error("OnDelete deletes")
	}
	p := NewDaemon(d, "2", "a")
	if targetNode(p) != "a" || p.Labels[appsv1.ControllerRevisionHashLabelKey] != "2" || len(p.Spec.Tolerations) != 6 {
		t.Errorf("%+v", p.Spec)
	}
}

func TestHistoryOfDaemonSets(t *testing.T) {
	d := daemonSet("0", "1")
	limit := int32(1)
	d.Spec.RevisionHistoryLimit = &limit
	var have []*appsv1.ControllerRevision
	version := func(v string) History {
		d.Spec.Template.Annotations = map[string]string{"version": v}
		h := PlanHistory(d, have)
		switch {
		case h.Create:
			have = append(have, h.Current)
		case h.Update:
			have = slices.DeleteFunc(have, func(r *appsv1.ControllerRevision) bool { return r.Name == h.Current.Name })
			have = append(have, h.Current)
		}
		return h
	}
	version("1")
	version("2")
	if h := version("2"); h.Create || h.Update || h.Current.Revision != 2 || len(h.Old) != 1 {
		t.Errorf("the same again: %+v", h)
	}
	h := version("1")
	if !h.Update || h.Current.Revision != 3 {
		t.Errorf("back: %+v", h)
	}
	h = version("3")
	used := podOf("p", "a", 0)
	used.Labels[appsv1.ControllerRevisionHashLabelKey] = TemplateHash(h.Old[0])
	if got := SurplusHistory(d, h.Old, nil); len(got) != 1 || got[0] != h.Old[0] {
		t.Errorf("of %d old ones %d go", len(h.Old), len(got))
	}
	if got := SurplusHistory(d, h.Old, []*corev1.Pod{used}); len(got) != 1 || got[0] != h.Old[1] {
		t.Errorf("while a Pod has the oldest, %v go", got)
	}
}

// https://kubernetes.io/docs/tasks/run-application/configure-pdb/
func TestPlanBudget(t *testing.T) {
	three := func() (Scale, error) { return Scale{Expected: 3}, nil }
	for _, c := range []struct {
		name, least, most string
		ready, unready    int
		scale             func() (Scale, error)
		allowed, desired  int32
	}{
		{"two of three", "2", "", 3, 0, three, 1, 2},
		{"one is not ready", "2", "", 2, 1, three, 0, 2},
		{"half, rounded up", "50%", "", 3, 0, three, 1, 2},
		{"one may be missing", "", "1", 3, 0, three, 1, 2},
		{"one is missing", "", "1", 2, 0, three, 0, 2},
		{"30%, rounded up", "", "30%", 3, 0, three, 1, 2},
		{"no Pods", "", "1", 0, 0, func() (Scale, error) { return Scale{}, nil }, 0, 0},
		{"an unknown controller", "", "1", 3, 0, func() (Scale, error) { return Scale{}, errors.New("found no controllers") }, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Generation: 4}}
			if c.least != "" {
				v := intstr.Parse(c.least)
				b.Spec.MinAvailable = &v
			} else {
				v := intstr.Parse(c.most)
				b.Spec.MaxUnavailable = &v
			}
			var pods []*corev1.Pod
			for i := range c.ready + c.unready {
				ready := time.Minute
				if i >= c.ready {
					ready = 0
				}
				pods = append(pods, podOf(fmt.Sprint(i), "n", ready))
			}
			s, _, _ := PlanBudget(b, pods, c.scale, began)
			if s.DisruptionsAllowed != c.allowed || s.DesiredHealthy != c.desired || s.ObservedGeneration != 4 {
				t.Errorf("%+v", s)
			}
			condition := meta.FindStatusCondition(s.Conditions, policyv1.DisruptionAllowedCondition)
			if (condition.Status == metav1.ConditionTrue) != (c.allowed > 0) {
				t.Errorf("%+v", condition)
			}
			if c.name != "two of three" {
				return
			}
			// An evicted Pod does not count until it has gone, or was not deleted after all.
			b.Status = s
			b.Status.DisruptedPods = map[string]metav1.Time{"0": metav1.NewTime(began.Add(-time.Minute))}
			if s, _, after := PlanBudget(b, pods, c.scale, began); s.DisruptionsAllowed != 0 || after != time.Minute {
				t.Errorf("with an eviction on its way: %+v, %s", s, after)
			}
			if s, _, _ := PlanBudget(b, pods, c.scale, began.Add(2*time.Minute)); s.DisruptionsAllowed != 1 || len(s.DisruptedPods) > 0 {
				t.Errorf("after an eviction that did not come: %+v", s)
			}
		})
	}
}
