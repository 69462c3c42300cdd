package relay

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
)

// cluster returns a Relay of an API server that leads to the given nodes, and answers for Pods as pods does.
func cluster(t *testing.T, nodes map[string]http.Handler, pods ...http.Handler) *Relay {
	t.Helper()
	mux := http.NewServeMux()
	for _, h := range pods {
		mux.Handle("/api/v1/namespaces/", h)
	}
	list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
	for name, h := range nodes {
		list.Items = append(list.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		proxy := "/api/v1/nodes/" + name + "/proxy"
		mux.Handle(proxy+hubble.Path, http.StripPrefix(proxy, h))
	}
	mux.HandleFunc("/api/v1/nodes", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	r, err := New(&rest.Config{Host: s.URL}, "1.2.3", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// client gets the answers to one question.
type client struct {
	grpc.ServerStream

	ctx context.Context
	got []*observer.GetFlowsResponse

	sent func(*observer.GetFlowsResponse) // nil if nobody waits for messages
}

func (c *client) Context() context.Context { return c.ctx }

func (c *client) Send(m *observer.GetFlowsResponse) error {
	c.got = append(c.got, m)
	if c.sent != nil {
		c.sent(m)
	}
	return nil
}

// A node whose answer has ended is not asked again.
func TestFollowEnds(t *testing.T) {
	var asked atomic.Int32
	r := cluster(t, map[string]http.Handler{"node-1": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_, _ = w.Write([]byte{0, 0}) // no message, and a status without an error
	})})
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ctx, end := context.WithTimeout(ctx, time.Minute)
	defer end()
	q := &observer.GetFlowsRequest{Follow: true}
	query, err := hubble.NewQuery(q)
	if err != nil {
		t.Fatal(err)
	}
	s := &session{relay: r, query: query, asked: q, to: &client{ctx: ctx}, pods: newPods(r.client)}
	if s.followNode(ctx, cancel, "node-1"); ctx.Err() != nil || asked.Load() != 1 {
		t.Errorf("asked %d times, %v", asked.Load(), ctx.Err())
	}
}

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// node answers as a node with flows from the ports 1 to n, of which it has lost 5 after each.
func node(name string, n int) http.Handler {
	ring := hubble.NewRing(2*n + 1)
	for i := range n {
		at := noon.Add(time.Duration(i) * time.Second)
		ring.Add(hubble.Flow{
			Time: at, Source: netip.AddrPortFrom(netip.IPv6Loopback(), uint16(i+1)), Destination: netip.MustParseAddrPort("[::1]:80"),
			From: hubble.World, To: hubble.World,
		})
		ring.Add(hubble.Flow{Time: at, Missed: 5, From: hubble.World, To: hubble.World})
	}
	return hubble.Handler(hubble.NewObserver(name, "1.2.3", ring))
}

// says answers every question with messages.
func says(n int, m proto.Message) http.Handler {
	text, err := proto.Marshal(m)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		for range n {
			if _, err := w.Write(append(binary.AppendUvarint(nil, uint64(len(text))), text...)); err != nil {
				return // the relay has enough
			}
		}
		_, _ = w.Write([]byte{0, 0})
	})
}

// answer is what a Relay answers: nodes, and of flows their number of bytes, of lost ones how many.
func answer(t *testing.T, r *Relay, q *observer.GetFlowsRequest) (out []string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := &client{ctx: ctx}
	err = r.GetFlows(q, c)
	for _, m := range c.got {
		text := "unavailable"
		switch {
		case m.GetFlow() != nil:
			text = m.GetFlow().GetTime().AsTime().Sub(noon).String()
		case m.GetLostEvents() != nil:
			text = fmt.Sprint("lost ", m.GetLostEvents().GetNumEventsLost())
		case m.GetNodeStatus() == nil:
			text = fmt.Sprintf("%T", m.GetResponseTypes())
		}
		out = append(out, m.GetNodeName()+" "+text)
	}
	slices.Sort(out)
	return out, err
}

