package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	typedappsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/controller/kittest"
)

// stuck is the version of a template whose Pods never run.
const stuck = "stuck"

// agents do what the agents of all nodes would: Pods that are bound run and are ready, but for
// those that are stuck, and those that are deleted end.
func (r *rig) agents() {
	r.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	factory := informers.NewSharedInformerFactory(r.client, 0)
	ips := 0
	see := func(obj any) {
		p, ok := obj.(*corev1.Pod)
		if !ok || p.Spec.NodeName == "" || ctx.Err() != nil {
			return
		}
		api, err := r.client.CoreV1().Pods(p.Namespace), error(nil)
		switch {
		case p.DeletionTimestamp != nil:
			now := metav1.NewPreconditionDeleteOptions(string(p.UID))
			now.GracePeriodSeconds = new(int64(0))
			err = api.Delete(ctx, p.Name, *now)
		case p.Status.Phase == corev1.PodPending && versionOf(p) != stuck:
			ips++
			p = p.DeepCopy()
			p.Status = runningStatus(fmt.Sprintf("10.244.0.%d", ips), true)
			_, err = api.UpdateStatus(ctx, p, metav1.UpdateOptions{})
		}
		// After a conflict there is another event of the Pod.
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
			r.Errorf("agent of %s: Pod %s: %v", p.Spec.NodeName, p.Name, err)
		}
	}
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: see, UpdateFunc: func(_, obj any) { see(obj) },
	})
	r.must(err)
	factory.Start(ctx.Done())
	r.Cleanup(func() { cancel(); factory.Shutdown() })
}

// setsRig has two nodes and the controllers of sets.
type setsRig struct {
	*rig
	ns string
}

func newSetsRig(t *testing.T, more ...string) *setsRig {
	t.Helper()
	r := &setsRig{rig: newRig(t)}
	r.ns = r.namespace("shop")
	r.node("n0")
	r.node("n1")
	r.agents()
	r.run(Options{Controllers: append(more, ReplicaSetName, DeploymentName, DaemonSetName, DisruptionName, SchedulerName)})
	return r
}

// wantPods waits for Pods with a label app, each shown by what show returns.
func (r *setsRig) wantPods(app string, show func(*corev1.Pod) string, want ...string) {
	r.Helper()
	r.within(time.Minute, "Pods "+strings.Join(want, ", "), func() error {
		var got []string
		for _, p := range r.pods(app) {
			if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning {
				return fmt.Errorf("%s is %s", p.Name, p.Status.Phase)
			}
			got = append(got, show(&p))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
}

func (r *setsRig) pods(app string) []corev1.Pod {
	r.Helper()
	list, err := r.client.CoreV1().Pods(r.ns).List(context.Background(), metav1.ListOptions{LabelSelector: "app=" + app})
	r.must(err)
	return list.Items
}

func versionOf(p *corev1.Pod) string { return p.Annotations["version"] }

func template(app string) corev1.PodTemplateSpec {
	p := kittest.Pod("", "", app, "")
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: p.Labels, Annotations: map[string]string{"version": "1"}}, Spec: p.Spec,
	}
}

// versionPatch changes the template, as kubectl set and kubectl rollout restart do.
func versionPatch(v string) []byte {
	return fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"version":%q}}}}}`, v)
}

func (r *setsRig) patchDeployment(patch []byte) {
	r.Helper()
	_, err := r.client.AppsV1().Deployments(r.ns).Patch(context.Background(), "web", types.MergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
}

func (r *setsRig) makeDeployment(replicas int32) {
	r.Helper()
	_, err := r.client.AppsV1().Deployments(r.ns).Create(context.Background(), deploymentOf("web", replicas), metav1.CreateOptions{})
	r.must(err)
}

// deploymentOf returns a Deployment of Pods with its name as their label app.
func deploymentOf(name string, replicas int32) *appsv1.Deployment {
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, Template: template(name),
		},
	}
}

// A Pod without the label of its set is released and replaced; with the label again it is
// adopted, and one is too many then. A paused Deployment is scaled and not rolled.
func TestDeployments(t *testing.T) {
	t.Parallel()
	r := newSetsRig(t)
	ctx, api := context.Background(), r.client.CoreV1().Pods(r.ns)
	r.makeDeployment(2)
	r.wantPods("web", versionOf, "1", "1")
	first := r.pods("web")[0]
	relabel := func(app string) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{"app":%q}}}`, app)
		_, err := api.Patch(ctx, first.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		r.must(err)
	}
	owners := func() int {
		t.Helper()
		p, err := api.Get(ctx, first.Name, metav1.GetOptions{})
		r.must(err)
		return len(p.OwnerReferences)
	}
	relabel("other")
	r.within(time.Minute, "two Pods beside the one that is released", func() error {
		if n, m := owners(), len(r.pods("web")); n != 0 || m != 2 {
			return fmt.Errorf("%d owners, %d Pods", n, m)
		}
		return nil
	})
	// The one that is adopted is the oldest, and stays: of Pods that are equally crowded
	// the younger go first.
	events, err := api.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + first.Name})
	r.must(err)
	defer events.Stop()
	relabel("web")
	adopted := time.After(time.Minute)
	for owned := false; !owned; {
		select {
		case e := <-events.ResultChan():
			p, ok := e.Object.(*corev1.Pod)
			owned = ok && len(p.OwnerReferences) == 1
		case <-adopted:
			t.Fatal("the Pod is not adopted")
		}
	}
	r.wantPods("web", versionOf, "1", "1")

	r.patchDeployment([]byte(`{"spec":{"paused":true}}`))
	r.patchDeployment(versionPatch("2"))
	r.patchDeployment([]byte(`{"spec":{"replicas":3}}`))
	r.wantPods("web", versionOf, "1", "1", "1")
	r.patchDeployment([]byte(`{"spec":{"paused":false}}`))
	r.wantPods("web", versionOf, "2", "2", "2")
	r.patchDeployment(versionPatch("3"))
	r.wantPods("web", versionOf, "3", "3", "3")
	sets, err := r.client.AppsV1().ReplicaSets(r.ns).List(ctx, metav1.ListOptions{})
	r.must(err)
	if len(sets.Items) != 3 {
		t.Errorf("%d ReplicaSets of 3 revisions", len(sets.Items))
	}
}

