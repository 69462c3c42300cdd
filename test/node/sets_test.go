package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/testbed"
)

const setsNamespace = "default"

// setsCluster has two nodes, "node" and "other", and watches what is in it.
type setsCluster struct {
	*cluster
	other     *testbed.Host
	client    kubernetes.Interface
	informers informers.SharedInformerFactory
	changed   chan struct{}
	// fewest is the least number of available Pods that Deployment web had.
	fewest atomic.Int32
}

func newSetsCluster(t *testing.T) *setsCluster {
	t.Helper()
	// A busy machine does not end the wait for nodes.
	c := newClusterOf(t, []string{"--default-unreachable-toleration-seconds", "1"}, []string{"--drain-wait", "30s"})
	other := c.network.Outside("other")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	c.agentOn(other, "other")
	c.nodesReady(2)
	client, err := c.client()
	if err != nil {
		t.Fatal(err)
	}
	s := &setsCluster{
		cluster: c, other: other, client: client, changed: make(chan struct{}, 1),
		informers: informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(setsNamespace)),
	}
	apps := s.informers.Apps().V1()
	s.watch(apps.Deployments().Informer())
	s.watch(apps.ReplicaSets().Informer())
	s.watch(apps.DaemonSets().Informer())
	s.watch(s.informers.Core().V1().Pods().Informer())
	s.watch(s.informers.Policy().V1().PodDisruptionBudgets().Informer())
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); s.informers.Shutdown() })
	s.informers.Start(ctx.Done())
	s.informers.WaitForCacheSync(t.Context().Done())
	return s
}

func (s *setsCluster) watch(i cache.SharedIndexInformer) {
	s.t.Helper()
	see := func(obj any) {
		if d, ok := obj.(*appsv1.Deployment); ok && d.Name == "web" {
			s.fewest.Store(min(s.fewest.Load(), d.Status.AvailableReplicas))
		}
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
	_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: see, UpdateFunc: func(_, obj any) { see(obj) }, DeleteFunc: see,
	})
	s.must(err)
}

// until checks after each change until the result is nil.
func (s *setsCluster) until(what string, check func() error) {
	s.t.Helper()
	deadline := time.After(testbed.Patience)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-s.changed:
		case <-deadline:
			s.t.Fatalf("waited %s for %s: %v", testbed.Patience, what, err)
		}
	}
}

func (s *setsCluster) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// pods returns the Pods with a label app.
func (s *setsCluster) pods(app string) []*corev1.Pod {
	s.t.Helper()
	pods, err := s.informers.Core().V1().Pods().Lister().List(labels.SelectorFromSet(labels.Set{"app": app}))
	s.must(err)
	return pods
}

// gone reports whether there is no Deployment of that name.
func (s *setsCluster) gone(deployment string) bool {
	_, err := s.informers.Apps().V1().Deployments().Lister().Deployments(setsNamespace).Get(deployment)
	return apierrors.IsNotFound(err)
}

// wantPods waits until all Pods with a label app are ready, none is on its way out, and
// show returns what is wanted of them.
func (s *setsCluster) wantPods(app string, show func(*corev1.Pod) string, want ...string) {
	s.t.Helper()
	s.until(fmt.Sprintf("Pods of %s: %q", app, want), func() error {
		var got []string
		for _, p := range s.pods(app) {
			ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			})
			if !ready || p.DeletionTimestamp != nil {
				return fmt.Errorf("Pod %s is not ready or deleted: %+v", p.Name, p.Status)
			}
			got = append(got, show(p))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
}

// Of a Pod: the variable VERSION of its container, its node.
func versionOf(p *corev1.Pod) string {
	for _, e := range p.Spec.Containers[0].Env {
		return e.Name + "=" + e.Value
	}
	return ""
}

func nodeOf(p *corev1.Pod) string { return p.Spec.NodeName }

// What people do with sets, with real Pods on two nodes.
func TestSets(t *testing.T) {
	t.Parallel()
	s := newSetsCluster(t)
	s.kubectl("create", "deployment", "web", "--image=host", "--replicas=3", "--", "sleep", "600")
	s.wantPods("web", versionOf, "", "", "")
	testHealing(s)
	testRollout(s)
	testDaemonSet(s)
	testDrain(s)
	testRunSets(s)
	s.rollPods(6, []*testbed.Host{s.node, s.other}, s.network.Outside("outside"), true)
	testLostMachine(s)
	s.must(s.client.AppsV1().Deployments(setsNamespace).Delete(t.Context(), "web",
		metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)}))
	s.until("the end of the Deployment and all that it had", func() error {
		sets, err := s.informers.Apps().V1().ReplicaSets().Lister().List(labels.Everything())
		if n := len(s.pods("web")); n+len(sets) > 0 || err != nil || !s.gone("web") {
			return fmt.Errorf("%d Pods, %d ReplicaSets, %w", n, len(sets), err)
		}
		return nil
	})
}

