package probe

import (
	"context"
	"crypto/tls"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// grpc asks the standard health service, grpc.health.v1.Health.
func (t Target) grpc(ctx context.Context, a *corev1.GRPCAction) error {
	addr, err := t.address("", intstr.FromInt32(a.Port))
	if err != nil {
		return err
	}
	security := insecure.NewCredentials()
	if a.Mode != nil && *a.Mode == corev1.GRPCProbeModeTLS {
		security = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}) // as for HTTPS
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(security), grpc.WithNoProxy(),
		grpc.WithUserAgent("kube-probe/fairlead"), grpc.WithDisableServiceConfig(), grpc.WithMaxHeaderListSize(maxHeader),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxBody)))
	if err != nil {
		return err
	}
	defer conn.Close()
	service := ""
	if a.Service != nil {
		service = *a.Service
	}
	answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	switch {
	case status.Code(err) == codes.Unimplemented:
		return fmt.Errorf("the server at %s does not have the service grpc.health.v1.Health: %w", addr, err)
	case err != nil:
		return fmt.Errorf("gRPC probe of service %q at %s: %w", service, addr, err)
	case answer.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING:
		return fmt.Errorf("gRPC probe: service %q answers %s, want SERVING", service, answer.GetStatus())
	}
	return nil
}