// daemonSet creates a DaemonSet and returns the client of its kind.
func (r *setsRig) daemonSet(name string) typedappsv1.DaemonSetInterface {
	r.Helper()
	api := r.client.AppsV1().DaemonSets(r.ns)
	_, err := api.Create(context.Background(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, Template: template(name),
		},
	}, metav1.CreateOptions{})
	r.must(err)
	return api
}

// A DaemonSet leaves a node whose taint it does not tolerate, comes back, rolls, and goes
// back to a revision as kubectl rollout undo has it.
func TestDaemonSets(t *testing.T) {
	t.Parallel()
	r := newSetsRig(t)
	ctx, api := context.Background(), r.daemonSet("agent")
	where := func(p *corev1.Pod) string { return p.Spec.NodeName + ":" + versionOf(p) }
	r.wantPods("agent", where, "n0:1", "n1:1")
	r.taint("n1", corev1.Taint{Key: "dedicated", Effect: corev1.TaintEffectNoExecute})
	r.wantPods("agent", where, "n0:1")
	r.taint("n1")
	r.wantPods("agent", where, "n0:1", "n1:1")
	_, err := api.Patch(ctx, "agent", types.MergePatchType, versionPatch("2"), metav1.PatchOptions{})
	r.must(err)
	r.wantPods("agent", where, "n0:2", "n1:2")
	list, err := r.client.AppsV1().ControllerRevisions(r.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=agent"})
	r.must(err)
	slices.SortFunc(list.Items, func(a, b appsv1.ControllerRevision) int { return int(a.Revision - b.Revision) })
	if len(list.Items) != 2 || list.Items[0].Revision != 1 || list.Items[1].Revision != 2 {
		t.Fatalf("revisions %+v", list.Items)
	}
	_, err = api.Patch(ctx, "agent", types.StrategicMergePatchType, list.Items[0].Data.Raw, metav1.PatchOptions{})
	r.must(err)
	r.wantPods("agent", where, "n0:1", "n1:1")
}

// No Pod is evicted while the budget allows none, and one at a time when it allows one.
func TestBudgets(t *testing.T) {
	t.Parallel()
	r := newSetsRig(t)
	ctx, api := context.Background(), r.client.PolicyV1().PodDisruptionBudgets(r.ns)
	r.makeDeployment(2)
	r.wantPods("web", versionOf, "1", "1")
	least := intstr.FromInt32(2)
	_, err := api.Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &least, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		},
	}, metav1.CreateOptions{})
	r.must(err)
	allows := func(healthy, n int32) {
		t.Helper()
		r.within(time.Minute, fmt.Sprintf("%d disruptions allowed", n), func() error {
			b, err := api.Get(ctx, "web", metav1.GetOptions{})
			if s := b.Status; err == nil &&
				(s.ObservedGeneration != b.Generation || s.CurrentHealthy != healthy || s.DisruptionsAllowed != n) {
				err = fmt.Errorf("%+v", s)
			}
			return err
		})
	}
	evict := func(name string) error {
		e := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: r.ns, Name: name}}
		return r.client.PolicyV1().Evictions(r.ns).Evict(ctx, e)
	}
	allows(2, 0)
	before := r.pods("web")
	if err := evict(before[0].Name); !apierrors.IsTooManyRequests(err) {
		t.Errorf("evicted against the budget: %v", err)
	}
	_, err = api.Patch(ctx, "web", types.MergePatchType, []byte(`{"spec":{"minAvailable":1}}`), metav1.PatchOptions{})
	r.must(err)
	for _, p := range before {
		allows(2, 1)
		r.must(evict(p.Name))
		r.within(time.Minute, p.Name+" to be replaced", func() error {
			if now := r.pods("web"); len(now) != 2 || slices.ContainsFunc(now, func(n corev1.Pod) bool { return n.UID == p.UID }) {
				return fmt.Errorf("%d Pods", len(now))
			}
			return nil
		})
	}
	r.wantPods("web", versionOf, "1", "1")
}
