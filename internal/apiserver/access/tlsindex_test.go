package access

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// By the annotations of a Service, nodes may read only Secrets and ConfigMaps of its namespace, and only if the Service is a front with an
// address or the headless Service of a ListenerSet or a BackendTLSPolicy.
func TestSecretsOfFronts(t *testing.T) {
	proxied := corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
		{IP: "192.0.2.1", IPMode: new(corev1.LoadBalancerIPModeProxy)}}}}
	for _, c := range []struct {
		name, namespace, service string
		spec                     corev1.ServiceSpec
		status                   corev1.ServiceStatus
		want                     string
	}{
		{"headless", "a", "x", corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone}, corev1.ServiceStatus{},
			"[a/secret/tls a/configmap/ca]"},
		{"a cluster IP", "a", "x", corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.0.0.1"}, corev1.ServiceStatus{}, "[]"},
		{"a front", "a", "x", corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}, proxied, "[a/secret/tls a/configmap/ca]"},
		{"without an address", "a", "x", corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}, corev1.ServiceStatus{}, "[]"},
		{"all Ingresses", metav1.NamespaceSystem, svc.IngressService, corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}, proxied,
			"[a/secret/tls b/secret/tls a/configmap/ca b/configmap/ca]"},
		{"headless in the name of all Ingresses", "a", svc.IngressService, corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone},
			corev1.ServiceStatus{}, "[a/secret/tls a/configmap/ca]"},
	} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: c.service, Annotations: map[string]string{
			svc.FrontSecretsAnnotation: "a/tls,b/tls,tls,,a/b/c", svc.FrontConfigMapsAnnotation: "a/ca,b/ca"}}, Spec: c.spec, Status: c.status}
		refs, err := toTLSRefs(s)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(refs.(*tlsRefs).fronts); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
