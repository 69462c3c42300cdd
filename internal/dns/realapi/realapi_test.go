// Package realapi runs the DNS server against a real API server, which ends
// and comes back. The tests of package dns look for goroutines that are left
// behind, so this one stands beside it.
package realapi

import (
	"bytes"
	"context"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/dns"
	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-tick.C {
		if ok() {
			return
		}
	}
	t.Fatalf("not in thirty seconds: %s", what)
}

// lockedBuffer may be read while the server logs.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func lookup(t *testing.T, s *dns.Server, name string) string {
	t.Helper()
	m := new(mdns.Msg)
	m.SetQuestion(name, mdns.TypeA)
	c := mdns.Client{Timeout: 10 * time.Second}
	r, _, err := c.Exchange(m, s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Answer) == 0 {
		return mdns.RcodeToString[r.Rcode]
	}
	return r.Answer[0].(*mdns.A).A.String()
}

// The way of a name: Service and slices into the API, questions to the server;
// the API away and back again.
func TestNamesFollowARealAPI(t *testing.T) {
	api := process.StartAPI(t)
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client := kubernetes.NewForConfigOrDie(config)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	var logs lockedBuffer
	s, err := dns.New(dns.Options{
		Client: client, Listen: []string{"127.0.0.1:0"}, Workers: 1,
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
		Publish:      &membership.Self{NodeName: "node-a", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.5")}, Port: 53},
		Logger:       slog.New(slog.NewTextHandler(&logs, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	eventually(t, "ready", s.Ready)

	if got := lookup(t, s, "kubernetes.default.svc.cluster.local."); got != "10.96.0.1" {
		t.Errorf("kubernetes.default is %s", got)
	}
	web := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if web, err = client.CoreV1().Services("default").Create(ctx, web, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new Service is answered", func() bool { return lookup(t, s, "web.default.svc.cluster.local.") == web.Spec.ClusterIP })
	eventually(t, "the server is listed behind kube-dns", func() bool {
		e, err := client.DiscoveryV1().EndpointSlices("kube-system").Get(ctx, "kube-dns-node-a", metav1.GetOptions{})
		return err == nil && e.Endpoints[0].Addresses[0] == "10.0.0.5"
	})

	// The API goes away: everything known is still answered.
	api.Stop()
	eventually(t, "the API's absence is noticed", func() bool { return strings.Contains(logs.String(), "from memory") })
	if got := lookup(t, s, "web.default.svc.cluster.local."); got != web.Spec.ClusterIP {
		t.Errorf("without the API: %s", got)
	}
	if !s.Ready() {
		t.Error("not ready without the API")
	}
	if !strings.Contains(metrics(s), "fairlead_dns_api_up 0\n") {
		t.Error("no metric says that the API is away")
	}

	// It comes back, and with it what has changed.
	api.Start(t)
	api.AwaitReady(t)
	head := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "head"}, Spec: corev1.ServiceSpec{ClusterIP: "None"}}
	if _, err = client.CoreV1().Services("default").Create(ctx, head, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "head-1", Labels: map[string]string{discoveryv1.LabelServiceName: "head"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.9"}}},
	}
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a Service made after the restart is answered",
		func() bool { return lookup(t, s, "head.default.svc.cluster.local.") == "10.244.0.9" })
	if !strings.Contains(metrics(s), "fairlead_dns_api_up 1\n") {
		t.Error("no metric says that the API is back")
	}

	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := client.DiscoveryV1().EndpointSlices("kube-system").Get(context.Background(), "kube-dns-node-a",
		metav1.GetOptions{}); err == nil {
		t.Error("the server is still listed behind kube-dns")
	}
}

func metrics(s *dns.Server) string {
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	return w.Body.String()
}
