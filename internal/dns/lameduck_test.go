package dns

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/svc"
)

// A server that stops is not ready at once, answers for the lame-duck time, and
// then ends.
func TestLameduck(t *testing.T) {
	const lameduck = 500 * time.Millisecond
	s, err := New(Options{Listen: []string{"127.0.0.1:0"}, Workers: 1, Lameduck: lameduck})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ready := func() int {
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/ready", nil))
		return w.Code
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	eventually(t, "ready", func() bool { return ready() == http.StatusOK })
	begin := time.Now()
	cancel()
	eventually(t, "not ready", func() bool { return ready() == http.StatusServiceUnavailable })
	if time.Since(begin) < lameduck/2 { // unless this machine stood still
		if r := exchange(t, s, "udp", question("cluster.local.", mdns.TypeSOA)); len(r.Answer) != 1 {
			t.Errorf("answered %v while it stops", r)
		}
	}
	if err := ended(done); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < lameduck {
		t.Errorf("ended after %s, want at least %s", took, lameduck)
	}
}

// Drain begins the end, and the server answers until Run's ctx ends, however long after
// the lame-duck time. Where no other server is behind kube-dns it stays there.
func TestDrain(t *testing.T) {
	client := fake.NewClientset()
	s, err := New(Options{
		Listen: []string{"127.0.0.1:0"}, Workers: 1, Lameduck: time.Millisecond, Client: client,
		Publish: &membership.Self{NodeName: "n1", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Port: 10053},
	})
	if err != nil {
		t.Fatal(err)
	}
	listed := func(name string) func() bool {
		return func() bool {
			_, err := client.DiscoveryV1().EndpointSlices("kube-system").Get(t.Context(), name, metav1.GetOptions{})
			return err == nil
		}
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	eventually(t, "published", listed("kube-dns-n1"))
	s.Drain(t.Context())
	if !s.Ready() || !listed("kube-dns-n1")() {
		t.Error("the only server has left kube-dns")
	}
	slice, err := client.DiscoveryV1().EndpointSlices("kube-system").Get(t.Context(), "kube-dns-n1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	slice.Name, slice.Labels[svc.NodeLabel], slice.Endpoints[0].Addresses[0] = "kube-dns-n2", "n2", "192.0.2.2"
	if _, err := client.DiscoveryV1().EndpointSlices("kube-system").Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other server known", func() bool { return !s.alone() })
	for range 2 {
		s.Drain(t.Context())
		if s.Ready() || listed("kube-dns-n1")() {
			t.Error("drained, and still ready or behind kube-dns")
		}
		if r := exchange(t, s, "udp", question("cluster.local.", mdns.TypeSOA)); len(r.Answer) != 1 {
			t.Errorf("answered %v after it has drained", r)
		}
	}
	cancel()
	if err := ended(done); err != nil {
		t.Error(err)
	}
	s.Drain(t.Context()) // of a server that has ended
}
