package web

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// front makes the Service of a rig the front of a Gateway with routes. pods are those of Services with port 80.
func (r *rig) front(pods map[string]netip.AddrPort, routes ...string) {
	r.Helper()
	g := &gwv1.Gateway{}
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: shop, namespace: default}\nspec: {gatewayClassName: fairlead, listeners: ["+
		"{name: l, port: "+portOf(r.At)+", protocol: HTTP}]}"), g))
	o := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{svc.NameOf(g): g}, Routes: map[svc.Name]*gwv1.HTTPRoute{},
		Calls: map[svc.Name]*gwv1.GRPCRoute{}, Services: map[svc.Name]*services.Service{},
	}
	for _, text := range routes {
		if strings.Contains(text, "kind: GRPCRoute") {
			route := &gwv1.GRPCRoute{}
			r.Must(yaml.UnmarshalStrict([]byte(text), route))
			o.Calls[svc.NameOf(route)] = route
			continue
		}
		route := &gwv1.HTTPRoute{}
		r.Must(yaml.UnmarshalStrict([]byte(text), route))
		o.Routes[svc.NameOf(route)] = route
	}
	for name := range pods {
		ports := []services.Port{{Number: 80, Protocol: r.appProtocol}}
		o.Services[svc.Name{Namespace: "default", Name: name}] = &services.Service{Ports: ports}
	}
	f := gateway.BuildGateway(o, svc.NameOf(g), nil)
	r.service.Routes = &proxied.Routes{Ports: f.Table.Ports, Targets: map[gateway.Target][]netip.AddrPort{}}
	for _, t := range f.Targets {
		r.service.Routes.Targets[t] = []netip.AddrPort{pods[t.Name.Name]}
	}
	r.service.Spec.Listeners[0].Protocol = "http"
	r.set()
}

func portOf(a netip.AddrPort) string { return a.String()[strings.LastIndexByte(a.String(), ':')+1:] }

// healthPod is a Pod of gRPC. It answers with its name as a field, and a stream with as many messages as it has got fields x-n.
type healthPod struct {
	grpc_health_v1.UnimplementedHealthServer
	name string
}

func (p *healthPod) Check(ctx context.Context, q *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	in, _ := metadata.FromIncomingContext(ctx)
	_ = grpc.SetHeader(ctx, metadata.Pairs("pod", p.name, "saw", strings.Join(in.Get("x-set"), ",")))
	_ = grpc.SetTrailer(ctx, metadata.Pairs("end", "of "+p.name))
	if q.Service == "slow" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if q.Service == "missing" {
		return nil, status.Error(codes.NotFound, "no such service")
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

func (p *healthPod) Watch(q *grpc_health_v1.HealthCheckRequest, s grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse]) error {
	for n := 0; n < 3 || q.Service == "endless"; n++ {
		if err := s.Send(&grpc_health_v1.HealthCheckResponse{}); err != nil {
			return err
		}
	}
	return status.Error(codes.Aborted, "after three")
}

func (r *rig) grpcPod(name string, options ...grpc.ServerOption) netip.AddrPort {
	r.Helper()
	l := r.Listener()
	s := grpc.NewServer(options...)
	grpc_health_v1.RegisterHealthServer(s, &healthPod{name: name})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	r.Cleanup(func() {
		s.Stop()
		<-done
	})
	return netip.MustParseAddrPort(l.Addr().String())
}

// unknownTo answers calls of other services, and tells about the first one.
func unknownTo(first chan<- string) grpc.ServerOption {
	return grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		q := &grpc_health_v1.HealthCheckRequest{}
		if err := s.RecvMsg(q); err != nil {
			return err
		}
		select {
		case first <- method + " " + q.Service:
		default:
		}
		return s.SendMsg(&grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_NOT_SERVING})
	})
}

// exampleOf returns the example of docs/gateway.md.
func exampleOf(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../../../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(page), "<!-- run by internal/lb/proxied/web/grpc_test.go -->\n```yaml\n")
	text, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatal("docs/gateway.md has no example of gRPC")
	}
	return strings.Replace(text, "{name: rpc}", "{name: rpc, namespace: default}", 1)
}

