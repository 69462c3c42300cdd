package nodes

import (
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/controller/kit"
)

// A Node that renews its Lease is not unreachable, also if it has no condition Ready; one that says nothing of that keeps the
// taint of Nodes that are not ready, as a kubelet registers with. Without a renewal nothing changes.
func TestAliveWithoutReadyCondition(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}}
	for _, key := range []string{corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady, "dedicated"} {
		node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute})
	}
	client := fake.NewClientset(node)
	c := &lifecycle{Kit: &kit.Kit{Client: client, Log: slog.New(slog.DiscardHandler)}, live: newLiveness(time.Minute, time.Second)}
	expect := func(what string, want int) {
		t.Helper()
		if err := c.followReady(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		n, err := client.CoreV1().Nodes().Get(t.Context(), "n0", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if has := n.Spec.Taints; len(has) != want || has[want-1].Key != "dedicated" || has[want-2].Key != corev1.TaintNodeNotReady {
			t.Errorf("%s: taints are %v, want %d", what, has, want)
		}
	}
	c.live.heartbeat("n0", fromLease, "1")
	expect("before a renewal", 3)
	c.live.heartbeat("n0", fromLease, "2")
	expect("after a renewal", 2)
}