// What a node has lost does not count as flows that are asked for.
func TestLostOnes(t *testing.T) {
	r := cluster(t, map[string]http.Handler{"a": node("a", 9), "b": node("b", 1)})
	labelled := []*flow.FlowFilter{{SourceLabel: []string{"reserved:world"}}} // the relay selects
	for _, c := range []struct {
		name string
		q    *observer.GetFlowsRequest
		want string
	}{
		{"last", &observer.GetFlowsRequest{Number: 2}, "a 7s,a 8s,a lost 10,b 0s,b lost 5"},
		{"last with labels", &observer.GetFlowsRequest{Number: 2, Whitelist: labelled}, "a 7s,a 8s,a lost 45,b 0s,b lost 5"},
		{"first with labels", &observer.GetFlowsRequest{Number: 1, First: true, Whitelist: labelled}, "a 0s,a lost 45,b 0s,b lost 5"},
		{"all", &observer.GetFlowsRequest{Number: 9, First: true, Since: timestamppb.New(noon.Add(8 * time.Second))}, "a 8s,a lost 5"},
	} {
		if got, err := answer(t, r, c.q); err != nil || strings.Join(got, ",") != c.want {
			t.Errorf("%s: %v, %v; want %s", c.name, got, err, c.want)
		}
	}
}

// A client that follows gets the last flows that it asks for, not all that nodes have.
func TestFollowersAskForTheLastOnes(t *testing.T) {
	labelled := []*flow.FlowFilter{{SourceLabel: []string{"reserved:world"}}}
	for _, c := range []struct {
		follow bool
		want   uint64
	}{{false, ^uint64(0)}, {true, 2}} {
		if got := forNodes(&observer.GetFlowsRequest{Number: 2, Follow: c.follow, Whitelist: labelled}); got.GetNumber() != c.want {
			t.Errorf("follow %t: nodes are asked for %d, want %d", c.follow, got.GetNumber(), c.want)
		}
	}
}

// After an answer that broke off no flow is lost and none comes twice, though requests are recorded when they end, with the time at
// which they began. All flows of a node that has
// restarted are sent.
func TestFollowLosesAndRepeatsNothing(t *testing.T) {
	first, second := hubble.NewRing(32), hubble.NewRing(32)
	add := func(to *hubble.Ring, seconds int) {
		to.Add(hubble.Flow{Time: noon.Add(time.Duration(seconds) * time.Second), From: hubble.World, To: hubble.World})
	}
	lose := func(to *hubble.Ring, seconds int) {
		to.Add(hubble.MissedFlow(noon.Add(time.Duration(seconds)*time.Second), uint64(100+seconds)))
	}
	add(first, 0)
	lose(first, 1)
	add(first, -30)
	add(second, -10)
	add(second, 4)
	var asked atomic.Int32
	ended := make(chan func(), 99)
	old, young := hubble.Handler(hubble.NewObserver("a", "1.2.3", first)), hubble.Handler(hubble.NewObserver("a", "1.2.3", second))
	r := cluster(t, map[string]http.Handler{"a": http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		ctx, end := context.WithCancel(q.Context())
		defer end()
		ended <- end
		node := old
		switch asked.Add(1) {
		case 1:
		case 2: // these are recorded before the relay asks again
			add(first, -20)
			lose(first, 2)
			add(first, 3)
		default:
			node = young
		}
		node.ServeHTTP(w, q.WithContext(ctx))
	})})
	r.retry = time.Millisecond
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	c := &client{ctx: ctx}
	var got []string
	c.sent = func(m *observer.GetFlowsResponse) {
		switch at := m.GetTime().AsTime().Sub(noon).String(); {
		case m.GetLostEvents() != nil:
			got = append(got, fmt.Sprint("lost ", m.GetLostEvents().GetNumEventsLost()))
		case m.GetFlow() != nil:
			got = append(got, at)
		default:
			return // the node is unavailable
		}
		switch len(got) {
		case 3: // all before the break
			(<-ended)()
		case 6:
			(<-ended)()
		case 8:
			stop()
		}
	}
	if err := r.GetFlows(&observer.GetFlowsRequest{Follow: true, Number: 9}, c); ctx.Err() == nil {
		t.Error(err)
	}
	if want := "0s,lost 101,-30s,-20s,lost 102,3s,-10s,4s"; strings.Join(got, ",") != want {
		t.Errorf("%v, want %s", got, want)
	}
}

