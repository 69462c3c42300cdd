package tracing

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// meta are the metadata of an object at a version.
func meta(name, version string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: name, UID: "6f1c", ResourceVersion: version}
}

func service(name, version string) *corev1.Service {
	return &corev1.Service{ObjectMeta: meta(name, version)}
}

// recorded is a Tracer whose spans a test reads, of all changes or of a part.
func recorded(t *testing.T, sample float64) (*Tracer, *tracetest.InMemoryExporter) {
	t.Helper()
	to := tracetest.NewInMemoryExporter()
	tr, err := open(Options{Sample: sample, Service: "fairlead-test"}, newSender(keeping{to}, "memory", nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return tr, to
}

// keeping keeps the spans when it is shut down.
type keeping struct{ *tracetest.InMemoryExporter }

func (keeping) Shutdown(context.Context) error { return nil }

// spans are those sent until now.
func spans(t *testing.T, tr *Tracer, to *tracetest.InMemoryExporter) tracetest.SpanStubs {
	t.Helper()
	if err := tr.provider.ForceFlush(t.Context()); err != nil {
		t.Fatal(err)
	}
	return to.GetSpans()
}

// The spans of a server, of nodes and of the controllers meet in one trace, though none tells another its ID.
func TestSpansOfAChangeAreNested(t *testing.T) {
	server, atServer := recorded(t, 1)
	node, atNode := recorded(t, 1)
	s := service("web", "7")
	begin := time.Now()
	p := node.Pending("a", "nft")
	p.Seen(Service, s, false)
	server.Written(ChangeOf(Service, s), "create Service", begin, begin.Add(time.Millisecond))
	server.Acknowledged(ChangeOf(Service, s), begin, begin.Add(time.Second), 2)
	p.Reached(Reached{Services: 6, Slices: 9, Accepted: time.Now()})
	if got := spans(t, node, atNode); len(got) != 0 {
		t.Errorf("version 7 is not programmed, and has the spans %v", got)
	}
	accepted := time.Now()
	p.Reached(Reached{Services: 7, Begun: accepted.Add(-time.Millisecond), Accepted: accepted})
	p.Reached(Reached{Services: 8, Accepted: time.Now()})

	written, programmed := spans(t, server, atServer), spans(t, node, atNode)
	if len(written) != 2 || len(programmed) != 1 {
		t.Fatalf("the server has sent %d spans, the node %d", len(written), len(programmed))
	}
	root, child, ack := written[0], programmed[0], written[1]
	// SHA-256 of "6f1c/7", as any other program derives it.
	if id := root.SpanContext.TraceID().String() + root.SpanContext.SpanID().String(); !strings.HasPrefix(hash7, id) {
		t.Errorf("the IDs are %s; want the begin of %s", id, hash7)
	}
	if root.Parent.IsValid() || root.Name != "create Service" {
		t.Errorf("the root is %+v", root)
	}
	for _, c := range []tracetest.SpanStub{child, ack} {
		if c.SpanContext.TraceID() != root.SpanContext.TraceID() || c.Parent.SpanID() != root.SpanContext.SpanID() ||
			c.SpanContext.SpanID() == root.SpanContext.SpanID() {
			t.Errorf("%s is %v below %v; want below %v", c.Name, c.SpanContext, c.Parent, root.SpanContext)
		}
	}
	if child.EndTime.Compare(accepted) != 0 || child.StartTime.Before(begin) || len(child.Events) != 1 || child.Status.Code != codes.Unset {
		t.Errorf("the node's span is %+v", child)
	}
	has := map[string]string{}
	for _, a := range child.Attributes {
		has[string(a.Key)] = a.Value.String()
	}
	if diff := cmp.Diff(map[string]string{
		"k8s.object.kind": "Service", "k8s.object.name": "web", "k8s.namespace.name": "default", "k8s.object.uid": "6f1c",
		"k8s.object.resource_version": "7", "k8s.node.name": "a", "fairlead.mode": "nft", "fairlead.deleted": "false",
		"fairlead.failed_attempts": "0",
	}, has); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
}

// hash7 is what sha256sum prints for 6f1c/7.
const hash7 = "22ee449c619bf02a53d96ea6e50e22f42ef113bcb83672a7df60afd612f5f9e7"

// What the kernel does not take ends with what is wrong; a slice ends with its Service.
func TestSpansTellWhatIsWrong(t *testing.T) {
	tr, to := recorded(t, 1)
	p := tr.Pending("a", "nft")
	p.Seen(Service, service("web", "7"), false)
	slice := &discoveryv1.EndpointSlice{ObjectMeta: meta("web-x", "8")}
	slice.Labels = map[string]string{discoveryv1.LabelServiceName: "web"}
	p.Seen(EndpointSlice, slice, true)
	p.Failed(errors.New("no buffer space"))
	p.Seen(Service, service("other", "9"), false)
	p.Reached(Reached{Services: 9, Slices: 8, Rejected: map[string]string{"default/web": "port taken"}, Accepted: time.Now()})
	got := spans(t, tr, to)
	if len(got) != 3 {
		t.Fatalf("%d spans", len(got))
	}
	for i, want := range []string{"rejected: port taken 1 no buffer space false", "rejected: port taken 1 no buffer space true", " 0  false"} {
		has := map[string]string{}
		for _, a := range got[i].Attributes {
			has[string(a.Key)] = a.Value.String()
		}
		text := fmt.Sprint(got[i].Status.Description, " ", has["fairlead.failed_attempts"], " ", has["fairlead.last_error"], " ",
			has["fairlead.deleted"])
		if text != want {
			t.Errorf("span %d: %q, want %q", i, text, want)
		}
	}
}

// A node that programs nothing keeps a bounded number of changes for a bounded time.
func TestPendingIsBounded(t *testing.T) {
	tr, to := recorded(t, 1)
	p := tr.Pending("a", "nft")
	for i := range maxPending + 100 {
		p.Seen(Service, service("web", fmt.Sprint(i+1)), false)
	}
	if len(p.waiting) != maxPending {
		t.Errorf("%d changes wait", len(p.waiting))
	}
	for i := range p.waiting[:10] {
		p.waiting[i].seen = time.Now().Add(-maxAge)
	}
	p.Seen(Service, service("web", "5000"), false)
	if len(p.waiting) != maxPending-9 || p.waiting[0].version != 11 || p.waiting[maxPending-10].version != 5000 {
		t.Errorf("%d changes wait after 10 were too old, from %d on", len(p.waiting), p.waiting[0].version)
	}
	got := spans(t, tr, to)
	if len(got) != 10 || got[0].Status.Code != codes.Error || got[0].Status.Description != "not programmed after 10m0s" {
		t.Errorf("the old ones have the spans %v", got)
	}
	p.Reached(Reached{Services: 6000, Accepted: time.Now()})
	if p.waiting != nil {
		t.Errorf("%d changes wait that are programmed", len(p.waiting))
	}
}

// All decide by the change which are sampled, and about the part that was asked for is.
func TestAllSampleTheSame(t *testing.T) {
	a, _ := recorded(t, 0.25)
	b, to := recorded(t, 0.25)
	p := b.Pending("b", "nft")
	n := 0
	for i := range 2000 {
		s := service("web", fmt.Sprint(i+1))
		if a.Sampled(ChangeOf(Service, s)) {
			n++
		}
		p.Seen(Service, s, false)
		p.Reached(Reached{Services: uint64(i + 1), Accepted: time.Now()})
	}
	if n < 400 || n > 600 {
		t.Errorf("%d of 2000 changes are sampled, for 0.25", n)
	}
	got := spans(t, b, to)
	if len(got) != n {
		t.Errorf("one samples %d, another %d", n, len(got))
	}
	for _, s := range got {
		id := identity{trace: s.SpanContext.TraceID()}
		if !a.sampled(id) {
			t.Errorf("%s is sampled by one of them", id.trace)
		}
	}
}

// Without a collector nothing is done and nothing allocated.
func TestNoTracerCostsNothing(t *testing.T) {
	for _, o := range []Options{{Sample: 1}, {Endpoint: "http://127.0.0.1:4317"}} {
		tr, err := Open(o)
		if err != nil || tr != nil {
			t.Fatalf("%+v: %v, %v", o, tr, err)
		}
	}
	var tr *Tracer
	p, s, now := tr.Pending("a", "nft"), service("web", "7"), time.Now()
	c := ChangeOf(Service, s)
	if n := testing.AllocsPerRun(100, func() {
		p.Seen(Service, s, false)
		p.Failed(nil)
		p.Reached(Reached{})
		tr.Written(c, "create Service", now, now)
		tr.Acknowledged(c, now, now, 1)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if tr.Sampled(c) {
		t.Error("nothing is sampled without a collector")
	}
	tr.Close()
}

func TestCheckOptions(t *testing.T) {
	for _, good := range []string{"", "https://collector:4317", "http://[::1]:4317", "http://127.0.0.1:4317/"} {
		if err := (&Options{Endpoint: good, Sample: 1}).Check(); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{
		"collector:4317", "collector", "https://collector", "grpc://a:1", "https://:4317", "http://a:1/v1/traces", "http://u@a:1", "http://a:1?b",
	} {
		if err := (&Options{Endpoint: bad, Sample: 1}).Check(); err == nil || !strings.Contains(err.Error(), "--otlp-endpoint") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	var zero float64
	for _, bad := range []float64{-0.1, 1.1, zero / zero} {
		if err := (&Options{Sample: bad}).Check(); err == nil || !strings.Contains(err.Error(), "--otlp-sample") {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

// broken fails a number of times, with an error.
type broken struct {
	sdktrace.SpanExporter
	mu    sync.Mutex
	err   error
	times int
	tried int
}

func (b *broken) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tried++; b.tried <= b.times {
		return b.err
	}
	return nil
}

// A collector that is away is tried again, which is logged once; one that rejects spans is not asked for them again.
func TestSenderTriesAgain(t *testing.T) {
	for _, c := range []struct {
		err  error
		log  string
		want int
	}{
		{status.Error(grpccodes.Unavailable, "no route"), "cannot send spans to there: rpc error: code = Unavailable desc = no route; " +
			"retrying in 1ms|spans are sent again", 5},
		{status.Error(grpccodes.PermissionDenied, "no"), "cannot send spans to there: rpc error: code = PermissionDenied desc = no; " +
			"these are dropped", 1},
		{errors.New("partial"), "cannot send spans to there: partial; these are dropped", 1},
	} {
		var log bytes.Buffer
		b := &broken{err: c.err, times: 4}
		s := newSender(b, "there", slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key != slog.MessageKey {
				return slog.Attr{}
			}
			return a
		}})))
		s.retryMin, s.wait = time.Millisecond, time.Millisecond
		if err := s.ExportSpans(t.Context(), nil); err != nil {
			t.Error(err)
		}
		text := strings.NewReplacer(`msg=`, "", `"`, "").Replace(strings.TrimSpace(log.String()))
		if got := strings.ReplaceAll(text, "\n", "|"); got != c.log || b.tried != c.want {
			t.Errorf("%v: tried %d times, logged %s", c.err, b.tried, got)
		}
		s.cancel()
	}
}

// A process ends soon though its collector is away.
func TestCloseIsBounded(t *testing.T) {
	b := &broken{err: status.Error(grpccodes.Unavailable, "no route"), times: 1 << 30}
	s := newSender(keeping{}, "there", nil)
	s.next = closing{b}
	tr, err := open(Options{Sample: 1}, s)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for i := range 2 * queueSize {
		tr.Written(ChangeOf(Service, service("web", fmt.Sprint(i+1))), "create Service", now, now)
	}
	tr.Close()
	if took := time.Since(now); took > 2*flushTimeout {
		t.Errorf("it took %s to end", took)
	}
}

type closing struct{ *broken }

func (closing) Shutdown(context.Context) error { return nil }

// receiver is the gRPC service of a collector.
type receiver struct {
	collector.UnimplementedTraceServiceServer
	got chan *collector.ExportTraceServiceRequest
}

func (r receiver) Export(_ context.Context, in *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	r.got <- in
	return &collector.ExportTraceServiceResponse{}, nil
}

// Spans arrive by OTLP over gRPC, also when the process is about to end. With TLS the environment names the authority and the headers:
// https://opentelemetry.io/docs/specs/otel/protocol/exporter/
func TestSpansArrive(t *testing.T) {
	t.Run("http", func(t *testing.T) { arrives(t, "http://") })
	t.Run("https", func(t *testing.T) {
		web := httptest.NewTLSServer(nil) // it has a certificate of 127.0.0.1
		web.Close()
		authority := filepath.Join(t.TempDir(), "ca.crt")
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw})
		if err := os.WriteFile(authority, text, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", authority)
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer token")
		arrives(t, "https://", grpc.Creds(credentials.NewServerTLSFromCert(&web.TLS.Certificates[0])),
			grpc.UnaryInterceptor(func(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				if m, _ := metadata.FromIncomingContext(ctx); !slices.Equal(m["authorization"], []string{"Bearer token"}) {
					t.Errorf("the headers are %v", m)
				}
				return next(ctx, in)
			}))
	})
}

// arrives sends a span to a collector at a URL with a scheme.
func arrives(t *testing.T, scheme string, options ...grpc.ServerOption) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g, r := grpc.NewServer(options...), receiver{got: make(chan *collector.ExportTraceServiceRequest, 1)}
	collector.RegisterTraceServiceServer(g, r)
	served := make(chan error)
	go func() { served <- g.Serve(l) }()
	defer func() {
		g.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	tr, err := Open(Options{Endpoint: scheme + l.Addr().String(), Sample: 1, Service: "fairlead-server", Instance: "m", Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	tr.Written(ChangeOf(Service, service(strings.Repeat("long", 1000), "7")), "create Service", now, now.Add(time.Second))
	tr.Close()
	in := (<-r.got).ResourceSpans[0]
	s := in.ScopeSpans[0].Spans[0]
	if !strings.HasPrefix(hash7, hex.EncodeToString(s.TraceId)+hex.EncodeToString(s.SpanId)) || len(s.ParentSpanId) != 0 ||
		s.EndTimeUnixNano-s.StartTimeUnixNano != uint64(time.Second) {
		t.Errorf("it is %v", s)
	}
	for _, a := range s.Attributes {
		if a.Key == "k8s.object.name" && len(a.Value.GetStringValue()) != maxValue {
			t.Errorf("%s has %d bytes", a.Key, len(a.Value.GetStringValue()))
		}
	}
	if text := in.Resource.String(); !strings.Contains(text, "fairlead-server") || !strings.Contains(text, "service.instance.id") {
		t.Errorf("the process is %s", text)
	}
}
