package podnet

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func nodeOf(name string, ip netip.Addr, pods string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{pods}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip.String()}}},
	}
}

// runOn runs a Network on a host until the test ends.
func runOn(t *testing.T, h *testbed.Host, mode Mode, pods string) *Network {
	t.Helper()
	o := Options{
		NodeName: h.Name(), StateDir: t.TempDir(), Device: "fl0", ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.250.0.0/16")},
		Mode: mode, Overlay: link.OverlayOptions{VNI: 2500, Port: 4789}, Usable: func() {}, Changed: func() {},
		Log: slog.New(slog.DiscardHandler),
	}
	o.Events = events.NewRecorder(fake.NewClientset(), corev1.EventSource{}, o.Log)
	n := New(o)
	n.Set(nodeOf(h.Name(), h.Addr4(), pods))
	ctx, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { h.Do(func() { n.Run(ctx) }) })
	t.Cleanup(func() { stop(); ended.Wait() })
	return n
}

// goal is how long after a link is up again the Pods of other nodes may be out of reach; the
// rest is for a machine that does other things.
const goal, slack = 500 * time.Millisecond, 2500 * time.Millisecond

// A link that was down for 300 ms costs that and a little more, by routes and by VXLAN.
func TestPodsAreReachedAfterALinkFlap(t *testing.T) {
	for _, mode := range []Mode{HostGateway, VXLAN} {
		t.Run(string(mode), func(t *testing.T) {
			net := testbed.NewNetwork(t)
			a, b := net.Outside("a"), net.Outside("b")
			pod := netip.MustParseAddr("10.250.2.5")
			b.AddAddr(pod)
			b.Serve(svc.UDP, 9000)
			one, two := runOn(t, a, mode, "10.250.1.0/24"), runOn(t, b, mode, "10.250.2.0/24")
			one.Set(nodeOf("b", b.Addr4(), "10.250.2.0/24"))
			two.Set(nodeOf("a", a.Addr4(), "10.250.1.0/24"))
			one.Synced()
			two.Synced()
			from, to := netip.MustParseAddrPort("10.250.1.1:0"), netip.AddrPortFrom(pod, 9000)
			ask := func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				_, err := a.AskFrom(ctx, svc.UDP, from, to)
				return err
			}
			testbed.Until(t, "an answer of the other node's pod", ask)
			for range 2 {
				link := func(state string) {
					t.Helper()
					if out, err := a.Command(t.Context(), "ip", "link", "set", "eth0", state).CombinedOutput(); err != nil {
						t.Fatalf("%v: %s", err, out)
					}
				}
				link("down")
				for down := time.Now(); time.Since(down) < 300*time.Millisecond; {
					if ask() == nil {
						t.Fatal("an answer while the link is down")
					}
				}
				link("up")
				up := time.Now()
				testbed.Until(t, "an answer after the link is up", ask)
				took := time.Since(up)
				t.Logf("%s: answered %v after the link was up (goal %v)", mode, took.Round(time.Millisecond), goal)
				if took > goal+slack {
					t.Errorf("%s: answered only %v after the link was up", mode, took)
				}
			}
		})
	}
}

// What cannot be reached because the node has no address on its network is reached as soon
// as it has one, and reported only if it lasts.
func TestPodsAreReachedWithTheFirstAddress(t *testing.T) {
	net := testbed.NewNetwork(t)
	a, b := net.Outside("a"), net.Outside("b")
	ip := func(args ...string) {
		t.Helper()
		if out, err := a.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	own := fmt.Sprintf("%s/24", a.Addr4())
	ip("addr", "del", own, "dev", "eth0")
	n := runOn(t, a, HostGateway, "10.250.1.0/24")
	n.Set(nodeOf("b", b.Addr4(), "10.250.2.0/24"))
	n.Synced()
	routed := func(want corev1.ConditionStatus) func() error {
		return func() error {
			if c := n.Condition(); c.Status != want {
				return fmt.Errorf("the condition is %s (%s), want %s", c.Status, c.Message, want)
			}
			return nil
		}
	}
	testbed.Until(t, "the report that there is no route", func() error {
		if c := n.Condition(); c.Reason != reasonRouteRejected {
			return fmt.Errorf("the condition is %s (%s)", c.Reason, c.Message)
		}
		return nil
	})
	ip("addr", "add", own, "dev", "eth0")
	added := time.Now()
	testbed.Until(t, "the route", routed(corev1.ConditionTrue))
	if took := time.Since(added); took > goal+slack {
		t.Errorf("routed %v after the address was added", took)
	}
}