// Calls of a client of gRPC go where a GRPCRoute leads each of them, with fields, trailers and streams; what it does not lead
// anywhere is UNIMPLEMENTED to the client, and what has no backend UNAVAILABLE.
func TestCallsAreRouted(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pods := map[string]netip.AddrPort{"a": r.grpcPod("a"), "b": r.grpcPod("b")}
	r.front(pods, `
kind: GRPCRoute
metadata: {name: r, namespace: default}
spec:
  parentRefs: [{name: shop}]
  rules:
  - matches: [{method: {service: grpc.health.v1.Health, method: Check}}]
    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-set, value: by rule}]}}]
    backendRefs: [{name: a, port: 80}]
  - matches: [{method: {service: grpc.health.v1.Health, method: Check}, headers: [{name: version, value: "2"}]}]
    backendRefs: [{name: b, port: 80}]
  - matches: [{method: {service: grpc.health.v1.Health, method: Check}, headers: [{name: version, value: "3"}, {name: x, value: "1"}]}]
    backendRefs: [{name: none, port: 80}]
  - matches: [{method: {method: Watch}}]
    backendRefs: [{name: b, port: 80}]`)
	conn, err := grpc.NewClient("passthrough:///"+r.At.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	r.Must(err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	client := grpc_health_v1.NewHealthClient(conn)
	check := func(service string, pairs ...string) string {
		var head, end metadata.MD
		_, err := client.Check(metadata.AppendToOutgoingContext(ctx, pairs...), &grpc_health_v1.HealthCheckRequest{Service: service},
			grpc.Header(&head), grpc.Trailer(&end))
		return strings.Join([]string{status.Code(err).String(), strings.Join(head.Get("pod"), ""), strings.Join(head.Get("saw"), ""),
			strings.Join(end.Get("end"), "")}, "|")
	}
	for _, c := range []struct {
		service string
		fields  []string
		want    string
	}{
		{"", nil, "OK|a|by rule|of a"},
		{"missing", nil, "NotFound|a|by rule|of a"},
		{"", []string{"version", "2"}, "OK|b||of b"},
		{"", []string{"version", "3", "x", "1"}, "Unavailable|||"},
	} {
		if got := check(c.service, c.fields...); got != c.want {
			t.Errorf("%q %v: %s, want %s", c.service, c.fields, got, c.want)
		}
	}
	if err := conn.Invoke(ctx, "/other.Service/Check", &grpc_health_v1.HealthCheckRequest{}, &grpc_health_v1.HealthCheckResponse{}); status.
		Code(err) != codes.Unimplemented {
		t.Errorf("a method that no rule is for: %v", err)
	}
	s, err := client.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
	r.Must(err)
	n := 0
	for ; err == nil; n++ {
		_, err = s.Recv()
	}
	if n != 4 || status.Code(err) != codes.Aborted {
		t.Errorf("a stream: %d messages, %v", n-1, err)
	}
	cart, cartNext := make(chan string, 1), make(chan string, 1)
	r.front(map[string]netip.AddrPort{
		"web": pods["b"], "cart": r.grpcPod("cart", unknownTo(cart)), "cart-next": r.grpcPod("cart-next", unknownTo(cartNext)),
	}, exampleOf(t))
	if got := check(""); got != "Unimplemented|||" {
		t.Errorf("the example, for another host: %s", got)
	}
	named, err := grpc.NewClient("passthrough:///"+r.At.String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("rpc.example.com"))
	r.Must(err)
	defer named.Close()
	head := metadata.MD{}
	_, err = grpc_health_v1.NewHealthClient(named).Check(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.Header(&head))
	if err != nil || strings.Join(head.Get("pod"), "") != "b" {
		t.Errorf("the example: %v, from Pod %v", err, head.Get("pod"))
	}
	for n := 0; r.mirroredCount("answered") == 0; n++ { // one of ten is copied
		var out grpc_health_v1.HealthCheckResponse
		err := named.Invoke(ctx, "/shop.Cart/Add", &grpc_health_v1.HealthCheckRequest{Service: "tea"}, &out)
		if err != nil || out.Status != grpc_health_v1.HealthCheckResponse_NOT_SERVING || n == 2000 {
			t.Fatalf("call %d of the example's cart: %v, %v", n, &out, err)
		}
	}
	for name, got := range map[string]chan string{"cart": cart, "cart-next": cartNext} {
		if got := testbed.Receive(t, "a call of "+name, got); got != "/shop.Cart/Add tea" {
			t.Errorf("%s has got %s", name, got)
		}
	}
	r.front(map[string]netip.AddrPort{"a": r.Free()}, `
kind: GRPCRoute
metadata: {name: r, namespace: default}
spec: {parentRefs: [{name: shop}], rules: [{backendRefs: [{name: a, port: 80}]}]}`)
	if got := check(""); got != "Unavailable|||" {
		t.Errorf("without a Pod: %s", got)
	}
}

// A call of a GRPCRoute ends when its grpc-timeout is over, also for a client that does not look at the clock itself: it is told
// DEADLINE_EXCEEDED, or its stream ends. That is not the Pod's fault. A timeout of the Gateway that is shorter counts before.
func TestDeadlinesOfCalls(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-eject": "errors=1", "fairlead.dev/lb-request-timeout": "2"})
	r.front(map[string]netip.AddrPort{"a": r.grpcPod("a"), "dark": r.dark()}, `
kind: GRPCRoute
metadata: {name: r, namespace: default}
spec: {parentRefs: [{name: shop}], rules: [
  {backendRefs: [{name: a, port: 80}]}, {matches: [{method: {method: Dark}}], backendRefs: [{name: dark, port: 80}]}]}`)
	client := r.clientOf(2)
	for _, c := range []struct{ method, service, timeout, want string }{
		{"Dark", "", "100m", "200 4 in time"}, // no connection is made
		{"Check", "slow", "100m", "200 4 in time"},
		{"Check", "slow", "50m", "200 4 in time"},
		{"Check", "", "30S", "200 0 in time"}, // the Pod is not ejected
		{"Check", "", "x", "400 13 in time"},  // by the Pod
		{"Watch", "endless", "100m", "200  in time, cut off"},
		{"Check", "slow", "30S", "504  late"},
	} {
		message := append([]byte{0x0a, byte(len(c.service))}, c.service...)
		body := append([]byte{0, 0, 0, 0, byte(len(message))}, message...)
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.At.String()+"/grpc.health.v1.Health/"+c.method,
			bytes.NewReader(body))
		r.Must(err)
		q.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}, "Grpc-Timeout": {c.timeout}}
		began := time.Now()
		answer, err := client.Do(q)
		r.Must(err)
		_, cut := io.Copy(io.Discard, answer.Body)
		r.Must(answer.Body.Close())
		got := fmt.Sprint(answer.StatusCode, " ", answer.Header.Get("Grpc-Status")+answer.Trailer.Get("Grpc-Status"), " in time")
		if time.Since(began) >= 2*time.Second {
			got = strings.Replace(got, "in time", "late", 1)
		}
		if cut != nil {
			got += ", cut off"
		}
		if got != c.want {
			t.Errorf("%s of %q within %s: %s, want %s", c.method, c.service, c.timeout, got, c.want)
		}
	}
}
