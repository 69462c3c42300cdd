package capture

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nflog"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

var ap = netip.MustParseAddrPort

// rig is a node that records its flows, with a Pod that answers on port 8080.
type rig struct {
	node, pod *testbed.Host
	ring      *hubble.Ring
	peers     *Peers
}

// port is a port of a Service of namespace shop.
func port(name string, p svc.Protocol, at string, f table.Frontend) *table.ServicePort {
	f.Kind, f.Addr = table.ClusterIP, ap(at)
	return &table.ServicePort{ID: svc.PortName{Name: svc.Name{Namespace: "shop", Name: name}}, Family: svc.IPv4, Protocol: p,
		Frontends: []table.Frontend{f}}
}

func newRig(t testing.TB) *rig {
	t.Helper()
	network := testbed.NewNetwork(t)
	r := &rig{node: network.Host("node"), ring: hubble.NewRing(hubble.RingSize), peers: NewPeers("node")}
	r.pod = r.node.Pod("web")
	r.pod.Serve(svc.TCP, 8080)
	r.pod.Serve(svc.UDP, 8080)
	ends := []table.Endpoint{{Addr: netip.AddrPortFrom(r.pod.Addr4(), 8080), Local: true}}
	tab := table.New(
		port("web", svc.TCP, "10.96.0.1:80", table.Frontend{Endpoints: ends}),
		port("typo", svc.TCP, "10.96.0.2:80", table.Frontend{}),
		port("local", svc.TCP, "10.96.0.3:80", table.Frontend{Drop: true}),
		port("closed", svc.UDP, "10.96.0.4:53", table.Frontend{Endpoints: ends, SourceRanges: []netip.Prefix{}}),
	)
	tab.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	var mode *nft.Mode
	var lost *nflog.Log
	var err, err2 error
	r.node.Do(func() {
		mode, err = nft.New(nft.Config{LogLost: true})
		lost, err2 = nflog.Open(drops.LogGroup)
	})
	if err = errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mode.Close() })
	if err := mode.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	r.peers.Nodes().Set(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}, Status: corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: r.node.Addr4().String()}}}})
	r.peers.Pods().Set(pod("web-1", "a", 1, r.pod.Addr4().String()))
	programmed := func() *table.Table { return tab }
	var log strings.Builder // read when Run has returned
	rec := New(Options{
		Ring: r.ring, Peers: r.peers, Table: programmed, Index: dataplane.NewOwnerIndex(programmed), Lost: lost,
		Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go r.node.Do(func() { done <- rec.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if log.Len() > 0 {
			t.Error(log.String())
		}
	})
	return r
}

// pod is one of this node.
func pod(name, uid string, created int64, addrs ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(uid), Labels: map[string]string{"app": "web"},
		CreationTimestamp: metav1.Unix(created, 0)}, Spec: corev1.PodSpec{NodeName: "node"}}
	for _, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a})
	}
	return p
}

// find waits for a flow, which again makes happen once more.
func (r *rig) find(t *testing.T, what string, again func(), is func(*hubble.Flow) bool) (found hubble.Flow) {
	t.Helper()
	testbed.Until(t, what, func() error {
		again()
		all := make([]hubble.Flow, r.ring.Size())
		n, _, _ := r.ring.Read(0, all)
		for i := range all[:n] {
			if is(&all[i]) {
				found = all[i]
				return nil
			}
		}
		return fmt.Errorf("%d other flows: %+v", n, all[:min(n, 5)])
	})
	return found
}

// A connection to a Service is shown with the Service, the endpoint that got it and its Pod; a direct one without a Service.
func TestConnections(t *testing.T) {
	r := newRig(t)
	dial := func(to netip.AddrPort) func() {
		return func() {
			c, err := r.node.Dial(t.Context(), svc.TCP, to)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
		}
	}
	web := svc.Name{Namespace: "shop", Name: "web"}
	at := netip.AddrPortFrom(r.pod.Addr4(), 8080)
	f := r.find(t, "a connection to the Service", dial(ap("10.96.0.1:80")), func(f *hubble.Flow) bool { return f.Service == web })
	if f.Protocol != svc.TCP || !f.SYN || f.Destination != at || f.To.Pod != "web-1" || f.From != hubble.Host || f.Reason != 0 ||
		f.Direction != flow.TrafficDirection_EGRESS || f.Source.Addr() != r.node.Addr4() && f.SourceXlated != r.node.Addr4() {
		t.Errorf("%+v from %+v to %+v", f, f.From, f.To)
	}
	f = r.find(t, "a direct connection", dial(at), func(f *hubble.Flow) bool { return f.Service == (svc.Name{}) && f.Destination == at })
	if f.To.Pod != "web-1" {
		t.Errorf("%+v to %+v", f, f.To)
	}
}

