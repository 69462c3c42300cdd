package workloads

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func deployment(replicas int32, surge, unavailable string) *appsv1.Deployment {
	s, u, limit, deadline := intstr.Parse(surge), intstr.Parse(unavailable), int32(10), int32(600)
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "web", Generation: 1},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, RevisionHistoryLimit: &limit, ProgressDeadlineSeconds: &deadline,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Strategy: appsv1.DeploymentStrategy{
				Type:          appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &s, MaxUnavailable: &u},
			},
		},
	}
	d.Spec.Template.Labels = map[string]string{"app": "web"}
	return d
}

// world plays API server and the controller of ReplicaSets for one Deployment.
type world struct {
	*testing.T
	d      *appsv1.Deployment
	sets   []*appsv1.ReplicaSet
	now    time.Time
	others bool // Pods of other ReplicaSets run
	events []string
}

func newWorld(t *testing.T, d *appsv1.Deployment) *world {
	return &world{T: t, d: d, now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
}

// step lets the Deployment decide once and reports whether it changed anything.
func (w *world) step() bool {
	w.Helper()
	w.now = w.now.Add(time.Second)
	p := PlanDeployment(w.d, w.sets, func(*appsv1.ReplicaSet) bool { return w.others }, w.now)
	changed := p.Create != nil || len(p.Update)+len(p.Delete) > 0 || w.d.Annotations[RevisionAnnotation] != p.Revision ||
		!equality.Semantic.DeepEqual(w.d.Status, p.Status)
	if p.Create != nil {
		c := p.Create.DeepCopy()
		c.UID, c.CreationTimestamp = types.UID(c.Name), metav1.NewTime(w.now)
		w.sets = append(w.sets, c)
	}
	for i, r := range w.sets {
		for _, u := range p.Update {
			if u.UID == r.UID {
				w.sets[i] = u.DeepCopy()
			}
		}
	}
	w.sets = slices.DeleteFunc(w.sets, func(r *appsv1.ReplicaSet) bool {
		return slices.ContainsFunc(p.Delete, func(d *appsv1.ReplicaSet) bool { return d.UID == r.UID })
	})
	if w.d.Annotations == nil {
		w.d.Annotations = map[string]string{}
	}
	w.d.Annotations[RevisionAnnotation] = p.Revision
	w.d.Status = p.Status
	w.events = append(w.events, p.Events...)
	return changed
}

// pods makes as many Pods as each ReplicaSet wants, and all of them available but for
// those of sets that broken names.
func (w *world) pods(broken ...string) {
	for _, r := range w.sets {
		n := *r.Spec.Replicas
		r.Status.Replicas, r.Status.ReadyReplicas, r.Status.AvailableReplicas = n, n, n
		if slices.Contains(broken, imageOf(r)) {
			r.Status.ReadyReplicas, r.Status.AvailableReplicas = 0, 0
		}
	}
}

// A Deployment has as many Pods that terminate as its ReplicaSets say, if all of them do.
func TestTerminatingReplicas(t *testing.T) {
	w := newWorld(t, deployment(2, "1", "0"))
	for range 2 {
		w.step()
	}
	w.sets[0].Status.TerminatingReplicas = new(int32(3))
	w.version("2")
	for range 2 {
		w.step()
	}
	if n := w.d.Status.TerminatingReplicas; n != nil {
		t.Errorf("%d, though a ReplicaSet does not say", *n)
	}
	w.sets[1].Status.TerminatingReplicas = new(int32(1))
	w.step()
	if n := w.d.Status.TerminatingReplicas; n == nil || *n != 4 {
		t.Errorf("%v, want 4", n)
	}
}

func imageOf(r *appsv1.ReplicaSet) string { return r.Spec.Template.Annotations["version"] }

// version changes the template.
func (w *world) version(v string) {
	w.d.Generation++
	w.d.Spec.Template.Annotations = map[string]string{"version": v}
}

func (w *world) settle(broken ...string) {
	w.Helper()
	for range 100 {
		if w.pods(broken...); !w.step() {
			return
		}
	}
	w.Fatal("the rollout does not end")
}

// sizes shows the ReplicaSets, the oldest first.
func (w *world) sizes() string {
	var out []string
	for _, r := range w.sets {
		out = append(out, fmt.Sprintf("%s:%d", imageOf(r), *r.Spec.Replicas))
	}
	return strings.Join(out, " ")
}

func (w *world) want(what, sizes string) {
	w.Helper()
	if got := w.sizes(); got != sizes {
		w.Errorf("%s: %s, want %s", what, got, sizes)
	}
}

func (w *world) reason(t appsv1.DeploymentConditionType) string {
	if c := findCondition(&w.d.Status, t); c != nil {
		return c.Reason
	}
	return ""
}

// The example of https://kubernetes.io/docs/concepts/workloads/controllers/deployment/#updating-a-deployment:
// three replicas, 25% and 25%: one more at most, none less.
func TestRollingUpdateOfTheDocuments(t *testing.T) {
	w := newWorld(t, deployment(3, "25%", "25%"))
	w.version("1")
	w.settle()
	w.want("created", "1:3")
	w.version("2")
	for _, want := range []string{"1:3 2:1", "1:2 2:1", "1:2 2:2", "1:1 2:2", "1:1 2:3", "1:0 2:3"} {
		w.step()
		w.want("rolling", want)
		w.pods()
	}
	w.settle()
	w.want("ended", "1:0 2:3")
	events := w.events[len(w.events)-6:]
	for i, want := range []string{"up", "down from 3 to 2", "up", "down from 2 to 1", "up", "down from 1 to 0"} {
		direction, change, _ := strings.Cut(want, " ")
		if !strings.Contains(events[i], "Scaled "+direction+" replica set web-") || !strings.Contains(events[i], change) {
			t.Errorf("event %d is %q, want %s", i, events[i], want)
		}
	}
	if w.d.Annotations[RevisionAnnotation] != "2" || w.reason(appsv1.DeploymentProgressing) != reasonAvailable {
		t.Errorf("revision %s, reason %s", w.d.Annotations[RevisionAnnotation], w.reason(appsv1.DeploymentProgressing))
	}
}

// https://kubernetes.io/docs/concepts/workloads/controllers/deployment/#proportional-scaling:
// 8 and 5 of 10, in the middle of a rollout that is stuck, become 11 and 7 of 15.
func TestProportionalScaling(t *testing.T) {
	w := newWorld(t, deployment(10, "3", "2"))
	w.version("good")
	w.settle()
	w.version("bad")
	for range 10 {
		w.step()
		w.pods("bad")
	}
	w.want("stuck", "good:8 bad:5")
	if got := w.reason(appsv1.DeploymentAvailable); got != "MinimumReplicasAvailable" {
		t.Errorf("8 of 10 are available and 2 may be missing: %s", got)
	}
	n := int32(15)
	w.d.Spec.Replicas = &n
	w.d.Generation++
	w.step()
	w.want("scaled", "good:11 bad:7")
}

func TestRollback(t *testing.T) {
	w := newWorld(t, deployment(2, "1", "0"))
	for _, v := range []string{"1", "2", "bad"} {
		w.version(v)
		w.settle("bad")
	}
	w.want("stuck", "1:0 2:2 bad:1")
	w.version("2")
	w.settle("bad")
	w.want("back", "1:0 2:2 bad:0")
	back := w.sets[1].Annotations
	if back[RevisionAnnotation] != "4" || back[revisionHistoryAnnotation] != "2" {
		t.Errorf("revision %q, history %q", back[RevisionAnnotation], back[revisionHistoryAnnotation])
	}
}

func TestRecreateWaitsForTheOldPods(t *testing.T) {
	d := deployment(2, "0", "0")
	d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}
	w := newWorld(t, d)
	w.version("1")
	w.settle()
	w.version("2")
	w.others = true
	w.settle()
	w.want("Pods of the old set end", "1:0")
	w.others = false
	w.settle()
	w.want("they have ended", "1:0 2:2")
}

