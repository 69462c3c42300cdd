package admit

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// webhookService is a Service with one ready endpoint at the address, and one that is
// not ready.
func webhookService(clusterIP, endpoint string, port int32) serviceResolver {
	name, no := "https", false
	meta := metav1.ObjectMeta{Namespace: "ns", Name: "hook", Labels: map[string]string{discoveryv1.LabelServiceName: "hook"}}
	return serviceResolver{client: fake.NewClientset(
		&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{ClusterIP: clusterIP,
			Ports: []corev1.ServicePort{{Name: "other", Port: 80}, {Name: name, Port: 443}}}},
		&discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
			Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{endpoint}},
				{Addresses: []string{"127.0.0.9"}, Conditions: discoveryv1.EndpointConditions{Ready: &no}}}},
	)}
}

// Where the ClusterIP leads nowhere, an endpoint is reached.
func TestWebhookByEndpoint(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := int32(l.Addr().(*net.TCPAddr).Port)
	for _, clusterIP := range []string{"127.0.0.8", "None"} { // nothing listens at the first
		r := webhookService(clusterIP, "127.0.0.1", port)
		u, err := r.ResolveEndpoint("ns", "hook", 443)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := r.dial(t.Context(), "tcp", u.Host)
		if err != nil {
			t.Fatalf("ClusterIP %s: %v", clusterIP, err)
		}
		if got := conn.RemoteAddr().String(); got != l.Addr().String() {
			t.Errorf("ClusterIP %s: reached %s", clusterIP, got)
		}
		conn.Close()
	}
	l.Close()
	_, err = webhookService("127.0.0.8", "127.0.0.1", port).dial(t.Context(), "tcp", "hook.ns.svc:443")
	for _, want := range []string{"cannot reach Service ns/hook from the machine of the API server", "127.0.0.8:443", l.Addr().String()} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no listener: %v; want %q", err, want)
		}
	}
	if _, err := webhookService("127.0.0.8", "127.0.0.1", port).ResolveEndpoint("ns", "hook", 444); err == nil {
		t.Error("a port that the Service does not have was resolved")
	}
}

// A webhook of the API server itself is called at its own address, whatever the proxy
// and the endpoints of default/kubernetes are.
func TestWebhookOfTheServerItself(t *testing.T) {
	r := webhookService("127.0.0.8", "127.0.0.1", 1)
	r.self = "127.0.0.1:6443"
	if u, err := r.ResolveEndpoint("default", "kubernetes", 443); err != nil || u.String() != "https://127.0.0.1:6443" {
		t.Errorf("%v, %v", u, err)
	}
}

// An address that does not answer delays the next one only a little, and is given up
// with the first connection.
func TestDialStaggered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		defer there.Close()
		var ended error
		began := time.Now()
		conn, err := dialStaggered(t.Context(), []string{"silent", "bad", "good"}, func(ctx context.Context, a string) (net.Conn, error) {
			switch a {
			case "silent":
				<-ctx.Done()
				ended = ctx.Err()
				return nil, ended
			case "bad":
				return nil, errors.New("refused")
			}
			return here, nil
		})
		if err != nil || conn != here || time.Since(began) != webhookStagger {
			t.Errorf("%v, %v after %s", conn, err, time.Since(began))
		}
		synctest.Wait()
		if !errors.Is(ended, context.Canceled) {
			t.Errorf("the silent address is still dialled: %v", ended)
		}
		conn.Close()
	})
}
