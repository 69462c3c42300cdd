package userspace

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// behaviours 43, 176: whoever looks at the Service learns that its SCTP port is not
// served, and its other port is.
func TestSCTPServiceGetsAnEvent(t *testing.T) {
	e := flows.NewEnv(t, create)
	meta := metav1.ObjectMeta{Namespace: "default", Name: "signal", UID: "1",
		Labels: map[string]string{discoveryv1.LabelServiceName: "signal"}}
	service := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
	}}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{e.Host("a").Addr4().String()}}}}
	for _, p := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolSCTP} {
		name, port := strings.ToLower(string(p)), int32(9376)
		service.Spec.Ports = append(service.Spec.Ports, corev1.ServicePort{Name: name, Protocol: p, Port: 80})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &p, Port: &port})
	}
	client := fake.NewClientset(service, slice)
	p, err := proxy.New(proxy.Options{Client: client, NodeName: "node", Dataplane: e.Dataplane, Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go e.Node.Do(func() { ended <- p.Run(ctx) })
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	for deadline := time.Now().Add(30 * time.Second); ; {
		events, err := client.CoreV1().Events("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(events.Items) > 0 {
			got := events.Items[0]
			if got.InvolvedObject.Name != "signal" || got.Type != corev1.EventTypeWarning || !strings.Contains(got.Message, "default/signal:sctp") ||
				!strings.Contains(got.Message, "SCTP") {
				t.Errorf("event %+v", got)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no event")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if got, err := e.Host("c").Ask(ctx, svc.TCP, vip); err != nil || got.Name != "a" {
		t.Errorf("the TCP port: %+v, %v", got, err)
	}
}
