package hubble

import (
	"context"
	"fmt"
	"net"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/hubble/api/peer"
	"github.com/fairlead/fairlead/internal/svc"
)

var (
	ap   = netip.MustParseAddrPort
	noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
)

// shop is a Pod of namespace shop.
func shop(name string) *Peer {
	return &Peer{
		Namespace: "shop", Pod: name + "-1", WorkloadKind: "Deployment", Workload: name,
		Labels: []string{"k8s:app=" + name, "k8s:io.kubernetes.pod.namespace=shop", "k8s:k8s.example.com/tier=front"},
	}
}

// sample are three flows: a connection to a Service, one from outside to a Pod by IPv6, and a refused packet.
func sample() []Flow {
	return []Flow{
		{
			Time: noon, Protocol: svc.TCP, Source: ap("10.244.0.5:40000"), SourceXlated: netip.MustParseAddr("192.0.2.1"),
			Destination: ap("10.244.1.7:8080"), Service: svc.Name{Namespace: "shop", Name: "web"}, From: shop("client"), To: shop("web"),
			Direction: flow.TrafficDirection_EGRESS,
		},
		{
			Time: noon.Add(time.Second), Protocol: svc.UDP, Source: ap("[2001:db8::1]:5000"), Destination: ap("[fd00::7]:53"),
			From: World, To: shop("dns"), Direction: flow.TrafficDirection_INGRESS,
		},
		{
			Time: noon.Add(2 * time.Second), Protocol: svc.TCP, Source: ap("10.244.0.5:40001"), Destination: ap("10.96.0.9:80"), SYN: true,
			Service: svc.Name{Namespace: "other", Name: "typo"}, From: shop("client"), To: World, Direction: flow.TrafficDirection_EGRESS,
			Reason: flow.DropReason_SERVICE_BACKEND_NOT_FOUND, Summary: "Service other/typo has no endpoint",
		},
	}
}

// dial returns a client of an Observer at a real socket.
func dial(t *testing.T, o *Observer) observer.ObserverClient {
	t.Helper()
	c, _ := dialed(t, o)
	return c
}

func dialed(t *testing.T, o *Observer) (observer.ObserverClient, *grpc.ClientConn) {
	t.Helper()
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(o)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	c, err := grpc.NewClient("unix://"+at, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Close()
		s.Stop()
		<-done
	})
	return observer.NewObserverClient(c), c
}

// ports are the source ports of the flows of an answer.
func ports(t *testing.T, c observer.ObserverClient, r *observer.GetFlowsRequest) string {
	t.Helper()
	answer, err := c.GetFlows(t.Context(), r)
	var out []string
	for err == nil {
		var m *observer.GetFlowsResponse
		if m, err = answer.Recv(); err == nil {
			if lost := m.GetLostEvents(); lost != nil {
				out = append(out, fmt.Sprintf("lost %d", lost.GetNumEventsLost()))
				continue
			}
			from, _ := portsOf(m.GetFlow())
			out = append(out, fmt.Sprint(from))
		}
	}
	if err.Error() != "EOF" {
		out = append(out, status.Convert(err).Message())
	}
	return strings.Join(out, " ")
}

// filled is an Observer with flows from the ports 1 to n, one a second, of which every other is refused.
func filled(size, n int) *Observer {
	ring := NewRing(size)
	for i := 1; i <= n; i++ {
		f := sample()[(i%2)*2]
		f.Source, f.Time = netip.AddrPortFrom(f.Source.Addr(), uint16(i)), noon.Add(time.Duration(i)*time.Second)
		ring.Add(f)
	}
	return NewObserver("node-1", "1.2.3", ring)
}

func TestGetFlows(t *testing.T) {
	o := filled(8, 10) // 3 to 10
	o.ring.Add(Flow{Time: noon.Add(11 * time.Second), Missed: 99, From: World, To: World})
	c := dial(t, o)
	type r = observer.GetFlowsRequest
	refused := []*flow.FlowFilter{{Verdict: []flow.Verdict{flow.Verdict_DROPPED}}}
	at := func(seconds int) *timestamppb.Timestamp {
		return timestamppb.New(noon.Add(time.Duration(seconds) * time.Second))
	}
	for _, q := range []struct {
		name string
		r    *r
		want string
	}{
		{"all", &r{}, "4 5 6 7 8 9 10 lost 99"},
		{"last", &r{Number: 2}, "9 10 lost 99"},
		{"last of all", &r{Number: ^uint64(0)}, "4 5 6 7 8 9 10 lost 99"},
		{"last refused", &r{Number: 2, Whitelist: refused}, "7 9 lost 99"},
		{"last not refused", &r{Number: 1, Blacklist: refused}, "10 lost 99"},
		{"first", &r{Number: 3, First: true}, "4 5 6"},
		{"first refused", &r{Number: 2, First: true, Whitelist: refused}, "5 7"},
		{"since", &r{Since: at(9)}, "9 10 lost 99"},
		{"since and until", &r{Since: at(6), Until: at(8), Number: 20}, "6 7 8"},
		{"first and follow", &r{Number: 1, First: true, Follow: true}, "first and follow exclude each other"},
		{"no filter", &r{Whitelist: []*flow.FlowFilter{{SourceFqdn: []string{"x"}}}}, "whitelist[0].source_fqdn: "},
		{"no time", &r{Since: &timestamppb.Timestamp{Nanos: -1}}, "since: "},
		{"no mask", &r{FieldMask: &fieldmaskpb.FieldMask{Paths: []string{"nothing"}}}, "field_mask: "},
	} {
		if got := ports(t, c, q.r); got != q.want && !(strings.HasSuffix(q.want, ": ") && strings.HasPrefix(got, q.want)) {
			t.Errorf("%s: %s, want %s", q.name, got, q.want)
		}
	}
}

