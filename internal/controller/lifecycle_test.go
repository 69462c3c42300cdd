package controller

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/controller/kittest"
)

// A namespace being deleted is emptied and goes; what a finalizer holds keeps
// it, and the conditions say so.
func TestNamespaceIsEmptied(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	r.node("n0")
	r.run(Options{Controllers: []string{NamespaceName, EndpointsName, EndpointSliceName}})
	r.service(ns, "web")
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true")
	held := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "held", Finalizers: []string{"example.com/hold"}}}
	_, err := r.client.CoreV1().ConfigMaps(ns).Create(ctx, held, metav1.CreateOptions{})
	r.must(err)
	r.must(r.client.CoreV1().Namespaces().Delete(ctx, ns, metav1.DeleteOptions{}))
	r.killWhatWaitsForItsAgent(ns)
	r.eventually("conditions tell what holds it", func() error {
		n, err := r.client.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{})
		if err != nil {
			return err
		}
		text := fmt.Sprint(n.Status.Phase)
		for _, c := range n.Status.Conditions {
			if c.Status == corev1.ConditionTrue {
				text += " " + c.Message
			}
		}
		if !strings.HasPrefix(text, "Terminating") || !strings.Contains(text, "configmaps has 1 resource instances") ||
			!strings.Contains(text, "example.com/hold in 1") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	if list := r.slices(ns, "web"); len(list) != 0 {
		t.Errorf("%d slices", len(list))
	}
	held, err = r.client.CoreV1().ConfigMaps(ns).Get(ctx, "held", metav1.GetOptions{})
	r.must(err)
	held.Finalizers = nil
	_, err = r.client.CoreV1().ConfigMaps(ns).Update(ctx, held, metav1.UpdateOptions{})
	r.must(err)
	r.eventually("the namespace goes", func() error {
		if _, err := r.client.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
}

// While a Pod remains in a namespace that is being deleted, nothing else goes: a policy outlives what it guards.
func TestNamespaceDeletesPodsFirst(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	r.node("n0")
	r.run(Options{Controllers: []string{NamespaceName}})
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	guard := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "guard"}}
	_, err := r.client.CoreV1().ConfigMaps(ns).Create(ctx, guard, metav1.CreateOptions{})
	r.must(err)
	r.must(r.client.CoreV1().Namespaces().Delete(ctx, ns, metav1.DeleteOptions{}))
	r.eventually("a condition tells that the Pod remains", func() error {
		n, err := r.client.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NamespaceContentRemaining && strings.Contains(c.Message, "pods has 1 resource instances") {
				return nil
			}
		}
		return fmt.Errorf("%v", n.Status.Conditions)
	})
	guard, err = r.client.CoreV1().ConfigMaps(ns).Get(ctx, "guard", metav1.GetOptions{})
	if err != nil || guard.DeletionTimestamp != nil {
		t.Errorf("the ConfigMap beside a Pod: %v, %v", guard.DeletionTimestamp, err)
	}
	r.killWhatWaitsForItsAgent(ns)
	r.eventually("the namespace goes", func() error {
		if _, err := r.client.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
}

// killWhatWaitsForItsAgent does what the agents of the nodes would do: it
// removes Pods that are being stopped.
func (r *rig) killWhatWaitsForItsAgent(ns string) {
	r.Helper()
	r.eventually("pods are being stopped", func() error {
		list, err := r.client.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, p := range list.Items {
			if p.DeletionTimestamp == nil {
				return fmt.Errorf("%s is not", p.Name)
			}
			r.killPod(ns, p.Name)
		}
		return nil
	})
}

// Two candidates, one works. When it ends the other begins at once; an
// uncontested Lease is taken without delay; a process with the identity it had
// does not wait for its own old Lease.
func TestLeaderElection(t *testing.T) {
	r := newRig(t)
	ns := r.namespace("shop")
	r.node("n0")
	o := Options{Controllers: []string{EndpointSliceName}, LeaderElect: true, Identity: "one"}
	before := time.Now()
	stop := r.run(o)
	if took := time.Since(before); took > 12*time.Second {
		t.Errorf("the first start took %s", took)
	}
	second := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	started := make(chan struct{}, 1)
	go func() {
		second <- Run(ctx, Options{Config: r.config, Controllers: o.Controllers, LeaderElect: true, Identity: "two",
			Started: func() { started <- struct{}{} }})
	}()
	r.service(ns, "web")
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true")
	select {
	case <-started:
		t.Fatal("both work")
	default:
	}
	stop()
	select {
	case <-started:
	case <-time.After(14 * time.Second):
		t.Fatal("the second does not take over before the lease would have run out")
	}
	r.flip(ns, "a", false)
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 false")
	cancel()
	if err := <-second; err != nil {
		t.Error(err)
	}
}

// What an owner leaves behind goes; what others own stays.
func TestGarbage(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("shop"), context.Background()
	node := r.node("n0")
	owner := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n0", UID: node.UID}}
	_, err := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx,
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "n0", OwnerReferences: owner}}, metav1.CreateOptions{})
	r.must(err)
	owner = []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: "x", UID: "1"}}
	p := kittest.Pod(ns, "a", "web", "n0")
	p.OwnerReferences = owner
	_, err = r.client.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
	r.must(err)
	// A Lease that learns later whose it is, as an agent's first one does.
	leases := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	late, err := leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{})
	r.must(err)
	second := r.node("n1")
	r.run(Options{Controllers: []string{GarbageName}})
	late.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n1", UID: second.UID}}
	_, err = leases.Update(ctx, late, metav1.UpdateOptions{})
	r.must(err)
	for _, name := range []string{"n0", "n1"} {
		r.must(r.client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{}))
		r.eventually("the lease goes", func() error {
			if _, err := leases.Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s: %v", name, err)
			}
			return nil
		})
	}
	if p, err := r.client.CoreV1().Pods(ns).Get(ctx, "a", metav1.GetOptions{}); err != nil || p.DeletionTimestamp != nil {
		t.Errorf("the pod of an unknown owner: %v", err)
	}
}

// Invalid options are an error that has the remedy.
func TestInvalidOptions(t *testing.T) {
	config := &rest.Config{Host: "http://127.0.0.1:1"}
	for want, o := range map[string]Options{
		"no configuration for the API server": {},
		`unknown controller "nodes"`:          {Config: config, Controllers: []string{"nodes"}},
		"given more than once":                {Config: config, Controllers: []string{EndpointsName, EndpointsName}},
		"must be 1 to 1000":                   {Config: config, MaxEndpointsPerSlice: 1001},
	} {
		if err := Run(context.Background(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want something with %q", err, want)
		}
	}
}
