package controller

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fairlead/fairlead/internal/controller/kittest"
	"github.com/fairlead/fairlead/internal/svc"
)

// Pods without a Node go to the ready Nodes that have the fewest; the selector
// counts; what fits nowhere says so and is tried again when Nodes change.
func TestScheduler(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	r.node("n0")
	r.node("n1", func(n *corev1.Node) { n.Labels["disk"] = "fast" })
	r.node("n2", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse })
	r.node("n3", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	r.pod(ns, "there", "x", "n0", "10.244.0.1")
	r.run(Options{Controllers: []string{SchedulerName}})
	make := func(name string, selector map[string]string) {
		p := kittest.Pod(ns, name, "web", "")
		p.Spec.NodeSelector = selector
		_, err := r.client.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
		r.must(err)
	}
	for i := range 9 {
		make(fmt.Sprintf("p%d", i), nil)
	}
	make("fast", map[string]string{"disk": "fast"})
	make("nowhere", map[string]string{"disk": "none"})
	r.eventually("pods are bound", func() error {
		list, err := r.client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		count := map[string]int{}
		for _, p := range list.Items {
			count[p.Spec.NodeName]++
			if p.Name == "fast" && p.Spec.NodeName != "n1" {
				return fmt.Errorf("fast is on %q", p.Spec.NodeName)
			}
		}
		if count["n0"]+count["n1"] != 11 || count["n0"] < 5 || count["n1"] < 5 || count[""] != 1 {
			return fmt.Errorf("pods by node: %v", count)
		}
		return nil
	})
	r.eventually("the reason is told", func() error {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "nowhere", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable &&
				strings.Contains(c.Message, "0/4 nodes are available") && strings.Contains(c.Message, "selector") {
				return nil
			}
		}
		return fmt.Errorf("conditions %v", p.Status.Conditions)
	})
	r.wantEvent(ns, "nowhere", "FailedScheduling")
	r.node("n4", func(n *corev1.Node) { n.Labels["disk"] = "none" })
	r.eventually("it goes to the new node", func() error {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "nowhere", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Spec.NodeName != "n4" {
			return fmt.Errorf("on %q", p.Spec.NodeName)
		}
		return nil
	})
}

func (r *rig) wantEvent(namespace, object, reason string) {
	r.Helper()
	r.eventually("event "+reason, func() error {
		list, err := r.client.CoreV1().Events(namespace).List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Name == object && e.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("%d events, not this one", len(list.Items))
	})
}

func (r *rig) renew(node string) {
	r.Helper()
	ctx, api := context.Background(), r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := metav1.NewMicroTime(time.Now())
	l, err := api.Get(ctx, node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = api.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &node, RenewTime: &now}}, metav1.CreateOptions{})
		r.must(err)
		return
	}
	r.must(err)
	l.Spec.RenewTime = &now
	_, err = api.Update(ctx, l, metav1.UpdateOptions{})
	r.must(err)
}

// beats renews a Node's Lease until stop, or the end of the test.
func (r *rig) beats(node string) (stop func()) {
	r.Helper()
	r.renew(node)
	api := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		wait.UntilWithContext(ctx, func(ctx context.Context) {
			l, err := api.Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return // the test ends
			}
			now := metav1.NewMicroTime(time.Now())
			l.Spec.RenewTime = &now
			_, _ = api.Update(ctx, l, metav1.UpdateOptions{}) // the next beat tries again
		}, 200*time.Millisecond)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	r.Cleanup(stop)
	return stop
}

// A Node that stops renewing its Lease becomes unreachable, its Pods leave the
// endpoints and so do the endpoints that stand for it; one that renews goes on.
// When it renews again the taint goes.
func TestNodeLifecycle(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	dead := strings.Repeat("dead.", 15) + "dead" // longer than the value of a label
	r.node(dead, func(n *corev1.Node) { n.Labels = nil })
	r.node("alive")
	r.service(ns, "web")
	r.pod(ns, "a", "web", dead, "10.244.0.1")
	r.pod(ns, "b", "web", "alive", "10.244.1.1")
	die := r.beats(dead)
	r.beats("alive")
	yes := true
	_, err := r.client.DiscoveryV1().EndpointSlices(ns).Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "dns-dead", Labels: map[string]string{svc.NodeLabel: svc.NodeLabelValue(dead)}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.1.1"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}},
	}, metav1.CreateOptions{})
	r.must(err)
	r.run(Options{Controllers: []string{NodeLifecycleName, EndpointSliceName}, NodeGracePeriod: 3 * time.Second})
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true", "10.244.1.1:9376 true")
	check := func(node string, status corev1.ConditionStatus, taints int) error {
		n, err := r.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		r.must(err)
		if n.Status.Conditions[0].Status != status || len(n.Spec.Taints) != taints {
			return fmt.Errorf("%s: ready %s, taints %v", node, n.Status.Conditions[0].Status, n.Spec.Taints)
		}
		return nil
	}
	die()
	r.eventually("dead is unreachable", func() error {
		if err := check("alive", corev1.ConditionTrue, 0); err != nil {
			t.Fatal(err)
		}
		return check(dead, corev1.ConditionUnknown, 2)
	})
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 false", "10.244.1.1:9376 true")
	r.eventually("its own endpoints are not ready", func() error {
		s, err := r.client.DiscoveryV1().EndpointSlices(ns).Get(ctx, "dns-dead", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if *s.Endpoints[0].Conditions.Ready {
			return fmt.Errorf("ready")
		}
		return nil
	})
	r.eventually("the taint goes", func() error {
		r.renew(dead)
		return check(dead, corev1.ConditionUnknown, 0)
	})
	r.checkNotReady(ns, check)
}