// A client that follows gets the last flows, and then what it asks for as it comes, however many of before it asked for.
func TestFollow(t *testing.T) {
	t.Run("last", func(t *testing.T) { follows(t, &observer.GetFlowsRequest{Number: 1}) })
	t.Run("last since", func(t *testing.T) { follows(t, &observer.GetFlowsRequest{Number: 1, Since: timestamppb.New(noon)}) })
}

func follows(t *testing.T, q *observer.GetFlowsRequest) {
	t.Helper()
	o := filled(8, 4)
	c := dial(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	q.Follow, q.Whitelist = true, []*flow.FlowFilter{{SourcePort: []string{"3", "4", "77"}}}
	s, err := c.GetFlows(ctx, q)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []uint32{4, 77} {
		m, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if from, _ := portsOf(m.GetFlow()); from != want {
			t.Fatalf("a flow from port %d, want %d", from, want)
		}
		for _, port := range []string{"10.244.0.5:76", "10.244.0.5:77"} {
			f := sample()[0]
			f.Source = ap(port)
			o.ring.Add(f)
		}
	}
}

// However many ask at a time, the answers that a node sends are bounded.
func TestStreamsAreBounded(t *testing.T) {
	o := filled(8, 1)
	c := dial(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range maxStreams {
		s, err := c.GetFlows(ctx, &observer.GetFlowsRequest{Follow: true, Number: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if got := ports(t, c, &observer.GetFlowsRequest{}); got != "16 questions for flows are being answered; try again later" {
		t.Error(got)
	}
	heavy := &observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{{HttpUrl: []string{"("}}}}
	if got := ports(t, c, heavy); !strings.HasPrefix(got, "16 questions for flows") {
		t.Errorf("filters are compiled without a place: %s", got)
	}
}

// Clients that watch the health have their own bound.
func TestHealthWatchesAreBounded(t *testing.T) {
	_, conn := dialed(t, filled(8, 1))
	c := healthpb.NewHealthClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	watch := func() error {
		s, err := c.Watch(ctx, &healthpb.HealthCheckRequest{Service: checkedName})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	for range maxStreams {
		if err := watch(); err != nil {
			t.Fatal(err)
		}
	}
	if err := watch(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one too many: %v", err)
	}
	if _, err := c.Check(ctx, &healthpb.HealthCheckRequest{Service: checkedName}); err != nil {
		t.Errorf("a check beside them: %v", err)
	}
}

// A mask leaves the fields that it names.
func TestMask(t *testing.T) {
	m, err := newMask(&fieldmaskpb.FieldMask{Paths: []string{"source.pod_name", "destination", "destination.namespace", "IP.source", "IP"}})
	if err != nil {
		t.Fatal(err)
	}
	got := sample()[0].message("node-1", 1)
	want := &flow.Flow{
		Source: &flow.Endpoint{PodName: "client-1"}, Destination: proto.CloneOf(got.GetDestination()), IP: proto.CloneOf(got.GetIP()),
	}
	if m.apply(got); !proto.Equal(got, want) {
		t.Errorf("%v\nwant %v", got, want)
	}
}

func TestNodesStatusAndNamespaces(t *testing.T) {
	o := filled(8, 20)
	f := sample()[2]
	f.Time = time.Now()
	o.ring.Add(f)
	c := dial(t, o)
	s, err := c.ServerStatus(t.Context(), &observer.ServerStatusRequest{})
	if err != nil || s.GetNumFlows() != 8 || s.GetMaxFlows() != 8 || s.GetSeenFlows() != 21 || s.GetVersion() != "1.2.3" ||
		s.GetFlowsRate() <= 0 {
		t.Errorf("status %v, %v", s, err)
	}
	n, err := c.GetNodes(t.Context(), &observer.GetNodesRequest{})
	if err != nil || len(n.GetNodes()) != 1 || n.GetNodes()[0].GetName() != "node-1" {
		t.Errorf("nodes %v, %v", n, err)
	}
	spaces, err := c.GetNamespaces(t.Context(), &observer.GetNamespacesRequest{})
	if want := Namespaces(map[string]bool{"shop": true, "other": true}); err != nil || !proto.Equal(spaces, want) {
		t.Errorf("namespaces %v, %v", spaces, err)
	}
	events, err := c.GetAgentEvents(t.Context(), &observer.GetAgentEventsRequest{})
	if err == nil {
		_, err = events.Recv()
	}
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("events of an agent of Cilium: %v", err)
	}
}

// What an agent answers the relay comes through with its status; what is none is no answer.
func TestWire(t *testing.T) {
	o := filled(8, 3)
	s := httptest.NewServer(Handler(o))
	defer s.Close()
	ask := func(method string, m proto.Message, f func([]byte) error) error {
		body, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		r, err := s.Client().Post(s.URL+Path+method, "", strings.NewReader(string(body)))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		return ReadAnswer(r.Body, MaxFlow, f)
	}
	n := 0
	count := func([]byte) error { n++; return nil }
	if err := ask("GetFlows", &observer.GetFlowsRequest{}, count); err != nil || n != 3 {
		t.Errorf("%d flows, %v", n, err)
	}
	for _, c := range []struct {
		method string
		m      proto.Message
		want   codes.Code
	}{
		{"Nothing", &observer.GetFlowsRequest{}, codes.Unimplemented},
		{"GetFlows", &observer.GetFlowsRequest{First: true, Follow: true}, codes.InvalidArgument},
	} {
		if err := ask(c.method, c.m, count); status.Code(err) != c.want {
			t.Errorf("%s: %v, want %v", c.method, err, c.want)
		}
	}
	tooLarge := "\x81\x80\x04" + strings.Repeat("x", MaxFlow+1) + "\x00\x00"
	for _, bad := range []string{"", "\x05abc", "\xff\xff\xff\xff\x7f", "\x00", "\x00\x02\xff\xff", tooLarge} {
		if err := ReadAnswer(strings.NewReader(bad), MaxFlow, count); err == nil {
			t.Errorf("%q is an answer", bad)
		}
	}
}

// A Pod with as many labels as fit into an object, each as long as it may be, does not make its flows too large for the wire.
func TestLabelsAreBounded(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "large", Labels: map[string]string{}}}
	for i := range 5000 {
		pod.Labels[fmt.Sprintf("%s/%063d", strings.Repeat("a", 253), i)] = strings.Repeat("v", 63)
	}
	p := PeerOf(pod)
	if len(p.Labels) != maxLabels+1 || !slices.Contains(p.Labels, NamespaceLabels("shop")[0]) || !slices.IsSorted(p.Labels) {
		t.Errorf("%d labels", len(p.Labels))
	}
	f := Flow{From: p, To: p, Source: ap("10.0.0.1:1"), Destination: ap("10.0.0.2:2")}
	if size := proto.Size(f.message("node", 1)); size > MaxFlow {
		t.Errorf("a flow of %d bytes", size)
	}
}

// The workload of a Pod is its controller, and behind a ReplicaSet the Deployment.
func TestWorkload(t *testing.T) {
	yes := true
	pod := func(kind, name, hash string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-7d4-x"}}
		if kind != "" {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: name, Controller: &yes}}
		}
		if hash != "" {
			p.Labels = map[string]string{"pod-template-hash": hash}
		}
		return p
	}
	for _, c := range []struct {
		pod  *corev1.Pod
		want string
	}{
		{pod("ReplicaSet", "web-7d4", "7d4"), "Deployment web"},
		{pod("ReplicaSet", "web", ""), "ReplicaSet web"},
		{pod("ReplicaSet", "web", "7d4"), "ReplicaSet web"},
		{pod("StatefulSet", "db", ""), "StatefulSet db"},
		{pod("", "", ""), "Pod web-7d4-x"},
	} {
		if p := PeerOf(c.pod); p.WorkloadKind+" "+p.Workload != c.want {
			t.Errorf("%s %s, want %s", p.WorkloadKind, p.Workload, c.want)
		}
	}
}

