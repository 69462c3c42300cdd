package networking

import (
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestIngressColumns(t *testing.T) {
	rules := func(hosts ...string) (out []networkingv1.IngressRule) {
		for _, h := range hosts {
			out = append(out, networkingv1.IngressRule{Host: h})
		}
		return out
	}
	i := &networkingv1.Ingress{}
	if got, want := ingressCells(i)[:4], []any{"<none>", "*", "", "80"}; !slices.Equal(got, want) {
		t.Errorf("empty: %q, want %q", got, want)
	}
	i.Spec = networkingv1.IngressSpec{IngressClassName: new("c"), Rules: rules("a", "b", "c", "d", "e"), TLS: []networkingv1.IngressTLS{{}}}
	i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{Hostname: "lb"}, {IP: "192.0.2.1"}, {IP: "192.0.2.1"}}
	if got, want := ingressCells(i)[:4], []any{"c", "a,b,c + 2 more...", "192.0.2.1,lb", "80, 443"}; !slices.Equal(got, want) {
		t.Errorf("full: %q, want %q", got, want)
	}
	c := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "c",
		Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: "true"}}}
	c.Spec.Controller = "example.com/x"
	c.Spec.Parameters = &networkingv1.IngressClassParametersReference{APIGroup: new("example.com"), Kind: "P", Name: "n"}
	if got, want := classCells(c)[:3], []any{"c (default)", "example.com/x", "P.example.com/n"}; !slices.Equal(got, want) {
		t.Errorf("class: %q, want %q", got, want)
	}
}
