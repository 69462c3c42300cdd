package web

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
)

// secureWeb is a Pod that serves HTTP/1.1 and HTTP/2 with TLS, and answers with the version.
func (r *rig) secureWeb(c *tls.Config) netip.AddrPort {
	r.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		_, _ = io.WriteString(w, q.Proto)
	}))
	s.TLS, s.EnableHTTP2 = c, true
	s.StartTLS()
	r.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

// Pods are verified by the certificates and the name that the Service tells, for requests, connections and health checks, and have the
// certificate that they ask for (behaviour 116).
func TestPodsAreVerified(t *testing.T) {
	pod, podPEM, _ := lbtest.Certificate(t, "web.default.svc")
	_, otherPEM, _ := lbtest.Certificate(t, "web.default.svc")
	client, clientPEM, _ := lbtest.Certificate(t, "lb")
	asking := &tls.Config{Certificates: []tls.Certificate{pod}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: lbtest.Pool(clientPEM)}
	for _, c := range []struct {
		what   string
		roots  *x509.CertPool
		name   string
		cert   *tls.Certificate
		asking bool
		works  bool
	}{
		{"the right authority and name", lbtest.Pool(podPEM), "", nil, false, true},
		{"no authority", nil, "", nil, false, true},
		{"another authority", lbtest.Pool(otherPEM), "", nil, false, false},
		{"another name", lbtest.Pool(podPEM), "other.default.svc", nil, false, false},
		{"a certificate for the Pod", lbtest.Pool(podPEM), "web.default.svc", &client, true, true},
		{"no certificate for the Pod", lbtest.Pool(podPEM), "", nil, true, false},
	} {
		for protocol, backend := range map[string]string{"http": "https", "tcp": "tls"} {
			r := newRig(t, map[string]string{lbProtocol: protocol, lbBackend: backend})
			r.service.PodRoots, r.service.PodCertificate, r.service.Spec.BackendTLS.ServerName = c.roots, c.cert, c.name
			config := &tls.Config{Certificates: []tls.Certificate{pod}}
			if c.asking {
				config = asking
			}
			at := r.secureWeb(config.Clone())
			r.set(at)
			answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(httptest.NewRequest(http.MethodGet, "http://"+r.At.String(), nil))
			works := err == nil && answer.StatusCode == http.StatusOK
			if works != c.works || err == nil && !works && answer.StatusCode != http.StatusBadGateway {
				t.Errorf("%s, %s: %v, %v", c.what, protocol, answer, err)
			}
			check := pods.Checks{
				Health: dialect.Health{Protocol: dialect.HTTPS, Timeout: dialect.Duration(lbtest.Patience)}, TLS: r.service.PodTLS(),
			}
			if err := check.Probe(t.Context(), at); (err == nil) != c.works {
				t.Errorf("%s: a health check: %v", c.what, err)
			}
		}
	}
}

// gRPC goes on to Pods with TLS by HTTP/2, as any request that comes so; one of HTTP/1.1 goes on by that.
func TestHTTP2ToPodsWithTLS(t *testing.T) {
	cert, certPEM, _ := lbtest.Certificate(t, "web.default.svc")
	r := newRig(t, map[string]string{lbProtocol: "https", lbBackend: "https", dialect.LBTLSSecrets: "a"})
	r.service.Certificates, r.service.PodRoots = []tls.Certificate{cert}, lbtest.Pool(certPEM)
	r.set(r.secureWeb(&tls.Config{Certificates: []tls.Certificate{cert}}))
	trust := &tls.Config{RootCAs: r.service.PodRoots, ServerName: "web.default.svc"}
	for _, second := range []bool{false, true} {
		tr := &http.Transport{TLSClientConfig: trust.Clone(), ForceAttemptHTTP2: second}
		answer, err := tr.RoundTrip(httptest.NewRequest(http.MethodGet, "https://"+r.At.String(), nil))
		r.Must(err)
		body, err := io.ReadAll(answer.Body)
		r.Must(err)
		_ = answer.Body.Close()
		tr.CloseIdleConnections()
		if want := map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"}[second]; answer.Proto != want || string(body) != want {
			t.Errorf("%s: the Pod has %s, want %s", answer.Proto, body, want)
		}
	}
	server, l := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}}))), r.Listener()
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	r.set(netip.MustParseAddrPort(l.Addr().String()))
	conn, err := grpc.NewClient("passthrough:///"+r.At.String(), grpc.WithTransportCredentials(credentials.NewTLS(trust)), grpc.WithNoProxy())
	r.Must(err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), lbtest.Patience)
	defer cancel()
	asks := grpc_health_v1.NewHealthClient(conn)
	const serving = grpc_health_v1.HealthCheckResponse_SERVING
	if got, err := asks.Check(ctx, &grpc_health_v1.HealthCheckRequest{}); err != nil || got.Status != serving {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := asks.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "x"}); !strings.Contains(fmt.Sprint(err), "NotFound") {
		t.Errorf("an error of the Pod's is %v", err)
	}
	stream, err := asks.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
	r.Must(err)
	if got, err := stream.Recv(); err != nil || got.Status != serving {
		t.Errorf("a stream: %v, %v", got, err)
	}
}