func TestPaused(t *testing.T) {
	w := newWorld(t, deployment(2, "1", "0"))
	w.version("1")
	w.settle()
	w.d.Spec.Paused = true
	w.version("2")
	n := int32(5)
	w.d.Spec.Replicas = &n
	w.settle()
	w.want("scaled and not rolled", "1:5")
	if w.reason(appsv1.DeploymentProgressing) != reasonPaused {
		t.Errorf("reason %s", w.reason(appsv1.DeploymentProgressing))
	}
	w.d.Spec.Paused = false
	w.settle()
	w.want("resumed", "1:0 2:5")
}

func TestHistoryAndDeadline(t *testing.T) {
	d := deployment(1, "1", "0")
	limit := int32(2)
	d.Spec.RevisionHistoryLimit = &limit
	w := newWorld(t, d)
	for _, v := range []string{"1", "2", "3", "4", "5"} {
		w.version(v)
		w.settle()
	}
	w.want("two old ones are kept", "3:0 4:0 5:1")
	w.version("bad")
	w.settle("bad")
	plan := PlanDeployment(w.d, w.sets, nil, w.now)
	if plan.After < 590*time.Second || plan.After > 602*time.Second {
		t.Errorf("looks again after %s", plan.After)
	}
	w.now = w.now.Add(700 * time.Second)
	w.settle("bad")
	c := findCondition(&w.d.Status, appsv1.DeploymentProgressing)
	if c.Status != corev1.ConditionFalse || c.Reason != reasonTimedOut || !strings.Contains(c.Message, "has timed out progressing.") {
		t.Errorf("after the deadline: %+v", c)
	}
	w.settle()
	if w.reason(appsv1.DeploymentProgressing) != reasonAvailable {
		t.Errorf("reason %s", w.reason(appsv1.DeploymentProgressing))
	}
}