// A Pod that is deleted, and one that is taken out of the set by its label, are replaced.
func testHealing(s *setsCluster) {
	s.t.Helper()
	pods, api := s.pods("web"), s.client.CoreV1().Pods(setsNamespace)
	remove := metav1.DeleteOptions{GracePeriodSeconds: new(int64(1))}
	s.must(api.Delete(s.t.Context(), pods[0].Name, remove))
	_, err := api.Patch(s.t.Context(), pods[1].Name, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"app":"free"}}}`), metav1.PatchOptions{})
	s.must(err)
	s.until("two Pods in the place of two", func() error {
		now := s.pods("web")
		if len(now) != 3 || slices.ContainsFunc(now, func(p *corev1.Pod) bool { return p.UID == pods[0].UID || p.UID == pods[1].UID }) {
			return fmt.Errorf("%d Pods", len(now))
		}
		return nil
	})
	s.wantPods("web", versionOf, "", "", "")
	s.wantPods("free", func(p *corev1.Pod) string { return fmt.Sprint(len(p.OwnerReferences), " owners") }, "0 owners")
	s.must(api.Delete(s.t.Context(), pods[1].Name, remove))
}

// Revisions and sizes, by kubectl.
func testRollout(s *setsCluster) {
	s.t.Helper()
	api := s.client.AppsV1().Deployments(setsNamespace)
	s.kubectl("set", "env", "deployment/web", "VERSION=2")
	if out := s.kubectl("rollout", "status", "deployment/web", "--timeout=60s"); !strings.Contains(out, "successfully rolled out") {
		s.t.Errorf("kubectl rollout status prints\n%s", out)
	}
	s.wantPods("web", versionOf, "VERSION=2", "VERSION=2", "VERSION=2")
	_, err := api.Patch(s.t.Context(), "web", types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"kubernetes.io/change-cause":"two"}}}`), metav1.PatchOptions{})
	s.must(err)
	s.until("the cause of revision 2", func() error {
		sets, err := s.informers.Apps().V1().ReplicaSets().Lister().List(labels.Everything())
		for _, r := range sets {
			if a := r.Annotations; a["deployment.kubernetes.io/revision"] == "2" && a["kubernetes.io/change-cause"] == "two" {
				return nil
			}
		}
		return fmt.Errorf("not among %d ReplicaSets, %w", len(sets), err)
	})
	s.kubectl("rollout", "undo", "deployment/web")
	s.wantPods("web", versionOf, "", "", "")
	s.kubectl("scale", "deployment/web", "--replicas=1", "--current-replicas=3")
	s.wantPods("web", versionOf, "")
	_, err = api.Patch(s.t.Context(), "web", types.MergePatchType, []byte(`{"spec":{"replicas":4}}`), metav1.PatchOptions{})
	s.must(err)
	s.wantPods("web", versionOf, "", "", "", "")
}

