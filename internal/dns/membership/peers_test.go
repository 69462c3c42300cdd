package membership

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
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

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// serversOf lists kube-dns as the server of one node sees it: a slice of the
// server of each node, and one that others wrote.
func serversOf(own string, nodes ...string) *Members {
	p := &Self{NodeName: own}
	v := New(p, nil, slog.New(slog.DiscardHandler))
	for i, n := range nodes {
		o := &Self{NodeName: n, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})}, Port: 10053}
		for _, e := range o.slices(nil) {
			if e != nil {
				v.Set(e)
			}
		}
	}
	port, udp := int32(53), corev1.ProtocolUDP
	v.Set(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: "kube-dns-x7r2p", Labels: map[string]string{discoveryv1.LabelServiceName: "kube-dns"},
		},
		Ports:     []discoveryv1.EndpointPort{{Port: &port, Protocol: &udp}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.9.9"}}},
	})
	return v
}

// Every server is monitored by two others, and monitors two.
func TestNeighbours(t *testing.T) {
	nodes := []string{"e", "a", "c", "b", "d"}
	by := map[netip.AddrPort]int{}
	for _, n := range nodes {
		peers := serversOf(n, nodes...).neighbours(n)
		if len(peers) != peersWatched {
			t.Errorf("%s looks after %v", n, peers)
		}
		for _, p := range peers {
			by[p.addr]++
			if p.names == "kube-dns-"+n {
				t.Errorf("%s looks after itself", n)
			}
		}
	}
	for addr, n := range by {
		if n != peersWatched {
			t.Errorf("%s is looked after by %d", addr, n)
		}
	}
	if len(by) != len(nodes) {
		t.Errorf("%d of %d are looked after", len(by), len(nodes))
	}
	if peers := serversOf("a", "a", "b").neighbours("a"); len(peers) != 1 {
		t.Errorf("of two, one looks after %v", peers)
	}
	if peers := serversOf("a", "a").neighbours("a"); len(peers) != 0 {
		t.Errorf("alone, one looks after %v", peers)
	}
}

// What falls back goes to every ready server but the own one.
func TestOthers(t *testing.T) {
	v := serversOf("b", "a", "b", "c")
	want := "[10.0.0.1:10053 10.0.0.3:10053 10.244.9.9:53]"
	if got := fmt.Sprint(v.Others()); got != want {
		t.Errorf("others are %s, not %s", got, want)
	}
	<-v.Changed
	p := &Self{NodeName: "c", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.3")}, Port: 10053}
	no := false
	ended := p.slices(nil)["kube-dns-c"]
	ended.Endpoints[0].Conditions.Ready = &no
	v.Set(ended)
	if len(v.Changed) != 1 {
		t.Error("no wake-up for a server that is no longer ready")
	}
	v.remove("kube-dns-x7r2p")
	if got := v.Others(); !slices.Equal(got, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:10053")}) {
		t.Errorf("others are %s", got)
	}
	if peers := v.neighbours("b"); len(peers) != 2 {
		t.Errorf("one that is not ready is still looked after: %v", peers)
	}
}

// While the API does not answer, a server that has ended is tried to be marked once a second.
func TestEndedPeerWithoutAnAPI(t *testing.T) {
	asked := make(chan time.Time, 10)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked <- time.Now()
		http.Error(w, "no leader", http.StatusInternalServerError)
	}))
	defer api.Close()
	s := New(nil, kubernetes.NewForConfigOrDie(&rest.Config{Host: api.URL}), slog.New(slog.DiscardHandler))
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { // it accepts one connection, and ends
		conn, err := other.Accept()
		other.Close()
		if err == nil {
			conn.Close()
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.watchPeer(ctx, peer{netip.MustParseAddrPort(other.Addr().String()), "kube-dns-other"}) })
	first := testbed.Receive(t, "a try", asked)
	if after := testbed.Receive(t, "another try", asked).Sub(first); after < peerRetry/2 {
		t.Errorf("tried again after %s, want %s", after, peerRetry)
	}
}

func TestSliceNamesFit(t *testing.T) {
	long := strings.Repeat("n", 250)
	p := &Self{NodeName: long, Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.5")}, Port: 53}
	e := p.slices(nil)[p.sliceName(svc.IPv4)]
	if len(e.Name) > 253 || len(e.Labels[svc.NodeLabel]) > 63 || *e.Endpoints[0].NodeName != long ||
		p.sliceName(svc.IPv4) == p.sliceName(svc.IPv6) {
		t.Errorf("%d bytes of name, label %q", len(e.Name), e.Labels[svc.NodeLabel])
	}
}
