package loops

import (
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

func read[T any](t *testing.T, text string) *T {
	t.Helper()
	out := new(T)
	if err := yaml.UnmarshalStrict([]byte(text), out); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return out
}

const gatewayText = `
metadata: {name: g, namespace: shop}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: http, port: 80, protocol: HTTP}
  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: c}]}}
  - {name: tls, port: 8443, protocol: TLS, hostname: s.example, tls: {mode: Passthrough}}`

// A redirect is a loop if a client that follows it, and those after it, comes to the same place again, or to ever new ones. One to a host
// that nothing says is the front's is none, nor is one that ends.
func TestLoopsOfRoutes(t *testing.T) {
	to := func(redirect string) string {
		return "filters: [{type: RequestRedirect, requestRedirect: {" + redirect + "}}]"
	}
	const web = "backendRefs: [{name: web, port: 80}]"
	rule := func(path, does string) string { return "{matches: [{path: {value: " + path + "}}], " + does + "}" }
	full := func(path string) string { return to("path: {type: ReplaceFullPath, replaceFullPath: " + path + "}") }
	prefix := func(path string) string {
		return to("path: {type: ReplacePrefixMatch, replacePrefixMatch: " + path + "}")
	}
	same := to("statusCode: 301")
	for what, c := range map[string]struct{ spec, want string }{
		"nothing changes":       {"rules: [{" + same + "}]", "http://any.invalid:80/"},
		"HTTPS, at both ports":  {"rules: [{" + to("scheme: https") + "}]", "https://any.invalid:443/"},
		"HTTPS, at one port":    {"parentRefs: [{name: g, sectionName: http}], rules: [{" + to("scheme: https") + "}]", ""},
		"its own host":          {"hostnames: [a.example], rules: [{" + to("hostname: a.example") + "}]", "http://a.example:80/"},
		"from one to the other": {"hostnames: [a.example, b.example], rules: [{" + to("hostname: b.example") + "}]", "http://b.example:80/"},
		"a foreign host":        {"rules: [{" + to("hostname: b.example") + "}]", ""},
		"a longer path":         {"rules: [" + rule("/a", prefix("/a/b")) + "]", "http://any.invalid:80/a/b/b"},
		"a shorter path":        {"rules: [" + rule("/old", prefix("/")) + "]", ""},

		"the path of another rule":   {"rules: [{" + full("/home") + "}, " + rule("/home", web) + "]", ""},
		"the path of the same rule":  {"rules: [{" + full("/home") + "}]", "http://any.invalid:80/home"},
		"two rules":                  {"rules: [" + rule("/a", full("/b")) + ", " + rule("/b", full("/a")) + "]", "http://any.invalid:80/a"},
		"a header field":             {"rules: [{matches: [{headers: [{name: X-A, value: b}]}], " + same + "}]", "http://any.invalid:80/"},
		"a parameter":                {"rules: [{matches: [{queryParams: [{name: q, value: b}]}], " + same + "}]", "http://any.invalid:80/"},
		"another port":               {"rules: [{" + to("port: 8080") + "}]", ""},
		"an expression":              {"rules: [{matches: [{path: {type: RegularExpression, value: /a.*}}], " + same + "}]", ""},
		"a rule that is not reached": {"rules: [{" + web + "}, {" + same + "}]", ""},
	} {
		t.Run(what, func(t *testing.T) {
			spec := c.spec
			if !strings.Contains(spec, "parentRefs") {
				spec = "parentRefs: [{name: g}], " + spec
			}
			g, r := read[gwv1.Gateway](t, gatewayText), read[gwv1.HTTPRoute](t, "{metadata: {name: r, namespace: shop}, spec: {"+spec+"}}")
			f := gateway.BuildGateway(&gateway.Objects{
				Gateways: map[svc.Name]*gwv1.Gateway{svc.NameOf(g): g}, Routes: map[svc.Name]*gwv1.HTTPRoute{svc.NameOf(r): r},
				Services: map[svc.Name]*services.Service{{Namespace: "shop", Name: "web"}: {Ports: []services.Port{{Number: 80}}}},
				Secrets:  map[svc.Name]gateway.Secret{{Namespace: "shop", Name: "c"}: {}},
			}, svc.NameOf(g), nil)
			got := OfRoute(f.Table, r)
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

// The same by the annotations of ingress-nginx.
func TestLoopsOfIngresses(t *testing.T) {
	for annotation, loops := range map[string]bool{
		"ssl-redirect: 'true'": false, "force-ssl-redirect: 'true'": false, "permanent-redirect: https://b.example/": false,
		"permanent-redirect: https://a.example/": true, "temporal-redirect: http://a.example/x": true, "app-root: /app": false,
		"from-to-www-redirect: 'true'": false,
	} {
		in := read[networkingv1.Ingress](t, "metadata: {name: i, namespace: shop, annotations: {nginx.ingress.kubernetes.io/"+annotation+`}}
spec: {tls: [{hosts: [a.example], secretName: c}], rules: [{host: a.example, http: {paths: [
  {path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]}`)
		f := gateway.BuildIngress(&gateway.Objects{
			Ingresses: map[svc.Name]*networkingv1.Ingress{svc.NameOf(in): in}, Policies: trust.NewPolicies(),
			Services: map[svc.Name]*services.Service{{Namespace: "shop", Name: "web"}: {Ports: []services.Port{{Number: 80}}}},
			Secrets:  map[svc.Name]gateway.Secret{{Namespace: "shop", Name: "c"}: {}},
		}, nil)
		if got := OfIngress(f.Table, in); (got != "") != loops {
			t.Errorf("%s: %q, want a loop: %t (%v)", annotation, got, loops, f.Problems)
		}
	}
}