// What reaches no endpoint is shown with the reason, whether it is refused or dropped.
func TestLost(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		p      svc.Protocol
		to     string
		reason flow.DropReason
		text   string
	}{
		{svc.TCP, "10.96.0.2:80", flow.DropReason_SERVICE_BACKEND_NOT_FOUND, "Service shop/typo has no endpoint"},
		{svc.TCP, "10.96.0.1:81", flow.DropReason_SERVICE_BACKEND_NOT_FOUND, "Service shop/web has no port 81/TCP"},
		{svc.TCP, "10.96.0.99:80", flow.DropReason_STALE_OR_UNROUTABLE_IP, "no Service has the address"},
		{svc.TCP, "10.96.0.3:80", flow.DropReason_SERVICE_BACKEND_NOT_FOUND,
			"Service shop/local has no endpoint on this node, and its policy is Local"},
		{svc.UDP, "10.96.0.4:53", flow.DropReason_DENIED_BY_LB_SRC_RANGE_CHECK, "Service shop/closed: no source range has the client"},
	} {
		send := func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if conn, err := r.node.Dial(ctx, c.p, ap(c.to)); err == nil {
				_, _ = conn.Write([]byte("?"))
				_ = conn.Close()
			}
		}
		f := r.find(t, c.text, send, func(f *hubble.Flow) bool { return f.Destination == ap(c.to) && f.Reason != 0 })
		known := c.reason != flow.DropReason_STALE_OR_UNROUTABLE_IP
		if f.Reason != c.reason || f.Summary != c.text || f.Protocol != c.p || (f.Service.Namespace == "shop") != known ||
			f.SYN != (c.p == svc.TCP) {
			t.Errorf("%+v, want %v, %s", f, c.reason, c.text)
		}
	}
}

// flood makes n connections by UDP, each from another port, on the node.
func (r *rig) flood(t testing.TB, n int) {
	t.Helper()
	r.node.Do(func() {
		to := netip.AddrPortFrom(r.pod.Addr4(), 8080)
		for range n {
			c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to))
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = c.Write([]byte("?"))
			_ = c.Close()
		}
	})
}

// Of many connections a sample is taken, no more than is promised, and what is missing is told.
func TestSample(t *testing.T) {
	r := newRig(t)
	began := time.Now()
	var missed uint64
	r.find(t, "more connections than are recorded", func() { r.flood(t, 1000) }, func(f *hubble.Flow) bool {
		missed = f.Missed
		return f.Missed > 0
	})
	took := time.Since(began)
	_, recorded := r.ring.Bounds()
	if most := Burst + Rate*took.Seconds() + 10; missed == 0 || float64(recorded) > most {
		t.Errorf("%d flows recorded, and %d missed, within %v; want at most %v", recorded, missed, took, most)
	}
}

func TestBudget(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBudget(100, 10, now)
	took := 0
	for range 25 {
		if b.take(now) {
			took++
		}
	}
	if took != 10 || !b.empty() {
		t.Errorf("%d of a burst of 10", took)
	}
	b.missed(5) // 30 in a tenth of a second, and 20 of them not recorded: 60 more within the pause
	if got := b.skipped(now.Add(100*time.Millisecond), now.Add(300*time.Millisecond)); got != 80 {
		t.Errorf("about %d were skipped, want 80", got)
	}
	now = now.Add(350 * time.Millisecond)
	for range 10 {
		if !b.take(now) {
			t.Error("after a pause there is none left")
		}
	}
	if b.take(now) || b.skipped(now, now) == 0 {
		t.Error("a pause without a length, or no end")
	}
}

// BenchmarkRecord is what a reported connection costs at 10,000 Services: at most Rate of them are recorded a second for longer.
func BenchmarkRecord(b *testing.B) {
	var all []*table.ServicePort
	for i := range 10_000 {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)
		all = append(all, port(fmt.Sprint("s", i), svc.TCP, at.String(), table.Frontend{}))
	}
	tab := table.New(all...)
	programmed := func() *table.Table { return tab }
	peers := NewPeers("node")
	for i := range 110 {
		peers.Pods().Set(pod(fmt.Sprint("p", i), fmt.Sprint(i), 1, fmt.Sprintf("10.244.0.%d", i+1)))
	}
	r := New(Options{Ring: hubble.NewRing(hubble.RingSize), Peers: peers, Table: programmed, Index: dataplane.NewOwnerIndex(programmed)})
	c := conntrack.Connection{Protocol: svc.TCP, Source: ap("10.244.0.1:40000"), Destination: ap("10.96.3.7:80"),
		Endpoint: ap("10.244.0.2:8080"), AnsweredTo: ap("10.244.0.1:40000")}
	b.ReportAllocs()
	for b.Loop() {
		r.connection(&c, time.Unix(1000, 0))
	}
}