// A node whose answer broke off is asked for what came since, and for requests that had begun before.
func TestFollowGoesOn(t *testing.T) {
	var asked []*observer.GetFlowsRequest
	first := &observer.GetFlowsResponse{ResponseTypes: &observer.GetFlowsResponse_Flow{Flow: &flow.Flow{Time: timestamppb.New(noon)}}}
	r := cluster(t, map[string]http.Handler{"a": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		q := &observer.GetFlowsRequest{}
		if err = errors.Join(err, proto.Unmarshal(body, q)); err != nil {
			t.Error(err)
		}
		switch asked = append(asked, q); len(asked) {
		case 1: // no flow yet
		case 2:
			text, _ := proto.Marshal(&observer.GetFlowsResponse{Time: first.GetFlow().GetTime(), ResponseTypes: first.GetResponseTypes()})
			_, _ = w.Write(append(binary.AppendUvarint(nil, uint64(len(text))), text...))
		default:
			_, _ = w.Write([]byte{0, 0})
		}
	})})
	r.retry = time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	q := &observer.GetFlowsRequest{Follow: true, Number: 7}
	query, err := hubble.NewQuery(q)
	if err != nil {
		t.Fatal(err)
	}
	s := &session{relay: r, query: query, asked: q, to: &client{ctx: ctx}, pods: newPods(r.client)}
	s.followNode(ctx, func(error) {}, "a")
	if len(asked) != 3 {
		t.Fatalf("asked %d times, want 3", len(asked))
	}
	for i, want := range []struct {
		number uint64
		since  *timestamppb.Timestamp
	}{{7, nil}, {7, nil}, {0, timestamppb.New(noon.Add(-longest))}} {
		if q := asked[i]; q.GetNumber() != want.number || !proto.Equal(q.GetSince(), want.since) {
			t.Errorf("question %d: %v, want %+v", i, q, want)
		}
	}
}

// The question to a node ends when its Node is deleted.
func TestFollowForgetsDeletedNodes(t *testing.T) {
	asked, ended := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/api/v1/nodes", func(w http.ResponseWriter, _ *http.Request) {
		list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
		select {
		case <-asked:
		default:
			list.Items = []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	})
	mux.HandleFunc("/api/v1/nodes/a/proxy"+hubble.Path, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body) // only then the server notices that the client goes
		close(asked)
		<-r.Context().Done()
		close(ended)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	r, err := New(&rest.Config{Host: server.URL}, "1.2.3", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	r.again = time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	q := &observer.GetFlowsRequest{Follow: true}
	query, err := hubble.NewQuery(q)
	if err != nil {
		t.Fatal(err)
	}
	s := &session{relay: r, query: query, asked: q, to: &client{ctx: ctx}, pods: newPods(r.client)}
	done := make(chan error, 1)
	go func() { done <- s.follow(ctx) }()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		t.Error("the question ended only with the client's")
	}
	cancel()
	<-done
	if got := s.to.(*client).got; len(got) > 0 {
		t.Errorf("the client got %v", got)
	}
}

// All questions share the memory for answers, and give it back.
func TestMemoryIsShared(t *testing.T) {
	r := cluster(t, map[string]http.Handler{"a": node("a", 9)})
	r.kept.Add(maxKept - 100)
	if _, err := answer(t, r, &observer.GetFlowsRequest{}); status.Code(err) != codes.ResourceExhausted ||
		!strings.Contains(err.Error(), "the answers to all clients") {
		t.Errorf("beside others: %v", err)
	}
	if got := r.kept.Load(); got != maxKept-100 {
		t.Errorf("%d bytes are kept after it, want what the other questions keep", got)
	}
	r.kept.Store(0)
	if _, err := answer(t, r, &observer.GetFlowsRequest{}); err != nil || r.kept.Load() != 0 {
		t.Errorf("%v, and %d bytes are kept after it", err, r.kept.Load())
	}
}

// The relay adds the labels and workload that a node does not know, unless the Pod is younger than the flow.
func TestCompletes(t *testing.T) {
	ring := hubble.NewRing(2)
	for i := range 2 {
		ring.Add(hubble.Flow{
			Time: noon.Add(time.Duration(i) * time.Hour), Source: netip.MustParseAddrPort("[::1]:1"),
			Destination: netip.MustParseAddrPort("[::1]:80"),
			From:        &hubble.Peer{Namespace: "shop", Pod: "web-1", Partial: true, Labels: hubble.NamespaceLabels("shop")}, To: hubble.World,
		})
	}
	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web-1", Labels: map[string]string{"app": "web"}, CreationTimestamp: metav1.NewTime(noon.Add(time.Minute)),
	}}
	var asked atomic.Int32
	r := cluster(t, map[string]http.Handler{"a": hubble.Handler(hubble.NewObserver("a", "1.2.3", ring))}, http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			if r.URL.Path != "/api/v1/namespaces/shop/pods/web-1" {
				t.Error(r.URL.Path)
			}
			w.Header().Set("Content-Type", "application/json")
			if err := json.NewEncoder(w).Encode(pod); err != nil {
				t.Error(err)
			}
		}))
	labelled := []*flow.FlowFilter{{SourceLabel: []string{"app=web"}}}
	got, err := answer(t, r, &observer.GetFlowsRequest{Whitelist: labelled})
	if err != nil || strings.Join(got, ",") != "a 1h0m0s" || asked.Load() != 1 {
		t.Errorf("%v, %v, and %d Pods read; want the later flow and one", got, err, asked.Load())
	}
}

