package probe

import (
	"context"
	"net"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
)

// A gRPC probe asks the health service of a real server: of the whole, of one service,
// and of servers without it.
func TestGRPC(t *testing.T) {
	serve := func(register func(*grpc.Server), o ...grpc.ServerOption) int32 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer(o...)
		register(s)
		go func() { _ = s.Serve(l) }() // ends with Stop
		t.Cleanup(s.Stop)
		return int32(l.Addr().(*net.TCPAddr).Port)
	}
	state := health.NewServer()
	state.SetServingStatus("ill", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	with := serve(func(s *grpc.Server) { grpc_health_v1.RegisterHealthServer(s, state) })
	without := serve(func(*grpc.Server) {})
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS() // only for the certificate, which no authority has signed
	certificate.Close()
	secure := serve(func(s *grpc.Server) { grpc_health_v1.RegisterHealthServer(s, state) },
		grpc.Creds(credentials.NewServerTLSFromCert(&certificate.TLS.Certificates[0])))
	plain, tls := corev1.GRPCProbeModePlaintext, corev1.GRPCProbeModeTLS
	target := Target{IP: netip.MustParseAddr("127.0.0.1")}
	for _, c := range []struct {
		port    int32
		service string
		mode    *corev1.GRPCProbeMode
		want    string
	}{
		{with, "", nil, ""}, {with, "ill", nil, "NOT_SERVING"}, {with, "unknown", nil, "unknown service"},
		{without, "", nil, "grpc.health.v1.Health"}, {1, "", nil, "connection refused"},
		{with, "", &plain, ""}, {secure, "", &tls, ""}, {secure, "ill", &tls, "NOT_SERVING"}, {secure, "", nil, "error reading server preface"},
		{with, "", &tls, "authentication handshake failed"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		err := target.Once(ctx, corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: c.port, Service: &c.service, Mode: c.mode}})
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
