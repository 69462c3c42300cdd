package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/loop"
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
	l, err := r.client.CoordinationV1().Leases(barrier.Namespace).Get(context.Background(), barrier.Name, metav1.GetOptions{})
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
		k := condition(s)
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
	r.programmedIs(ns, "web", metav1.ConditionFalse, reasonPending, "0 of 2 nodes have programmed it; waiting for a, b")
	want := start
	follow := func(rejected string, status metav1.ConditionStatus, reason string) {
		t.Helper()
		r.eventually("the nodes to follow until "+reason, func() error {
			want = r.awaited().Max(start)
			r.reaches("a", want, "")
			r.reaches("b", want, rejected)
			s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
			if k := condition(s); err == nil && (k.Status != status || k.Reason != reason || k.ObservedGeneration != s.Generation) {
				err = errors.New(k.Message)
			}
			return err
		})
	}
	follow(ns+"/web", metav1.ConditionFalse, reasonRejected)
	r.programmedIs(ns, "web", metav1.ConditionFalse, reasonRejected, "a port of the Service cannot be programmed on b")
	follow("", metav1.ConditionTrue, reasonProgrammed)

	// A Pod in its endpoints: it is pending until the nodes have that.
	r.pod(ns, "web-1", "web", "a", "10.1.0.1")
	r.programmedIs(ns, "web", metav1.ConditionFalse, reasonPending, "")
	follow("", metav1.ConditionTrue, reasonProgrammed)

	firstOnly := func(drained func() error) { // only node a has programmed what is awaited
		t.Helper()
		r.eventually("node a to be first", func() error {
			r.reaches("a", r.awaited().Max(start), "")
			r.renew("b")
			s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
			if k := condition(s); err == nil && k.Message != "1 of 2 nodes have programmed it; waiting for b" {
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
	follow("", metav1.ConditionTrue, reasonProgrammed)
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
		if err == nil && (!hasDrained(p) || asked(p) != "" || p.Status.Conditions[1].Message != "invocation 1") {
			err = fmt.Errorf("%+v", p.Status.Conditions)
		}
		return err
	}
	firstOnly(answer)
	follow("", metav1.ConditionTrue, reasonProgrammed)
	r.eventually("the answer", answer)

	// Another spec is another generation.
	patch := []byte(`{"spec":{"ports":[{"port":80,"$patch":"delete"},{"port":81}]}}`)
	_, err = r.client.CoreV1().Services(ns).Patch(ctx, "web", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
	follow("", metav1.ConditionTrue, reasonProgrammed)
	if s := r.programmedIs(ns, "web", metav1.ConditionTrue, reasonProgrammed, ""); s.Generation != 2 {
		t.Errorf("generation %d of a Service that was changed once", s.Generation)
	}
	// Who asks no more has no condition.
	patch = []byte(`{"metadata":{"annotations":{"` + barrier.AskAnnotation + `":null}}}`)
	_, err = r.client.CoreV1().Services(ns).Patch(ctx, "web", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
	r.eventually("the end of the condition", func() error {
		s, err := r.client.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
		if err == nil && condition(s) != nil {
			err = errors.New("it is there")
		}
		return err
	})
}

// Pods do not wait for a node that is dead, or behind for long; one that moves is not behind.
func TestFloors(t *testing.T) {
	now := time.Now()
	c := &programmed{published: barrier.Versions{10, 10, 10, 10}, wake: make(chan struct{}, 1), nodes: map[string]*nodeReport{}}
	put := func(name string, v uint64, seen time.Duration) {
		c.nodes[name] = &nodeReport{versions: barrier.Versions{v, v, v, v}, reports: true, seen: now.Add(-seen), lasts: time.Minute}
		c.nodes[name].highest = c.nodes[name].versions
	}
	put("there", 12, 0)
	put("slow", 9, 0)
	put("dead", 1, time.Hour)
	at := func(d time.Duration, wantAll, wantPrompt uint64) {
		t.Helper()
		all, prompt, ok := c.floors(now.Add(d))
		if !ok || all[0] != wantAll || prompt[0] != wantPrompt {
			t.Errorf("after %s: %v and %v, want %d and %d", d, all, prompt, wantAll, wantPrompt)
		}
	}
	at(0, 9, 9)
	at(laggardAfter-time.Second, 9, 9)
	at(laggardAfter, 9, 12)
	c.report("slow", func(n *nodeReport) { n.versions[0]++ })
	at(laggardAfter, 10, 10)
	at(3*laggardAfter, 10, 12)
	// One that takes back what it reported, and reports that again, does not move.
	for range 3 {
		c.report("slow", func(n *nodeReport) { n.versions[0]-- })
		c.report("slow", func(n *nodeReport) { n.versions[0]++ })
	}
	at(3*laggardAfter, 10, 12)
	c.report("slow", func(n *nodeReport) { n.versions = c.nodes["there"].versions })
	at(3*laggardAfter, 12, 12)
	put("there", 0, 0)
	put("slow", 0, 0)
	if _, _, ok := c.floors(now); ok {
		t.Error("nodes that have programmed nothing yet count")
	}
}

// A Service that is among the rejected ones a node does not name is not Programmed, and is not
// judged again and again.
func TestMoreAreRejected(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web", ResourceVersion: "5", Annotations: map[string]string{barrier.AskAnnotation: "true"},
	}}
	client := fake.NewClientset(service)
	c := &programmed{
		controllerContext: &controllerContext{client: client}, wake: make(chan struct{}, 1), nodes: map[string]*nodeReport{},
		store:    cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{bySliceOwner: func(any) ([]string, error) { return nil, nil }}),
		services: map[svc.Name]*ask{}, pending: map[svc.Name]*ask{}, deleted: map[svc.Name]uint64{},
	}
	name := nameOf(service)
	c.asks = loop.New(slog.New(slog.DiscardHandler), ProgrammedName, 1, c.syncService)
	c.services[name] = &ask{service: service, since: 5}
	var many []string
	for i := range barrier.MaxRejected {
		many = append(many, fmt.Sprintf("shop/a%d", i))
	}
	for _, k := range []struct {
		rejected string
		status   metav1.ConditionStatus
		reason   string
	}{
		{strings.Join(many, ",") + "," + barrier.MoreRejected, metav1.ConditionUnknown, reasonUnknown},
		{strings.Join(many[1:], ",") + ",shop/web," + barrier.MoreRejected, metav1.ConditionFalse, reasonRejected},
		{strings.Join(many, ","), metav1.ConditionTrue, reasonProgrammed},
	} {
		c.heartbeat(&coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{
				barrier.ProgrammedAnnotation: barrier.Versions{9, 9, 9, 9}.String(), barrier.RejectedAnnotation: k.rejected,
			}},
			// What a node claims of its Lease is not believed beyond what an agent's lasts.
			Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: new(int32(1 << 30))},
		})
		if lasts := c.nodes["a"].lasts; lasts != defaultLease {
			t.Errorf("the Lease lasts %s", lasts)
		}
		select {
		case <-c.wake:
		default:
			t.Errorf("%s: what waits is not looked at again", k.reason)
		}
		if err := c.syncService(context.Background(), name); err != nil {
			t.Fatal(err)
		}
		s, err := client.CoreV1().Services("shop").Get(context.Background(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if now := condition(s); now == nil || now.Status != k.status || now.Reason != k.reason {
			t.Errorf("the condition is %+v, want %s", now, k.reason)
		}
		if len(c.wake) > 0 || len(c.pending) > 0 {
			t.Errorf("%s: it waits for nodes that have programmed all", k.reason)
		}
	}
}
