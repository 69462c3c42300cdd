package programmed

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Pods do not wait for a node that is dead, or behind for long; one that moves is not behind.
func TestFloors(t *testing.T) {
	now := time.Now()
	c := &programmed{published: barrier.Versions{10, 10, 10, 10}, wake: loop.NewSignal(), nodes: map[string]*nodeReport{}}
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

// A node that is behind is named once, until it has caught up.
func TestLate(t *testing.T) {
	now := time.Now()
	c := &programmed{published: barrier.Versions{10, 10, 10, 10}, wake: loop.NewSignal(), nodes: map[string]*nodeReport{}}
	for name, v := range map[string]uint64{"slow": 9, "slower": 8, "prompt": 10} {
		c.nodes[name] = &nodeReport{versions: barrier.Versions{v, v, v, v}, reports: true, seen: now, lasts: time.Hour}
		c.nodes[name].highest = c.nodes[name].versions
	}
	at := func(d time.Duration, want ...string) {
		t.Helper()
		c.floors(now.Add(d))
		if got := c.late(now.Add(d)); !slices.Equal(got, want) {
			t.Errorf("after %s %v are late, want %v", d, got, want)
		}
	}
	at(0)
	at(lateAfter / 2)
	at(lateAfter, "slow", "slower")
	at(2 * lateAfter)
	c.report("slow", func(n *nodeReport) { n.versions = c.published })
	at(3 * lateAfter)
	c.published = barrier.Versions{11, 11, 11, 11}
	at(4 * lateAfter)
	at(5*lateAfter, "prompt", "slow")
}

// A Service that is among the rejected ones a node does not name is not Programmed, and is not
// judged again and again.
func TestMoreAreRejected(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web", ResourceVersion: "5", Annotations: map[string]string{barrier.AskAnnotation: "true"},
	}}
	client := fake.NewClientset(service)
	c := &programmed{
		Kit: &kit.Kit{Client: client}, wake: loop.NewSignal(), nodes: map[string]*nodeReport{},
		store:    cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{bySliceOwner: func(any) ([]string, error) { return nil, nil }}),
		services: map[svc.Name]*ask{}, pending: map[svc.Name]*ask{}, deleted: map[svc.Name]uint64{},
	}
	name := svc.NameOf(service)
	c.asks = loop.New(slog.New(slog.DiscardHandler), "programmed", 1, c.syncService)
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
