package networking

import (
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
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

// Who applies annotations that are not done is warned, once for each change, and in few words.
func TestIngressNginxWarnings(t *testing.T) {
	of := func(annotations map[string]string) *networkingv1.Ingress {
		i := &networkingv1.Ingress{Spec: networkingv1.IngressSpec{IngressClassName: new("nginx")}}
		i.Annotations = map[string]string{"example.com/x": "y"}
		for k, v := range annotations {
			i.Annotations[nginx.Prefix+k] = v
		}
		return i
	}
	warn := ingressRules().Warn
	if out := warn(of(nil), nil); out != nil {
		t.Errorf("%q", out)
	}
	if out := warn(of(map[string]string{"rewrite-target": "/$1", "proxy-body-size": "8m"}), nil); out != nil {
		t.Errorf("%q", out)
	}
	bad := of(map[string]string{
		"auth-url": "http://x.example.com", "proxy-buffering": "on", "server-alias": strings.Repeat("!,", 60), "typo": "x",
	})
	out := warn(bad, of(nil))
	if len(out) != maxNginxWarnings+1 || !strings.Contains(out[0], "auth-url") || !strings.Contains(out[0], "503") {
		t.Errorf("%q", out)
	}
	for _, text := range out {
		if len(text) > maxNginxWarningBytes {
			t.Errorf("%d bytes", len(text))
		}
	}
	if out := warn(bad, bad); out != nil {
		t.Errorf("again: %q", out)
	}
}

// Who asks for a front by a wrong value or a wrong name is warned: the Ingress has no address where fairlead serves it.
func TestFrontWarnings(t *testing.T) {
	warn := ingressRules().Warn
	of := func(key, value string) *networkingv1.Ingress {
		i := &networkingv1.Ingress{Spec: networkingv1.IngressSpec{IngressClassName: new("fairlead")}}
		i.Annotations = map[string]string{key: value}
		return i
	}
	for _, c := range []struct{ key, value, want string }{
		{"fairlead.dev/front", "own", ""}, {"fairlead.dev/front", "shared", ""}, {"example.com/front", "x", ""},
		{"fairlead.dev/front", "mine", "want one of own, shared"}, {"fairlead.dev/front", "", "want one of own, shared"},
		{"fairlead.dev/fronts", "own", "is fairlead.dev/front meant?"},
	} {
		i := of(c.key, c.value)
		if out := warn(i, nil); len(out) > 0 != (c.want != "") || c.want != "" && !strings.Contains(out[0], c.want) {
			t.Errorf("%s: %q: %q", c.key, c.value, out)
		}
		if out := warn(i, i); out != nil {
			t.Errorf("again: %q", out)
		}
	}
}