// checkNotReady has the Node "alive" report itself as not Ready: not for a moment, but after the hold, its Pods leave the
// endpoints and it has the taint for that, until it is Ready again.
func (r *rig) checkNotReady(ns string, check func(node string, status corev1.ConditionStatus, taints int) error) {
	r.Helper()
	says := func(status corev1.ConditionStatus) {
		r.Helper()
		patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"message":"no device"}]}}`, status)
		_, err := r.client.CoreV1().Nodes().Patch(context.Background(), "alive", types.StrategicMergePatchType, []byte(patch),
			metav1.PatchOptions{}, "status")
		r.must(err)
	}
	says(corev1.ConditionFalse)
	says(corev1.ConditionTrue)
	begin := time.Now()
	says(corev1.ConditionFalse)
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 false", "10.244.1.1:9376 false")
	if took := time.Since(begin); took < svc.NotReadyHold {
		r.Errorf("the endpoints of a node that is not ready went after %s, before the hold of %s", took, svc.NotReadyHold)
	} else {
		r.Logf("the endpoints of a node that is not ready are out of service after %s", took)
	}
	r.wantEvent("default", "alive", svc.ReasonNodeNotReady)
	r.eventually("the taint", func() error {
		n, err := r.client.CoreV1().Nodes().Get(context.Background(), "alive", metav1.GetOptions{})
		if err == nil && (len(n.Spec.Taints) != 2 || n.Spec.Taints[0].Key != corev1.TaintNodeNotReady || n.Spec.Taints[0].TimeAdded == nil) {
			err = fmt.Errorf("taints %v", n.Spec.Taints)
		}
		return err
	})
	p, err := r.client.CoreV1().Pods(ns).Get(context.Background(), "b", metav1.GetOptions{})
	r.must(err)
	if !slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Reason == svc.ReasonNodeNotReady && strings.Contains(c.Message, "no device")
	}) {
		r.Errorf("the Pod's conditions are %v", p.Status.Conditions)
	}
	// An agent that knows better is not corrected again and again.
	r.flip(ns, "b", true)
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 false", "10.244.1.1:9376 true")
	says(corev1.ConditionTrue)
	r.eventually("the taint goes", func() error { return check("alive", corev1.ConditionTrue, 0) })
}

// A Node that the leader before has marked stays so under a new one until it
// renews, though every Node has the whole grace period under that.
func TestNewLeaderKeepsTaints(t *testing.T) {
	r, ctx := newRig(t), context.Background()
	r.node("dead")
	r.node("other")
	r.renew("dead")
	die := r.beats("other")
	o := Options{Controllers: []string{NodeLifecycleName}, NodeGracePeriod: 2 * time.Second}
	tainted := func(node string, want bool) func() error {
		return func() error {
			n, err := r.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if len(n.Spec.Taints) == 2 != want {
				return fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return nil
		}
	}
	stop := r.run(o)
	r.eventually("dead is unreachable", tainted("dead", true))
	stop()
	list, err := r.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	r.must(err)
	w, err := r.client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	r.must(err)
	defer w.Stop()
	r.run(o)
	die()
	// The new leader marks the other one at the end of its own grace period.
	for deadline := time.After(time.Minute); ; {
		select {
		case e := <-w.ResultChan():
			n, ok := e.Object.(*corev1.Node)
			if !ok {
				t.Fatalf("the watch ended: %v", e)
			}
			if n.Name == "dead" && len(n.Spec.Taints) != 2 {
				t.Fatalf("the new leader took the taints of a dead node, which has %v", n.Spec.Taints)
			}
			if n.Name == "dead" || len(n.Spec.Taints) != 2 {
				continue
			}
		case <-deadline:
			t.Fatal("the new leader has not marked the other node within a minute")
		}
		break
	}
	r.eventually("the taints go", func() error {
		r.renew("dead")
		return tainted("dead", false)()
	})
}

// Pods of a Node that is gone are removed after a while, those of others not.
func TestPodGC(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	r.node("n0")
	r.node("gone")
	r.pod(ns, "a", "web", "gone", "10.244.0.1")
	r.pod(ns, "b", "web", "n0", "10.244.1.1")
	const delay = time.Second
	r.run(Options{Controllers: []string{NodeLifecycleName}, PodGCDelay: delay})
	r.must(r.client.CoreV1().Nodes().Delete(ctx, "gone", metav1.DeleteOptions{}))
	r.eventually("the pod of the gone node", func() error {
		if _, err := r.client.CoreV1().Pods(ns).Get(ctx, "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
	if _, err := r.client.CoreV1().Pods(ns).Get(ctx, "b", metav1.GetOptions{}); err != nil {
		t.Errorf("the other pod: %v", err)
	}
	// A Node of that name that comes and goes again gets the whole delay again.
	r.node("gone")
	r.pod(ns, "c", "web", "gone", "10.244.0.2")
	went := time.Now()
	r.must(r.client.CoreV1().Nodes().Delete(ctx, "gone", metav1.DeleteOptions{}))
	r.eventually("the second pod of the gone node", func() error {
		if _, err := r.client.CoreV1().Pods(ns).Get(ctx, "c", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
	// The delay begins when the controller has seen the Pod without its Node, which
	// may be a little before the Node it has yet to see is gone.
	if took := time.Since(went); took < delay/2 {
		t.Errorf("the second pod went %s after its node, want about %s", took, delay)
	}
}

// Pods that have ended, well or not, are kept up to the limit: the oldest go
// first, and those that run do not count.
func TestFinishedPodsAreTrimmed(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("jobs"), context.Background()
	r.node("n0")
	r.pod(ns, "running", "web", "n0", "10.244.0.1")
	for i, phase := range []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed, corev1.PodSucceeded, corev1.PodFailed,
		corev1.PodSucceeded} {
		made, err := r.client.CoreV1().Pods(ns).Create(ctx, kittest.Pod(ns, fmt.Sprintf("done%d", i), "web", "n0"), metav1.CreateOptions{})
		r.must(err)
		made.Status.Phase = phase
		_, err = r.client.CoreV1().Pods(ns).UpdateStatus(ctx, made, metav1.UpdateOptions{})
		r.must(err)
	}
	config, healthy := r.faulty()
	defer healthy()
	r.run(Options{Config: config, Controllers: []string{NodeLifecycleName}, TerminatedPodLimit: 2})
	r.eventually("the oldest go", func() error {
		list, err := r.client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var names []string
		for i := range list.Items {
			names = append(names, list.Items[i].Name)
		}
		if want := []string{"done3", "done4", "running"}; !slices.Equal(names, want) {
			return fmt.Errorf("%v, want %v", names, want)
		}
		return nil
	})
}

// Every Node gets a part of each range, none twice; what one has it keeps; what
// is given back is used again; too few is told.
func TestNodeIPAM(t *testing.T) {
	r := newRig(t)
	ctx := context.Background()
	r.node("has", func(n *corev1.Node) { n.Spec.PodCIDRs, n.Spec.PodCIDR = []string{"10.9.0.0/24"}, "10.9.0.0/24" })
	r.run(Options{Controllers: []string{NodeIPAMName}, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/22"),
		netip.MustParsePrefix("fd00:9::/56")}})
	for i := range 4 {
		r.node(fmt.Sprintf("n%d", i))
	}
	r.eventually("ranges are given", func() error {
		list, err := r.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen, with := map[string]string{}, 0
		for _, n := range list.Items {
			for _, c := range n.Spec.PodCIDRs {
				if seen[c] != "" {
					t.Fatalf("%s and %s both have %s", n.Name, seen[c], c)
				}
				seen[c] = n.Name
			}
			if len(n.Spec.PodCIDRs) == 2 && n.Spec.PodCIDR == n.Spec.PodCIDRs[0] && strings.HasSuffix(n.Spec.PodCIDRs[1], "/64") {
				with++
			}
		}
		if with != 3 || seen["10.9.0.0/24"] != "has" {
			return fmt.Errorf("%v", seen)
		}
		return nil
	})
	var without string
	list, err := r.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	r.must(err)
	for _, n := range list.Items {
		if len(n.Spec.PodCIDRs) == 0 {
			without = n.Name
		}
	}
	r.wantEvent("default", without, "CIDRNotAvailable")
	r.must(r.client.CoreV1().Nodes().Delete(ctx, "has", metav1.DeleteOptions{}))
	r.eventually("what came back is given", func() error {
		n, err := r.client.CoreV1().Nodes().Get(ctx, without, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if n.Spec.PodCIDR != "10.9.0.0/24" {
			return fmt.Errorf("has %q", n.Spec.PodCIDR)
		}
		return nil
	})
}