// A node cannot fill the memory of the relay, and speaks of flows only.
func TestHostileNode(t *testing.T) {
	text := func(n int) *observer.GetFlowsResponse {
		f := &flow.Flow{Time: timestamppb.New(noon), Uuid: strings.Repeat("x", n)}
		return &observer.GetFlowsResponse{ResponseTypes: &observer.GetFlowsResponse_Flow{Flow: f}}
	}
	for _, c := range []struct {
		name string
		node http.Handler
		q    *observer.GetFlowsRequest
		want string
		code codes.Code
	}{
		{"large message", says(1, text(65<<10)), &observer.GetFlowsRequest{}, "a 0s,b unavailable", codes.OK},
		{"many bytes", says(1200, text(60<<10)), &observer.GetFlowsRequest{}, "", codes.ResourceExhausted},
		{"many bytes that are not kept", says(1200, text(60<<10)), &observer.GetFlowsRequest{Number: 1}, "a 0s,b 0s", codes.OK},
		{"many messages", says(maxFlows+1, text(1)), &observer.GetFlowsRequest{}, "", codes.ResourceExhausted},
		{"other kinds", says(2, unavailable("a", nil)), &observer.GetFlowsRequest{}, "a 0s", codes.OK},
	} {
		a := hubble.NewRing(1)
		a.Add(hubble.Flow{Time: noon, From: hubble.World, To: hubble.World})
		r := cluster(t, map[string]http.Handler{"a": hubble.Handler(hubble.NewObserver("a", "1.2.3", a)), "b": c.node})
		if got, err := answer(t, r, c.q); strings.Join(got, ",") != c.want || status.Code(err) != c.code {
			t.Errorf("%s: %v, %v; want %s, %s", c.name, got, err, c.want, c.code)
		}
	}
}

// dial asks as the hubble command does: by gRPC at an HTTP server.
func dial(t *testing.T, h http.Handler) (*http.Server, *grpc.ClientConn) {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	pool := x509.NewCertPool()
	pool.AddCert(s.Certificate())
	creds := credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: "example.com", MinVersion: tls.VersionTLS12})
	conn, err := grpc.NewClient("passthrough:"+s.Listener.Addr().String(), grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return s.Config, conn
}

// Clients that follow leave places for short questions, and both of them for questions about nodes.
func TestPlaces(t *testing.T) {
	r := cluster(t, map[string]http.Handler{"a": node("a", 1)})
	_, conn := dial(t, NewHandler(r, nil))
	c := observer.NewObserverClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	flows := func(follow bool) error {
		stream, err := c.GetFlows(ctx, &observer.GetFlowsRequest{Number: 1, Follow: follow})
		if err == nil {
			_, err = stream.Recv()
		}
		for end := err; !follow && end == nil; { // its place is free at its end
			_, end = stream.Recv()
		}
		return err
	}
	for range maxFollows {
		if err := flows(true); err != nil {
			t.Fatal(err)
		}
	}
	if err := flows(true); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more that follows: %v", err)
	}
	if err := flows(false); err != nil {
		t.Errorf("a short question: %v", err)
	}
	for err := error(nil); err == nil; {
		var done func()
		if done, err = r.questions.Take(); err == nil {
			defer done()
		}
	}
	if err := flows(false); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a question too many: %v", err)
	}
	invalid := &observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{{HttpUrl: []string{"("}}}}
	if err := r.GetFlows(invalid, &client{ctx: ctx}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a filter is compiled without a place: %v", err)
	}
	if _, err := c.ServerStatus(ctx, &observer.ServerStatusRequest{}); err != nil {
		t.Errorf("the status: %v", err)
	}
}

// Streams do not hold the end of the server that they are at.
func TestStreamsEndWithTheServer(t *testing.T) {
	stop := make(chan struct{})
	server, conn := dial(t, NewHandler(cluster(t, map[string]http.Handler{"a": node("a", 1)}), stop))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	flows, err := observer.NewObserverClient(conn).GetFlows(ctx, &observer.GetFlowsRequest{Number: 1, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	alive, err := healthpb.NewHealthClient(conn).Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the flow and the lost ones
		if _, err := flows.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := alive.Recv(); err != nil {
		t.Fatal(err)
	}
	close(stop)
	_, ended := flows.Recv()
	_, dead := alive.Recv()
	for _, err := range []error{ended, dead} {
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the server shuts down") {
			t.Errorf("a stream ended with %v", err)
		}
	}
	if err := server.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}