// One Pod on each node, and updates node by node.
func testDaemonSet(s *setsCluster) {
	s.t.Helper()
	app := map[string]string{"app": "agent"}
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: app},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(1)),
			Containers: []corev1.Container{{
				Name: "agent", Image: "host", Command: []string{"sleep", "600"}, Env: []corev1.EnvVar{{Name: "VERSION", Value: "1"}},
			}},
		},
	}
	d, err := s.client.AppsV1().DaemonSets(setsNamespace).Create(s.t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "agent"},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: app}, Template: template},
	}, metav1.CreateOptions{})
	s.must(err)
	show := func(p *corev1.Pod) string { return nodeOf(p) + " " + versionOf(p) }
	s.wantPods("agent", show, "node VERSION=1", "other VERSION=1")
	_, err = s.client.AppsV1().DaemonSets(setsNamespace).Patch(s.t.Context(), d.Name, types.StrategicMergePatchType,
		[]byte(`{"spec":{"template":{"spec":{"containers":[{"name":"agent","env":[{"name":"VERSION","value":"2"}]}]}}}}`), metav1.PatchOptions{})
	s.must(err)
	s.wantPods("agent", show, "node VERSION=2", "other VERSION=2")
}

// A node is drained one Pod at a time as the budget asks for, and each is replaced before
// the next one goes.
func testDrain(s *setsCluster) {
	s.t.Helper()
	api, least := s.client.PolicyV1().PodDisruptionBudgets(setsNamespace), intstr.FromInt32(4)
	_, err := api.Create(s.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &least, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		},
	}, metav1.CreateOptions{})
	s.must(err)
	allows := func(generation int64, n int32) {
		s.t.Helper()
		s.until(fmt.Sprintf("%d disruptions allowed", n), func() error {
			b, err := s.informers.Policy().V1().PodDisruptionBudgets().Lister().PodDisruptionBudgets(setsNamespace).Get("web")
			if err == nil && (b.Status.ObservedGeneration < generation || b.Status.CurrentHealthy != 4 || b.Status.DisruptionsAllowed != n) {
				err = fmt.Errorf("%+v", b.Status)
			}
			return err
		})
	}
	allows(1, 0)
	evict := func(p *corev1.Pod) error {
		e := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}}
		return s.client.PolicyV1().Evictions(p.Namespace).Evict(s.t.Context(), e)
	}
	if err := evict(s.pods("web")[0]); !apierrors.IsTooManyRequests(err) {
		s.t.Errorf("evicted against the budget: %v", err)
	}
	b, err := api.Patch(s.t.Context(), "web", types.MergePatchType, []byte(`{"spec":{"minAvailable":3}}`), metav1.PatchOptions{})
	s.must(err)
	allows(b.Generation, 1)
	s.fewest.Store(math.MaxInt32)
	cordon := func(yes bool) {
		s.t.Helper()
		patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, yes)
		_, err := s.client.CoreV1().Nodes().Patch(s.t.Context(), "other", types.MergePatchType, patch, metav1.PatchOptions{})
		s.must(err)
	}
	cordon(true)
	onOther := slices.DeleteFunc(s.pods("web"), func(p *corev1.Pod) bool { return nodeOf(p) != "other" })
	// All but one go here, for kubectl drain waits five seconds when an eviction is rejected.
	for _, p := range onOther[min(1, len(onOther)):] {
		s.until("the eviction of "+p.Name, func() error { return evict(p) })
	}
	s.until("room for one more eviction", func() error {
		if n := len(onOther); n > 1 && slices.ContainsFunc(s.pods("web"), func(p *corev1.Pod) bool { return p.UID == onOther[n-1].UID }) {
			return errors.New("the last Pod that was evicted has not ended")
		}
		return nil
	})
	allows(b.Generation, 1)
	if out := s.kubectl("drain", "other", "--ignore-daemonsets", "--timeout=90s"); !strings.Contains(out, "node/other drained") {
		s.t.Errorf("kubectl drain prints\n%s", out)
	}
	s.wantPods("web", nodeOf, "node", "node", "node", "node")
	s.wantPods("agent", nodeOf, "node", "other")
	if n := s.fewest.Load(); n < 3 {
		s.t.Errorf("only %d Pods were available", n)
	}
	cordon(false)
}
