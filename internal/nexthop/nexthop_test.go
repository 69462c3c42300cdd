package nexthop

import (
	"context"
	"log/slog"
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func aNode(name string, ranges []string, ips ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: ranges}}
	for _, ip := range ips {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
	}
	return n
}

// A neighbour is the next hop itself; a node behind a router, one without an address, and this node have none.
func TestLook(t *testing.T) {
	n := testbed.NewNetwork(t)
	here, there := n.Host("here"), n.Host("there")
	f := New(nil, "here", slog.New(slog.DiscardHandler), func() {})
	f.sink().Replace([]*corev1.Node{
		aNode("here", nil, here.Addr4().String()),
		aNode("there", nil, "nonsense", there.Addr4().String(), there.Addr6().String(), "192.168.77.99"),
		aNode("far", []string{"10.9.0.0/24", "wrong"}, "192.168.78.20"),
		aNode("loop", nil, "127.0.0.1"),
		aNode("empty", nil),
	})
	here.Do(f.look)
	want := map[string]table.NextHop{"there": {IPv4: there.Addr4(), IPv6: there.Addr6()}, "far": {}}
	if got := f.Get(); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	f.sink().Set(aNode("there", nil, there.Addr6().String()))
	f.sink().Delete(aNode("far", nil))
	f.sink().Delete(aNode("unknown", nil))
	here.Do(f.look)
	want["there"] = table.NextHop{IPv6: there.Addr6()}
	delete(want, "far")
	if got := f.Get(); !maps.Equal(got, want) {
		t.Errorf("after changes: %v, want %v", got, want)
	}
}

// Nothing is asked of the API before the first Get; then the Nodes are listed.
func TestRunBeginsWithGet(t *testing.T) {
	client := fake.NewSimpleClientset(aNode("other", nil, "127.0.0.1"))
	changed := loop.NewSignal()
	f := New(client, "here", slog.New(slog.DiscardHandler), changed.Set)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Run(ctx) }()
	if f.mu.Lock(); f.listed {
		t.Error("Nodes were listed before Get")
	}
	f.mu.Unlock()
	if got := f.Get(); got != nil {
		t.Errorf("before the Nodes are known: %v", got)
	}
	select {
	case <-changed:
	case <-time.After(testbed.Patience):
		t.Fatal("the Nodes were not followed")
	}
	if got := f.Get(); got == nil || len(got) != 0 {
		t.Errorf("%v, want no way to any node", got)
	}
	stop()
	<-done
}
