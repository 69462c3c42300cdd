package probe

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
)

// A gRPC probe asks the health service of a real server: of the whole, of one service,
// and of servers without it.
func TestGRPC(t *testing.T) {
	serve := func(register func(*grpc.Server)) int32 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		register(s)
		go func() { _ = s.Serve(l) }() // ends with Stop
		t.Cleanup(s.Stop)
		return int32(l.Addr().(*net.TCPAddr).Port)
	}
	state := health.NewServer()
	state.SetServingStatus("ill", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	with := serve(func(s *grpc.Server) { grpc_health_v1.RegisterHealthServer(s, state) })
	without := serve(func(*grpc.Server) {})
	target := Target{IP: netip.MustParseAddr("127.0.0.1")}
	for _, c := range []struct {
		port    int32
		service string
		want    string
	}{
		{with, "", ""}, {with, "ill", "NOT_SERVING"}, {with, "unknown", "unknown service"}, {without, "", "grpc.health.v1.Health"},
		{1, "", "connection refused"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		err := target.Once(ctx, corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: c.port, Service: &c.service}})
		cancel()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("service %q: %v, want %q", c.service, err, c.want)
		}
	}
	state.Shutdown()
	if err := target.Once(t.Context(), corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: with}}); err == nil {
		t.Error("healthy after the server is not serving")
	}
}
