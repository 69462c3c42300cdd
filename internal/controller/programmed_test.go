package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/svc"
)

// reaches has a node report that it has programmed versions, but for rejected Services.
func (r *rig) reaches(node string, versions barrier.Versions, rejected string) {
	r.Helper()
	now := metav1.NowMicro()
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]string{
			barrier.ProgrammedAnnotation: versions.String(), barrier.RejectedAnnotation: rejected,
		}},
		"spec": coordinationv1.LeaseSpec{RenewTime: &now, LeaseDurationSeconds: new(int32(600))},
	})
	r.must(err)
	leases := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	if _, err := leases.Get(context.Background(), node, metav1.GetOptions{}); err != nil {
		_, err = leases.Create(context.Background(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
		r.must(err)
	}
	_, err = leases.Patch(context.Background(), node, types.MergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
}

// awaited is what the nodes are told.
func (r *rig) awaited() barrier.Versions {
	r.Helper()
	l, err := r.client.CoordinationV1().Leases(barrier.Namespace).Get(context.Background(), svc.ProgrammedLease, metav1.GetOptions{})
	r.must(err)
	return barrier.ParseWanted(l.Annotations[barrier.WantedAnnotation])
}

func (r *rig) programmedIs(ns, name string, status metav1.ConditionStatus, reason, message string) *corev1.Service {
	r.Helper()
	var s *corev1.Service
	r.eventually("the condition of "+name, func() (err error) {
		if s, err = r.client.CoreV1().Services(ns).Get(context.Background(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		k := meta.FindStatusCondition(s.Status.Conditions, barrier.Programmed)
		if k == nil || k.Status != status || k.Reason != reason || k.ObservedGeneration != s.Generation || message != "" && k.Message != message {
			return fmt.Errorf("generation %d: %+v", s.Generation, k)
		}
		return nil
	})
	return s
}

// A Service that asks for it is Programmed when all nodes have its spec and its endpoints,
// and a Pod that is being deleted Drained when all have taken it out.
func TestProgrammed(t *testing.T) {
	ctx := context.Background()
	r := newRig(t)
	ns := r.namespace("programmed")
	r.run(Options{Controllers: []string{EndpointSliceName, ProgrammedName}})
	start := barrier.Versions{1, 1, 1, 1}
	r.node("a")
	r.node("b")
	r.reaches("a", start, "")
	r.reaches("b", start, "")
	// Nodes that have programmed nothing since they started, or do not report, do not hold anything back.
	r.reaches("starting", barrier.Serving(barrier.ProxySlices), "")
	_, err := r.client.CoreV1().Services(ns).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{barrier.AskAnnotation: "true"}},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	r.must(err)
	r.programmedIs(ns, "web", metav1.ConditionFalse, "Pending", "0 of 2 nodes have programmed it; waiting for a, b")
	want := start
	follow := func(rejected string, status metav1.ConditionStatus, reason string) {
		t.Helper()
		r.eventually("the nodes to follow until "+reason, func() error {
			want = r.awaited().Max(start)
			r.reaches("a", want, "")
			r.reaches("b", want, rejected)
			s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
			if k := meta.FindStatusCondition(s.Status.Conditions, barrier.Programmed); err == nil &&
				(k.Status != status || k.Reason != reason || k.ObservedGeneration != s.Generation) {
				err = errors.New(k.Message)
			}
			return err
		})
	}
	follow(ns+"/web", metav1.ConditionFalse, "Rejected")
	r.programmedIs(ns, "web", metav1.ConditionFalse, "Rejected", "a port of the Service cannot be programmed on b")
	follow("", metav1.ConditionTrue, "Programmed")

	// A Pod in its endpoints: it is pending until the nodes have that.
	r.pod(ns, "web-1", "web", "a", "10.1.0.1")
	r.programmedIs(ns, "web", metav1.ConditionFalse, "Pending", "")
	follow("", metav1.ConditionTrue, "Programmed")

	firstOnly := func(drained func() error) { // only node a has programmed what is awaited
		t.Helper()
		r.eventually("node a to be first", func() error {
			r.reaches("a", r.awaited().Max(start), "")
			r.renew("b")
			s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
			if k := meta.FindStatusCondition(s.Status.Conditions, barrier.Programmed); err == nil &&
				k.Message != "1 of 2 nodes have programmed it; waiting for b" {
				err = errors.New(k.Message)
			}
			return err
		})
		if drained() == nil {
			t.Error("drained, though node b has not programmed it")
		}
	}
	drained := func() error {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "web-1", metav1.GetOptions{})
		if err == nil && !hasDrained(p) {
			err = errors.New("not drained")
		}
		return err
	}
	r.must(r.client.CoreV1().Pods(ns).Delete(ctx, "web-1", metav1.DeleteOptions{GracePeriodSeconds: new(int64(600))}))
	firstOnly(drained)
	follow("", metav1.ConditionTrue, "Programmed")
	r.eventually("the Pod to be drained", drained)

	// The node of a registered program asks about one that is not ready: to be drained it need
	// not be deleted.
	r.pod(ns, "web-2", "web", "a", "10.1.0.2")
	r.eventually("the endpoint web-2", func() error {
		if got := r.endpointsOf(ns, "web"); !slices.Contains(got, "10.1.0.2:80 true") {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	p, err := r.client.CoreV1().Pods(ns).Get(ctx, "web-2", metav1.GetOptions{})
	r.must(err)
	p.Status.Conditions = []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionFalse},
		{Type: barrier.Drained, Status: corev1.ConditionFalse, Message: "invocation 1"},
	}
	_, err = r.client.CoreV1().Pods(ns).UpdateStatus(ctx, p, metav1.UpdateOptions{})
	r.must(err)
	answer := func() error {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "web-2", metav1.GetOptions{})
		if err == nil && (!hasDrained(p) || p.Status.Conditions[1].Message != "invocation 1") {
			err = fmt.Errorf("%+v", p.Status.Conditions)
		}
		return err
	}
	firstOnly(answer)
	follow("", metav1.ConditionTrue, "Programmed")
	r.eventually("the answer", answer)

	// Another spec is another generation.
	patch := []byte(`{"spec":{"ports":[{"port":80,"$patch":"delete"},{"port":81}]}}`)
	_, err = r.client.CoreV1().Services(ns).Patch(ctx, "web", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
	follow("", metav1.ConditionTrue, "Programmed")
	if s := r.programmedIs(ns, "web", metav1.ConditionTrue, "Programmed", ""); s.Generation != 2 {
		t.Errorf("generation %d of a Service that was changed once", s.Generation)
	}
	// Who asks no more has no condition.
	patch = []byte(`{"metadata":{"annotations":{"` + barrier.AskAnnotation + `":null}}}`)
	_, err = r.client.CoreV1().Services(ns).Patch(ctx, "web", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
	r.eventually("the end of the condition", func() error {
		s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
		if err == nil && meta.FindStatusCondition(s.Status.Conditions, barrier.Programmed) != nil {
			err = errors.New("it is there")
		}
		return err
	})

	// The Pods of a kubelet wait where a proxy reports that they do.
	r.node("c")
	r.renew("c")
	_, err = r.client.CoordinationV1().Leases(barrier.Namespace).Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: barrier.OwnLease("c"), Labels: map[string]string{barrier.ReportLabel: "proxy"}, Annotations: map[string]string{
			barrier.ProgrammedAnnotation: barrier.Versions{1 << 60, 1 << 60, 1 << 60, 1 << 60}.String(), barrier.DrainsAnnotation: "true",
		},
	}}, metav1.CreateOptions{})
	r.must(err)
	r.pod(ns, "web-3", "web", "c", "10.1.0.3")
	r.eventually("the endpoint web-3", func() error {
		if got := r.endpointsOf(ns, "web"); !slices.Contains(got, "10.1.0.3:81 true") {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	r.must(r.client.CoreV1().Pods(ns).Delete(ctx, "web-3", metav1.DeleteOptions{GracePeriodSeconds: new(int64(600))}))
	r.eventually("the Pod of a kubelet to be drained", func() error {
		r.reaches("a", r.awaited().Max(start), "")
		r.reaches("b", r.awaited().Max(start), "")
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "web-3", metav1.GetOptions{})
		if err == nil && !hasDrained(p) {
			err = errors.New("not drained")
		}
		return err
	})
}

// hasDrained reports whether a Pod has the condition Drained.
func hasDrained(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(k corev1.PodCondition) bool {
		return k.Type == barrier.Drained && k.Status == corev1.ConditionTrue
	})
}
