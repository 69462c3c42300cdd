package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/fairlead/fairlead/internal/peers"
	"github.com/fairlead/fairlead/internal/svc"
)

// watched makes a ready Node whose agent takes part in the watch.
func (r *rig) watched(names ...string) {
	r.Helper()
	for _, name := range names {
		r.node(name, func(n *corev1.Node) { n.Annotations = map[string]string{svc.PeerWatchAnnotation: "true"} })
	}
}

// reports sets what a node's Lease reports.
func (r *rig) reports(by string, names ...string) {
	r.Helper()
	api := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	r.must(retry.OnError(retry.DefaultBackoff, func(error) bool { return true }, func() error {
		l, err := api.Get(context.Background(), by, metav1.GetOptions{})
		if err != nil {
			return err
		}
		metav1.SetMetaDataAnnotation(&l.ObjectMeta, svc.UnreachableAnnotation, strings.Join(names, ","))
		_, err = api.Update(context.Background(), l, metav1.UpdateOptions{})
		return err
	}))
}

// state is the Node's condition Ready with its reason, and whether it is suspected.
func (r *rig) state(node string) string {
	r.Helper()
	n, err := r.client.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
	r.must(err)
	_, suspected := n.Annotations[svc.SuspectedAnnotation]
	return fmt.Sprintf("%s %s %t", n.Status.Conditions[0].Status, n.Status.Conditions[0].Reason, suspected)
}

func (r *rig) wantState(node, want string) {
	r.Helper()
	r.eventually("node "+node, func() error {
		if got := r.state(node); got != want {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

const ready, unreachable = "True  false", "Unknown NodeUnreachable true"

// A Node that most of its watchers report is asked to renew its Lease: one that does stays as it is, one that does not is
// unreachable long before its grace period is over, and its endpoints leave; it returns by a renewal. What a
// single node reports, as one whose certificate was stolen, and what one reports that does not watch it, has no effect.
func TestReportedNodes(t *testing.T) {
	r := newRig(t)
	ns := r.namespace("shop")
	all := []string{"n0", "n1", "n2", "n3", "n4"}
	ring := peers.NewRing(all)
	r.watched(all...)
	r.service(ns, "web")
	stops := map[string]func(){}
	for i, name := range all {
		r.pod(ns, "p-"+name, "web", name, fmt.Sprintf("10.244.%d.1", i))
		stops[name] = r.beats(name)
	}
	r.run(Options{Controllers: []string{NodeLifecycleName, EndpointSliceName}, NodeGracePeriod: 10 * time.Minute, PeerWatch: true,
		refuteWithin: 10 * time.Second})
	const dead, alive = "n2", "n4"
	watchers := ring.WatchersOf(dead)
	thief := watchers[0]
	report := map[string][]string{thief: {dead, "n0"}} // of the last one alone
	for _, by := range slices.DeleteFunc(ring.WatchersOf(alive), func(by string) bool { return by == dead })[:2] {
		report[by] = append(report[by], alive)
	}
	for by, names := range report {
		r.reports(by, names...)
	}
	r.wantState(alive, "True  true")
	stops[dead]()
	second := watchers[1]
	r.reports(second, append(report[second], dead)...)
	begin := time.Now()
	r.wantState(dead, unreachable)
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true", "10.244.1.1:9376 true", "10.244.2.1:9376 false", "10.244.3.1:9376 true",
		"10.244.4.1:9376 true")
	t.Logf("after its watchers have reported it a dead node's endpoints are out of service in %s", time.Since(begin))
	r.wantEvent("default", dead, "NodeNotReady")
	n, err := r.client.CoreV1().Nodes().Get(context.Background(), dead, metav1.GetOptions{})
	r.must(err)
	if m := n.Status.Conditions[0].Message; !strings.Contains(m, thief) || !strings.Contains(m, second) || !strings.Contains(m, "2 of the 3") {
		t.Errorf("the message is %q", m)
	}
	for name, want := range map[string]string{"n0": ready, "n1": ready, "n3": ready, alive: "True  true"} {
		if got := r.state(name); got != want {
			t.Errorf("node %s: %q, want %q", name, got, want)
		}
	}

	// It comes back, and is reported no more.
	r.renew(dead)
	r.eventually("the taint goes", func() error {
		n, err := r.client.CoreV1().Nodes().Get(context.Background(), dead, metav1.GetOptions{})
		if err == nil && len(n.Spec.Taints) > 0 {
			err = errors.New("tainted")
		}
		return err
	})
	r.wantState(dead, "Unknown NodeUnreachable false") // its agent writes the rest

	for _, by := range append(slices.Collect(maps.Keys(report)), second) {
		r.reports(by)
	}
	r.wantState(alive, ready)
}

// If more than half of the nodes are reported none is unreachable before the grace period, nor without PeerWatch.
func TestReportsOfMost(t *testing.T) {
	r := newRig(t)
	all := []string{"n0", "n1", "n2", "n3"}
	r.watched(all...)
	for _, name := range all {
		r.renew(name)
	}
	for i, name := range all {
		r.reports(name, all[(i+1)%4], all[(i+2)%4], all[(i+3)%4])
	}
	for _, o := range []Options{{PeerWatch: true}, {}} {
		o.Controllers, o.NodeGracePeriod = []string{NodeLifecycleName}, 10*time.Minute
		stop := r.run(o)
		// A Node that is judged in the ordinary way shows that this works.
		r.node("other-"+fmt.Sprint(o.PeerWatch), func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoSchedule}}
		})
		r.eventually("the taint goes", func() error {
			n, err := r.client.CoreV1().Nodes().Get(context.Background(), "other-"+fmt.Sprint(o.PeerWatch), metav1.GetOptions{})
			if err == nil && len(n.Spec.Taints) > 0 {
				err = errors.New("tainted")
			}
			return err
		})
		for _, name := range all {
			if got := r.state(name); got != ready {
				t.Errorf("PeerWatch %t: node %s: %q", o.PeerWatch, name, got)
			}
		}
		stop()
	}
}