func BenchmarkAdd(b *testing.B) {
	ring, f := NewRing(RingSize), sample()[0]
	b.ReportAllocs()
	for b.Loop() {
		ring.Add(f)
	}
}

// A node names itself to who watches the nodes, until that ends.
func TestNotify(t *testing.T) {
	o := filled(8, 1)
	o.Address = "unix:///run/x"
	_, conn := dialed(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answer, err := peer.NewPeerClient(conn).Notify(ctx, &peer.NotifyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := answer.Recv()
	if err != nil || m.GetName() != "node-1" || m.GetAddress() != "unix:///run/x" || m.GetType() != peer.ChangeNotificationType_PEER_ADDED {
		t.Errorf("%v, %v", m, err)
	}
	cancel()
	if m, err := answer.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("after the end: %v, %v", m, err)
	}
}

// The flags of the first packet are what the command prints behind a connection.
func TestSummary(t *testing.T) {
	f := sample()[0]
	f.SYN = true
	m := f.message("node-1", 7)
	if text := m.GetSummary(); text != "TCP Flags: SYN" || !m.GetL4().GetTCP().GetFlags().GetSYN() { //nolint:staticcheck // printed
		t.Errorf("%v", m)
	}
	m = sample()[2].message("node-1", 7)
	if text := m.GetSummary(); text != "Service other/typo has no endpoint" { //nolint:staticcheck // printed
		t.Errorf("%v", m)
	}
}
