package served

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/listing"
	"github.com/fairlead/fairlead/internal/explain/routes"
)

// What is printed is bounded, with a count of the rest, and one line for each change whatever its text is.
func TestPrint(t *testing.T) {
	front := routes.Front{Front: "Gateway infra/web"}
	for i := range mostPrinted + 3 {
		c := routes.Change{Where: fmt.Sprintf("http://x%d.example/", i), Text: "no longer\x1b[1m served\n"}
		if i != mostPrinted {
			c.Cuts = "gone"
		}
		front.Changes = append(front.Changes, c)
	}
	var out strings.Builder
	Print(&out, []routes.Front{front})
	text := out.String()
	if n := strings.Count(text, "\n"); n != 1+1+2*mostPrinted+1 {
		t.Errorf("%d lines:\n%s", n, text)
	}
	for _, want := range []string{"\nGateway infra/web\n  http://x0.example/: no longer", "  ! CUT: gone\n",
		"  ... and 3 more, of which 2 cut requests or connections: -o json has all\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Error("a text of an object reaches the terminal as it is")
	}
	out.Reset()
	var many []routes.Front
	for i := range mostFronts + 2 {
		many = append(many, routes.Front{Front: fmt.Sprintf("Ingress shop/x%d at its front", i), Changes: front.Changes[:1]})
	}
	Print(&out, many)
	if text := out.String(); !strings.HasSuffix(text, "\n... and 2 more fronts, of which 2 cut requests or connections: -o json has all\n") ||
		strings.Count(text, "at its front") != mostFronts {
		t.Errorf("many fronts:\n%s", text)
	}
}

// When the time is over, an error names each kind that was not read, and none that was.
func TestLate(t *testing.T) {
	config := apiservertest.StartServer(t).LoopbackConfig()
	late, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	routes := func(after ...any) *Routes {
		s := &Routes{Client: kubernetes.NewForConfigOrDie(config), Config: config, Reader: listing.New([]string{"default"}, nil)}
		s.Reader.Expect(All)
		for _, o := range after {
			s.Add(nil, o, true)
		}
		return s
	}
	name := metav1.ObjectMeta{Namespace: "default", Name: "x"}
	in := &networkingv1.Ingress{ObjectMeta: name, Spec: networkingv1.IngressSpec{TLS: []networkingv1.IngressTLS{{SecretName: "cert"}}}}
	route := &gwv1.HTTPRoute{ObjectMeta: name}
	for want, s := range map[string]*Routes{
		"not read: IngressClasses (only 0), Ingresses, ReferenceGrants, Secrets and ConfigMaps that these name. Give": routes(in),
		"not read: IngressClasses (only 0), ReferenceGrants, GatewayClasses, Gateways, ListenerSets, HTTPRoutes, GRPCRoutes, TLSRoutes, " +
			"TCPRoutes, UDPRoutes, BackendTLSPolicies, Namespaces, Secrets and ConfigMaps that these name. Give": routes(route),
	} {
		_, err := s.Fronts(late)
		if err = s.Reader.Late(late, err, time.Second); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	for want, s := range map[string]*Routes{
		"would change; all was read, and not all compared. Give": routes(in, route),
		"would change. Give it more time":                        routes(&corev1.Pod{ObjectMeta: name}),
	} {
		if _, err := s.Fronts(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Reader.Late(late, context.DeadlineExceeded, time.Second); !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

// An object that does not exist has no certificates of authorities.
func TestNoAuthority(t *testing.T) {
	for _, o := range []any{(*corev1.ConfigMap)(nil), (*corev1.Secret)(nil), nil} {
		if text := authorityOf(o); text != nil {
			t.Errorf("%T has %q", o, text)
		}
	}
}