// Whatever becomes ready or fails, whenever it is changed or scaled: never more Pods than
// allowed are asked for by a step of a rollout, never are more taken away than may be
// missing, and it ends where it should when all goes well again.
func TestRolloutKeepsItsLimits(t *testing.T) {
	for seed := range uint64(80) {
		r := rand.New(rand.NewPCG(seed, 1))
		surge, unavailable := r.IntN(4), r.IntN(4)
		if surge+unavailable == 0 {
			surge = 1
		}
		n := int32(1 + r.IntN(9))
		w := newWorld(t, deployment(n, fmt.Sprint(surge), fmt.Sprint(unavailable)))
		w.version("0")
		w.settle()
		for i := range 60 {
			if r.IntN(12) == 0 {
				w.version(fmt.Sprint(i % 4))
			}
			before := sum(w.sets, available)
			least := min(before, n-min(int32(unavailable), n))
			w.step()
			if total := sum(w.sets, wanted); total > n+int32(surge) {
				t.Fatalf("seed %d: %d Pods of %d + %d: %s", seed, total, n, surge, w.sizes())
			}
			left := int32(0) // available at least, if those not available go first
			for _, s := range w.sets {
				left += min(*s.Spec.Replicas, s.Status.AvailableReplicas)
			}
			if left < least {
				t.Fatalf("seed %d: %d available of %d, at least %d: %s", seed, left, before, least, w.sizes())
			}
			for _, s := range w.sets {
				s.Status.Replicas = *s.Spec.Replicas
				s.Status.AvailableReplicas = min(*s.Spec.Replicas, s.Status.AvailableReplicas+int32(r.IntN(2)))
				s.Status.ReadyReplicas = s.Status.AvailableReplicas
			}
		}
		w.settle()
		for _, s := range w.sets {
			if want := n; (imageOf(s) == w.d.Spec.Template.Annotations["version"]) != (*s.Spec.Replicas == want) {
				t.Fatalf("seed %d: ended with %s, want %d of %s", seed, w.sizes(), want, w.d.Spec.Template.Annotations["version"])
			}
		}
	}
}
