package gateway

import (
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// An Ingress has certificates ordered for the hosts of its namespace only, although all Ingresses share an address at which an authority
// finds every host.
func TestOrdersOfIngresses(t *testing.T) {
	ingress := func(namespace, name, at, annotation, host, secret string) string {
		return fmt.Sprintf("kind: Ingress\nmetadata: {name: %s, namespace: %s, creationTimestamp: %q, annotations: {fairlead.dev/acme: %q}}\n"+
			"spec:\n  tls: [{hosts: [%q], secretName: %s}]\n  rules: [{host: %q, http: {paths: [{path: /, pathType: Prefix, "+
			"backend: {service: {name: s, port: {number: 80}}}}]}}]", name, namespace, at, annotation, host, secret, host)
	}
	const early, late = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
	f := BuildIngress(objects(t, strings.Join([]string{
		ingress("a", "own", early, "http-01", "shop.example.com", "shop"),
		ingress("b", "thief", late, "http-01", "shop.example.com", "stolen"),
		ingress("b", "below", late, "http-01", "b.example.com", "below"),
		ingress("b", "wild", late, "tls-alpn-01", "*.wild.example.com", "wild"),
		ingress("b", "zone", late, "dns-01", "*.zone.example.com", "zone"),
		ingress("b", "slip", late, "htp-01", "slip.example.com", "slip"),
		ingress("b", "none", late, "", "none.example.com", "none"),
		ingress("b", "bare", late, "http-01", "localhost", "bare"),
		"kind: Service\nmetadata: {name: s, namespace: a}\nspec: {ports: [{port: 80}]}",
		"kind: Service\nmetadata: {name: s, namespace: b}\nspec: {ports: [{port: 80}]}",
	}, "\n---\n")), nil)
	if got := fmt.Sprint(f.Orders.In("")); got != "[a/shop b/below b/zone]" {
		t.Errorf("orders %s", got)
	}
	if got := fmt.Sprint(f.Orders.Answering()); got != "map[b.example.com:b/below shop.example.com:a/shop]" {
		t.Errorf("answering %s", got)
	}
	for name, want := range map[string]string{
		"thief": "belongs to an older Ingress", "wild": "an authority verifies *.wild.example.com only by dns-01",
		"slip": "want one of dns-01, http-01, tls-alpn-01; no certificate is ordered", "bare": "is not a host name with a domain",
		"none": "does not exist",
	} {
		if got := f.Problems[svc.Name{Namespace: "b", Name: name}]; !strings.Contains(got, want) {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := f.Problems[svc.Name{Namespace: "a", Name: "own"}]; got != "" {
		t.Errorf("a Secret that is being made: %q", got)
	}
}

// The listeners of a Gateway have their certificates ordered at the port where an authority asks, and keep a port for that without a
// certificate.
func TestOrdersOfListeners(t *testing.T) {
	gateway := func(listeners, challenge string) *Front {
		return BuildGateway(objects(t, "kind: Gateway\nmetadata: {name: g, annotations: {fairlead.dev/acme: "+challenge+"}}\n"+
			"spec: {gatewayClassName: fairlead, listeners: ["+listeners+"]}"), svc.Name{Namespace: "default", Name: "g"}, nil)
	}
	https := "{name: s, port: 443, protocol: HTTPS, hostname: a.example.com, tls: {certificateRefs: [{name: x}]}}"
	for _, c := range []struct{ listeners, challenge, want string }{
		{https, "http-01", ""},
		{https, "tls-alpn-01", ""},
		{"{name: s, port: 8443, protocol: HTTPS, hostname: a.example.com, tls: {certificateRefs: [{name: x}]}}", "http-01", "port: want 443"},
		{"{name: s, port: 8443, protocol: HTTPS, hostname: a.example.com, tls: {certificateRefs: [{name: x}]}}", "dns-01", ""},
		{"{name: s, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: x}]}}", "http-01", "no host is named"},
		{https + ", {name: t, port: 80, protocol: TCP}", "http-01", "port 80 is of another protocol than HTTP"},
		{https + ", {name: t, port: 80, protocol: TCP}", "tls-alpn-01", ""},
		{"{name: s, port: 443, protocol: TLS, hostname: a.example.com, tls: {mode: Terminate, certificateRefs: [{name: x}]}}", "http-01", ""},
	} {
		f := gateway(c.listeners, c.challenge)
		o := OrderedOf(f, svc.Name{})["s"]
		if (c.want == "") != (o.Problem == "") || !strings.Contains(o.Problem, c.want) || (c.want == "") != f.Orders.Has(o.Secret) {
			t.Errorf("%+v: %+v", c, o)
		}
		if open := len(f.Ports()) > strings.Count(c.listeners, "protocol: TCP"); open != (c.want == "") {
			t.Errorf("%+v: ports %v", c, f.Ports())
		}
	}
}
