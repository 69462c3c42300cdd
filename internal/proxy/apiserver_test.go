package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// TestAgainstAnAPIServer runs a Proxy beside a real API server: registration,
// the way of a Service, selectors, events, and how long a change takes from the
// server's answer to its writer until it is in the (fake) kernel.
func TestAgainstAnAPIServer(t *testing.T) {
	client := func() kubernetes.Interface {
		cfg := rest.CopyConfig(config(t))
		cfg.QPS, cfg.Burst = -1, -1
		return kubernetes.NewForConfigOrDie(cfg)
	}()
	plane := newFakeDataplane()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	p := startProxy(t, nil, Options{
		Client: client, NodeName: "here", Dataplane: plane, Mode: "fake", Log: log,
		HealthzAddress: "127.0.0.1:0", MetricsAddress: "127.0.0.1:0",
		Servers: func() []netip.AddrPort { return []netip.AddrPort{netip.MustParseAddrPort("198.51.100.7:443")} },
	})
	ctx := t.Context()
	registrar := agent.New(agent.Options{
		Client: client, NodeName: "here", Log: log, Port: 10250, Info: agent.MachineInfo(os.DirFS("/"), "v0.0.0"),
		Node: p.Node, Changed: p.Changed(),
		Conditions: []func() corev1.NodeCondition{func() corev1.NodeCondition { return p.Status().Condition() }},
	})
	var registered sync.WaitGroup
	registered.Go(func() { _ = registrar.Run(ctx) })
	t.Cleanup(registered.Wait)
	until(t, "the Node is ready", func() bool {
		node, err := client.CoreV1().Nodes().Get(ctx, "here", metav1.GetOptions{})
		return err == nil && isTrue(node, corev1.NodeReady) && isTrue(node, svc.ServicesProgrammed)
	})
	until(t, "its Lease is there", func() bool {
		l, err := client.CoordinationV1().Leases("kube-node-lease").Get(ctx, "here", metav1.GetOptions{})
		return err == nil && l.Spec.RenewTime != nil
	})

	s, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "my-service", Namespace: "default"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	headless := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "headless", Namespace: "default", Labels: map[string]string{corev1.IsHeadlessService: ""}},
		Spec:       corev1.ServiceSpec{ClusterIP: "None", Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err = client.CoreV1().Services("default").Create(ctx, headless, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slices := client.DiscoveryV1().EndpointSlices("default")
	eps := slice("my-service", 5)
	if eps, err = slices.Create(ctx, eps, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	dump := func() string { d, _ := plane.Dump(ctx); return d }
	until(t, "the Service is programmed", func() bool {
		return strings.Contains(dump(), "default/my-service TCP ClusterIP "+s.Spec.ClusterIP+":80 -> 10.244.0.5:8080*")
	})
	if strings.Contains(dump(), "headless") {
		t.Error("a headless Service is programmed")
	}

	measure(ctx, t, slices, eps, dump)

	eps.Endpoints[0].Addresses = []string{s.Spec.ClusterIP} // behaviour 25
	if _, err = slices.Update(ctx, eps, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the problem has its Event", func() bool {
		events, err := client.CoreV1().Events("default").List(ctx, metav1.ListOptions{})
		return err == nil && strings.Contains(fmt.Sprint(events.Items), "EndpointIsServiceIP")
	})
	if err := client.CoreV1().Services("default").Delete(ctx, "my-service", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the Service is gone", func() bool { return !strings.Contains(dump(), "my-service") })
	captureServer(ctx, t, client, dump)
}

// captureServer gives a Service the address at which the proxy reaches its server.
func captureServer(ctx context.Context, t *testing.T, client kubernetes.Interface, dump func() string) {
	t.Helper()
	thief := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "thief", Namespace: "default"}, Spec: corev1.ServiceSpec{
		ExternalIPs: []string{"198.51.100.7"}, Ports: []corev1.ServicePort{{Name: "api", Port: 443}, {Name: "web", Port: 80}}}}
	if _, err := client.CoreV1().Services("default").Create(ctx, thief, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the address has its Event", func() bool {
		events, err := client.CoreV1().Events("default").List(ctx, metav1.ListOptions{})
		return err == nil && strings.Contains(fmt.Sprint(events.Items), "198.51.100.7:443 is where this node reaches its API server")
	})
	if d := dump(); strings.Contains(d, "198.51.100.7:443") || !strings.Contains(d, "198.51.100.7:80") {
		t.Errorf("want port 80 of 198.51.100.7 and not port 443:\n%s", d)
	}
}

func measure(ctx context.Context, t *testing.T, client interface {
	Update(context.Context, *discoveryv1.EndpointSlice, metav1.UpdateOptions) (*discoveryv1.EndpointSlice, error)
}, eps *discoveryv1.EndpointSlice, dump func() string) {
	t.Helper()
	var took []time.Duration
	for i := range 100 {
		want := fmt.Sprintf("10.244.1.%d", i+1)
		eps.Endpoints[0].Addresses = []string{want}
		got, err := client.Update(ctx, eps, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got.DeepCopyInto(eps)
		start := time.Now()
		until(t, "the change is programmed", func() bool { return strings.Contains(dump(), want+":8080") })
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("from the answer to the writer until it is programmed: p50 %s, p99 %s", took[49], took[98])
}

func isTrue(n *corev1.Node, t corev1.NodeConditionType) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == t && c.Status == corev1.ConditionTrue
	})
}

// startProxy makes a Proxy and runs it until the test ends: on a host, or where the
// test is if that is nil.
func startProxy(t *testing.T, on *testbed.Host, o Options) *Proxy {
	t.Helper()
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	run := func() { ended <- p.Run(t.Context()) }
	if on == nil {
		go run()
	} else {
		go on.Do(run)
	}
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return p
}

func config(t *testing.T) *rest.Config {
	t.Helper()
	return process.API(t)
}

// until polls for ok.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(500 * time.Microsecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited 30 s in vain until %s", what)
		}
	}
}
