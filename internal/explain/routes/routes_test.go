package routes

import (
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// began is when the objects of a test were made, unless they have another time.
var began = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

// objects reads objects, with a line "---" between two. The ones of the namespace shop need not name it.
func objects(t *testing.T, text string) (out []any) {
	t.Helper()
	for doc := range strings.SplitSeq(text, "---\n") {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatalf("%v in %s", err, doc)
		}
		o := map[string]func() any{
			"Ingress": func() any { return &networkingv1.Ingress{} }, "IngressClass": func() any { return &networkingv1.IngressClass{} },
			"Service": func() any { return &corev1.Service{} }, "Namespace": func() any { return &corev1.Namespace{} },
			"Gateway": func() any { return &gwv1.Gateway{} }, "GatewayClass": func() any { return &gwv1.GatewayClass{} },
			"HTTPRoute": func() any { return &gwv1.HTTPRoute{} }, "GRPCRoute": func() any { return &gwv1.GRPCRoute{} },
			"TCPRoute": func() any { return &gwv1.TCPRoute{} }, "TLSRoute": func() any { return &gwv1.TLSRoute{} },
			"ListenerSet": func() any { return &gwv1.ListenerSet{} }, "ReferenceGrant": func() any { return &gwv1.ReferenceGrant{} },
			"BackendTLSPolicy": func() any { return &gwv1.BackendTLSPolicy{} },
		}[kind.Kind]()
		if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
			t.Fatalf("%v in %s", err, doc)
		}
		m := o.(metav1.Object)
		if m.GetNamespace() == "" && !strings.HasSuffix(kind.Kind, "Class") && kind.Kind != "Namespace" {
			m.SetNamespace("shop")
		}
		out = append(out, o)
	}
	return out
}

// always is what each World of these tests has.
const always = `{kind: IngressClass, metadata: {name: fairlead}, spec: {controller: fairlead.dev/ingress}}
---
{kind: IngressClass, metadata: {name: nginx}, spec: {controller: fairlead.dev/ingress-nginx}}
---
{kind: IngressClass, metadata: {name: foreign}, spec: {controller: example.com/x}}
---
{kind: GatewayClass, metadata: {name: fairlead}, spec: {controllerName: fairlead.dev/gateway}}
---
{kind: Service, metadata: {name: web}, spec: {ports: [{port: 80}]}}
---
{kind: Service, metadata: {name: cart}, spec: {ports: [{port: 80}]}}
---
{kind: Service, metadata: {name: far, namespace: back}, spec: {ports: [{port: 80}]}}
---
`

// ingress is an Ingress with paths of the form "HOST PATH SERVICE [TYPE]". more are fields of its spec, behind annotations and a "|".
func ingress(name, more string, paths ...string) string {
	var rules []string
	for _, p := range paths {
		f := strings.Fields(p) // host path service [type]
		kind := "Prefix"
		if len(f) > 3 {
			kind = f[3]
		}
		rules = append(rules, fmt.Sprintf(
			"{host: %q, http: {paths: [{path: %q, pathType: %s, backend: {service: {name: %s, port: {number: 80}}}}]}}",
			strings.Trim(f[0], "-"), f[1], kind, f[2]))
	}
	annotations, more, some := strings.Cut(more, "|")
	if !some {
		annotations, more = "", annotations
	}
	if !strings.Contains(more, "ingressClassName") {
		more = "ingressClassName: fairlead, " + more
	}
	return fmt.Sprintf("{kind: Ingress, metadata: {name: %s, annotations: {%s}}, spec: {%s rules: [%s]}}", name, annotations, more,
		strings.Join(rules, ", "))
}

// lines are the changes of a plan, one a line, and the notes.
func lines(fronts []Front, notes []string) (out []string) {
	for _, f := range fronts {
		for _, c := range f.Changes {
			line := f.Front + " | " + c.Where + ": " + c.Text
			if c.Cuts != "" {
				line += " | CUT: " + c.Cuts
			}
			out = append(out, line)
		}
	}
	for _, n := range notes {
		out = append(out, "! "+n)
	}
	return out
}

// planOf returns what becomes of a World if objects take the place of others of the same kind and name, or, with "delete ", go.
func planOf(t *testing.T, world *World, before, after string) []string {
	t.Helper()
	old := map[string]any{}
	key := func(o any) string {
		return fmt.Sprintf("%T %s/%s", o, o.(metav1.Object).GetNamespace(), o.(metav1.Object).GetName())
	}
	for i, o := range objects(t, always+before) {
		if m := o.(metav1.Object); m.GetCreationTimestamp() == (metav1.Time{}) {
			m.SetCreationTimestamp(metav1.NewTime(began.Add(time.Duration(i) * time.Second)))
		}
		old[key(o)] = o
		world.Put(o)
	}
	p := NewPlan(world, began.Add(time.Hour))
	for doc := range strings.SplitSeq(after, "---\n") {
		text, gone := strings.CutPrefix(doc, "delete ")
		for _, o := range objects(t, text) {
			if gone {
				p.Add(old[key(o)], nil)
				continue
			}
			if was := old[key(o)]; was != nil {
				o.(metav1.Object).SetCreationTimestamp(was.(metav1.Object).GetCreationTimestamp())
			}
			p.Add(old[key(o)], o)
		}
	}
	return lines(p.Fronts(t.Context()))
}

// check compares the lines with what they have to contain, each one of them.
func check(t *testing.T, got, want []string) {
	t.Helper()
	ok := len(got) == len(want)
	for i := range want {
		ok = ok && strings.Contains(got[i], want[i]) && strings.Contains(want[i], "| CUT") == strings.Contains(got[i], "| CUT")
	}
	if !ok {
		t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func TestIngresses(t *testing.T) {
	const canary = `"nginx.ingress.kubernetes.io/canary": "true", "nginx.ingress.kubernetes.io/canary-weight": "10"|`
	const tls = "tls: [{hosts: [a.example], secretName: cert}], "
	const expressions = `"nginx.ingress.kubernetes.io/use-regex": "true"|`
	for _, c := range []struct {
		name, before, after string
		want                []string
	}{
		{"another Service", ingress("x", "", "a.example /cart web"), ingress("x", "", "a.example /cart cart"), []string{
			"Ingresses at the shared front | http://a.example/cart: goes to Service shop/cart:80 instead of Service shop/web:80 (Ingress shop/x)"}},
		{"nothing", ingress("x", "", "a.example /cart web"), ingress("x", "", "a.example /cart web"), nil},
		{"a path goes, and another takes its requests", ingress("x", "", "a.example / web", "a.example /cart cart"),
			ingress("x", "", "a.example / web"), []string{
				"http://a.example/cart: goes to Service shop/web:80 instead of Service shop/cart:80"}},
		{"a path goes", ingress("x", "", "a.example /a web", "a.example /cart cart"), ingress("x", "", "a.example /a web"), []string{
			"http://a.example/cart: no longer served: 404; it went to Service shop/cart:80 | CUT: requests are answered with 404"}},
		{"the last one goes", ingress("x", "", "a.example / web"), "delete " + ingress("x", "", "a.example / web"), []string{
			"Service kube-system/fairlead-ingress: goes, and gives its addresses back | CUT",
			"port 80: closes, nothing answers there any more | CUT: new connections are refused, and open ones end; hosts and paths"}},
		{"the first one", ingress("z", "ingressClassName: foreign, ", "b.example / web"), ingress("x", "", "a.example / web"), []string{
			"Service kube-system/fairlead-ingress: is made, and asks for an address",
			"http://a.example/: is served now: goes to Service shop/web:80 (Ingress shop/x)", "port 80: opens"}},
		{"another class", ingress("x", "", "a.example / web") + "\n---\n" + ingress("z", "", "b.example / web"),
			ingress("x", "ingressClassName: foreign, ", "a.example / web"), []string{
				"http://a.example/: no longer served: 404; it went to Service shop/web:80 | CUT",
				"! Ingress shop/x: IngressClass foreign is not of fairlead, which does not serve it"}},
		{"a canary", ingress("x", "", "a.example / web"), ingress("c", canary, "a.example / cart"), []string{
			"http://a.example/: goes to Service shop/web:80 (90 %) and Service shop/cart:80 (10 %) instead of Service shop/web:80"}},
		{"an exact host beside a wildcard", ingress("x", "", "*.example / web"), ingress("z", "", "b.example /api cart"), []string{
			"http://b.example/: no longer served: 404; it went to Service shop/web:80 | CUT: requests are answered with 404",
			"http://b.example/api: goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"a certificate", ingress("x", "", "a.example / web"), ingress("x", tls, "a.example / web"), []string{
			"https://a.example/: is served now: goes to Service shop/web:80", "port 443: opens"}},
		{"the certificate goes", ingress("x", tls, "a.example / web") + "\n---\n" +
			ingress("z", "tls: [{hosts: [b.example], secretName: other}], ", "b.example / web"), ingress("x", "", "a.example / web"), []string{
			"https://a.example: closes, nothing answers there for a.example | CUT: connections for a.example fail"}},
		{"another certificate", ingress("x", tls, "a.example / web"),
			ingress("x", "tls: [{hosts: [a.example], secretName: other}], ", "a.example / web"),
			[]string{"certificate of a.example: Secret shop/other instead of Secret shop/cert"}},
		{"redirects to HTTPS", ingress("x", tls, "a.example / web"), ingress("x", "ingressClassName: nginx, "+tls, "a.example / web"), []string{
			"http://a.example/: goes to a redirect to https instead of Service shop/web:80"}},
		{"no Service", ingress("x", "", "a.example / web"), ingress("x", "", "a.example / nothing"), []string{
			"http://a.example/: no longer served: 500: it has no backend that can be used (Ingress shop/x); it went to Service shop/web:80 | CUT",
			"Ingress shop/x: is not served as it asks: rules[0].http.paths[0].backend: there is no Service shop/nothing"}},
		{"its Service goes", ingress("x", "", "a.example / web"), "delete {kind: Service, metadata: {name: web}}", []string{
			"http://a.example/: no longer served: 500: it has no backend that can be used (Ingress shop/x); it went to Service shop/web:80 | CUT",
			"Ingress shop/x: is not served as it asks: rules[0].http.paths[0].backend: there is no Service shop/web"}},
		{"its Service goes, with a default backend", ingress("x", `"nginx.ingress.kubernetes.io/default-backend": cart|`, "a.example / web"),
			"delete {kind: Service, metadata: {name: web}}", []string{
				"Ingress shop/x: is not served as it asks: rules[0].http.paths[0].backend: there is no Service shop/web",
				"http://a.example/: goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"a Service of nobody", ingress("x", "", "a.example / web"), "delete {kind: Service, metadata: {name: cart}}", nil},
		{"a host of another namespace", ingress("x", "", "a.example / web"),
			strings.Replace(ingress("z", "", "a.example /y far"), "name: z", "namespace: back, name: z", 1), []string{
				`Ingress back/z: is not served as it asks: rules[0]: host "a.example" belongs to an older Ingress of another namespace`}},
		{"another one has the path", ingress("x", "", "a.example / web"), ingress("z", "", "a.example / cart"), []string{
			"http://a.example/: Ingress shop/z gets no requests there: Ingress shop/x comes first"}},
		{"to a front for itself", ingress("x", "", "a.example / web") + "\n---\n" + ingress("z", "", "b.example / web"),
			ingress("x", `"fairlead.dev/front": own|`, "a.example / web"), []string{
				"Ingress shop/x at its front | Service shop/x-fairlead-ingress: is made, and asks for an address",
				"Ingress shop/x at its front | http://a.example/: is served now", "Ingress shop/x at its front | port 80: opens",
				"Ingresses at the shared front | http://a.example/: no longer served: 404; it went to Service shop/web:80 | CUT"}},
		{"an expression", ingress("x", expressions, "a.example /v[0-9]+/(a|b) web ImplementationSpecific"),
			ingress("x", expressions, "a.example /v[0-9]+/(a|b) cart ImplementationSpecific"), []string{
				"http://a.example/ (paths matching /v[0-9]+/(a|b)): goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"the first expression of a host", ingress("x", "", "a.example / web"),
			ingress("z", expressions, "a.example /v[0-9]+ web ImplementationSpecific"), []string{
				"http://a.example/ (paths of more than 4,096 bytes): no longer served: 503: the expressions of the host do not look at a path of " +
					"more than 4,096 bytes; it went to Service shop/web:80 | CUT: requests are answered with 503"}},
		{"the first expression beside a path without a Service", ingress("x", "", "a.example /a nothing", "a.example /b web"),
			ingress("z", expressions, "a.example /v[0-9]+ web ImplementationSpecific"), []string{
				"http://a.example/ (paths of more than 4,096 bytes): no longer served: 503: the expressions of the host do not look at a path of " +
					"more than 4,096 bytes; it went to Service shop/web:80 | CUT: requests are answered with 503",
				"http://a.example/ (paths matching /v[0-9]+): is served now: goes to Service shop/web:80"}},
		{"the last expression of a host", ingress("x", "", "a.example / web") + "\n---\n" +
			ingress("z", expressions, "a.example /v[0-9]+ web ImplementationSpecific"),
			"delete " + ingress("z", expressions, "a.example /v[0-9]+ web ImplementationSpecific"), []string{
				"http://a.example/ (paths of more than 4,096 bytes): is served now: goes to Service shop/web:80"}},
		{"clients", ingress("x", `"nginx.ingress.kubernetes.io/whitelist-source-range": 10.0.0.0/8|`, "a.example / web"),
			ingress("x", "", "a.example / web"), []string{"http://a.example/: clients: no longer (only from [10.0.0.0/8]) (Ingress shop/x)"}},
		{"the default class", strings.Replace(ingress("x", "", "a.example / web"), "ingressClassName: fairlead,", "", 1),
			`{kind: IngressClass, metadata: {name: foreign, annotations: {"ingressclass.kubernetes.io/is-default-class": "true"}}, ` +
				"spec: {controller: fairlead.dev/ingress}}", []string{
				"Service kube-system/fairlead-ingress: is made", "http://a.example/: is served now", "port 80: opens"}},
		{"a canary goes", ingress("x", "", "a.example / web") + "\n---\n" + ingress("c", canary, "a.example / cart"),
			"delete " + ingress("c", canary, "a.example / cart"), []string{"http://a.example/: goes to Service shop/web:80 instead of " +
				"Service shop/web:80 (90 %) and Service shop/cart:80 (10 %) (Ingress shop/x)"}},
		{"the class is changed", ingress("x", "", "a.example / web"),
			"{kind: IngressClass, metadata: {name: fairlead}, spec: {controller: example.com/x}}", []string{
				"Service kube-system/fairlead-ingress: goes, and gives its addresses back | CUT",
				"port 80: closes, nothing answers there any more | CUT"}},
	} {
		t.Run(c.name, func(t *testing.T) { check(t, planOf(t, NewWorld(), c.before, c.after), c.want) })
	}
}

const httpsText = `  {name: https, port: 443, protocol: HTTPS, hostname: "*.example", tls: {certificateRefs: [{name: cert}]},
    allowedRoutes: {namespaces: {from: All}}},
`

const gatewayText = `{kind: Gateway, metadata: {name: web, namespace: infra}, spec: {gatewayClassName: fairlead, listeners: [
  {name: http, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}},
` + httpsText + `  {name: db, port: 5432, protocol: TCP, allowedRoutes: {namespaces: {from: All}}}]}}`

func route(name, rules string, hosts ...string) string {
	return fmt.Sprintf("{kind: HTTPRoute, metadata: {name: %s}, spec: {parentRefs: [{name: web, namespace: infra}], "+
		"hostnames: [%s], rules: [%s]}}", name, strings.Join(hosts, ", "), rules)
}

func byRegex(expression, backends string) string {
	return fmt.Sprintf("{matches: [{path: {type: RegularExpression, value: '%s'}}], backendRefs: [%s]}", expression, backends)
}

func to(path, backends string) string {
	return fmt.Sprintf("{matches: [{path: {type: PathPrefix, value: %s}}], backendRefs: [%s]}", path, backends)
}

// dotted is a Gateway of a name.
func dotted(name string) string {
	return fmt.Sprintf("{kind: Gateway, metadata: {name: %s, namespace: infra}, spec: {gatewayClassName: fairlead, listeners: ["+
		"{name: http, port: 80, protocol: HTTP}]}}", name)
}

// serviceFor is the Service of a Gateway w.b or w-b.
func serviceFor(name string) string {
	return fmt.Sprintf("{kind: Service, metadata: {name: w-b-fairlead, namespace: infra, labels: {fairlead.dev/front: gateway}, "+
		"ownerReferences: [{kind: Gateway, name: %s, controller: true}]}, spec: {ports: [{port: 80}]}}", name)
}

func TestGateways(t *testing.T) {
	const web, cart = "{name: web, port: 80}", "{name: cart, port: 80}"
	with := func(more ...string) string { return strings.Join(append([]string{gatewayText}, more...), "\n---\n") }
	const tcp = "{kind: TCPRoute, metadata: {name: db}, spec: {parentRefs: [{name: web, namespace: infra}], rules: [{backendRefs: [%s]}]}}"
	calls := func(to string) string {
		return "{kind: GRPCRoute, metadata: {name: calls}, spec: {parentRefs: [{name: web, namespace: infra}], hostnames: [a.example], " +
			"rules: [{matches: [{method: {service: shop.Cart}}], backendRefs: [" + to + "]}]}}"
	}
	passed := func(to string) string {
		return "{kind: Gateway, metadata: {name: web, namespace: infra}, spec: {gatewayClassName: fairlead, listeners: [" +
			"{name: tls, port: 8443, protocol: TLS, tls: {mode: Passthrough}, allowedRoutes: {namespaces: {from: All}}}]}}\n---\n" +
			"{kind: TLSRoute, metadata: {name: pass}, spec: {parentRefs: [{name: web, namespace: infra}], hostnames: [b.example], " +
			"rules: [{backendRefs: [" + to + "]}]}}"
	}
	const set = "{kind: ListenerSet, metadata: {name: more}, spec: {parentRef: {name: web, namespace: infra}, listeners: [" +
		"{name: http, port: 9090, protocol: HTTP}]}}"
	allowing := strings.Replace(gatewayText, "listeners:", "allowedListeners: {namespaces: {from: All}}, listeners:", 1)
	expressed := func(to string) string {
		return route("r", "{matches: [{path: {type: RegularExpression, value: '/v[0-9]+/.*'}}], backendRefs: ["+to+"]}", "a.example")
	}
	const grant = "{kind: ReferenceGrant, metadata: {name: g, namespace: back}, spec: {from: [{group: gateway.networking.k8s.io, " +
		"kind: HTTPRoute, namespace: shop}], to: [{group: '', kind: Service}]}}"
	far := route("r", to("/", "{name: far, namespace: back, port: 80}"), "a.example")
	for _, c := range []struct {
		name, before, after string
		want                []string
	}{
		{"another Service", with(route("r", to("/", web)+","+to("/cart", web), "a.example")),
			route("r", to("/", web)+","+to("/cart", cart), "a.example"), []string{
				"Gateway infra/web | http and https://a.example/cart: goes to Service shop/cart:80 instead of Service shop/web:80 " +
					"(HTTPRoute shop/r, rules[1])"}},
		{"weights", with(route("r", to("/", "{name: web, port: 80, weight: 9},{name: cart, port: 80, weight: 1}"), "a.example")),
			route("r", to("/", "{name: web, port: 80, weight: 1},{name: cart, port: 80, weight: 1}"), "a.example"), []string{
				"goes to Service shop/web:80 (50 %) and Service shop/cart:80 (50 %) instead of " +
					"Service shop/web:80 (90 %) and Service shop/cart:80 (10 %)"}},
		{"a share is lost", with(route("r", to("/", web), "a.example")),
			route("r", to("/", "{name: web, port: 80, weight: 9},{name: nothing, port: 80, weight: 1}"), "a.example"), []string{
				"goes to Service shop/web:80 (90 %) instead of Service shop/web:80 (HTTPRoute shop/r, rules[0]) | " +
					"CUT: a share of the requests is answered with 500 (10 %)",
				"HTTPRoute shop/r at Gateway infra/web: is not served as it asks: BackendNotFound: rules[0].backendRefs[1]: there is no"}},
		{"a Gateway whose Service another one has", dotted("w-b"), dotted("w.b"), []string{
			"Gateway infra/w.b | Gateway infra/w.b: is not served: its Service would be infra/w-b-fairlead, which Gateway w-b has; give one of"}},
		{"two Gateways for one Service", gatewayText, dotted("w.b") + "\n---\n" + dotted("w-b"), []string{
			"Gateway infra/w-b | Service infra/w-b-fairlead: is made, and asks for an address",
			"Gateway infra/w-b | port 80: opens: listener http",
			"Gateway infra/w.b | Gateway infra/w.b: is not served: its Service would be infra/w-b-fairlead, which Gateway w-b has; give one of"}},
		{"the Gateway that has the Service goes", dotted("w-b") + "\n---\n" + dotted("w.b"), "delete " + dotted("w-b"), []string{
			"Gateway infra/w-b | Service infra/w-b-fairlead: goes, and gives its addresses back | CUT",
			"Gateway infra/w-b | port 80: closes, nothing answers there any more: listener http | CUT",
			"Gateway infra/w.b | Gateway infra/w.b: can have its Service now; before: its Service would be infra/w-b-fairlead, which Gateway w-b",
			"Gateway infra/w.b | Service infra/w-b-fairlead: is made, and asks for an address",
			"Gateway infra/w.b | port 80: opens: listener http"}},
		{"the Gateway that had the Service first keeps it", dotted("w.b") + "\n---\n" + serviceFor("w.b"), dotted("w-b"), []string{
			"Gateway infra/w-b | Gateway infra/w-b: is not served: its Service would be infra/w-b-fairlead, which Gateway w.b has; give one of"}},
		{"a Service of nobody is in the way", "{kind: Service, metadata: {name: w-b-fairlead, namespace: infra}, spec: {ports: [{port: 80}]}}",
			dotted("w-b"), []string{
				"Gateway infra/w-b | Gateway infra/w-b: is not served: there is a Service infra/w-b-fairlead that is not of a Gateway"}},
		{"a redirect", with(route("r", to("/", web), "a.example")), route("r", "{filters: [{type: RequestRedirect, "+
			"requestRedirect: {hostname: b.example, statusCode: 301}}]}", "a.example"), []string{
			"http://a.example/: goes to a redirect (301) to http://b.example/ instead of Service shop/web:80",
			"https://a.example/: goes to a redirect (301) to https://b.example/ instead of"}},
		{"an older one comes first", with(route("r", to("/", web), "a.example")), route("new", to("/", cart), "a.example"), []string{
			"http and https://a.example/: HTTPRoute shop/new, rules[0] gets no requests there: HTTPRoute shop/r, rules[0] comes first"}},
		{"a deletion", with(route("r", to("/", web), "a.example"), route("s", to("/", web), "b.example")),
			"delete " + route("r", to("/", web), "a.example"), []string{
				"http and https://a.example/: no longer served: 404; it went to Service shop/web:80 | CUT"}},
		{"no listener has the host", with(route("r", to("/", web), "a.example")), strings.Replace(route("r", to("/", web), "a.other"),
			"namespace: infra}", "namespace: infra, sectionName: https}", 1), []string{
			"http and https://a.example/: no longer served: 404; it went to Service shop/web:80 | CUT",
			"HTTPRoute shop/r at Gateway infra/web, listener https: is not served as it asks: NoMatchingListenerHostname: " +
				"no listener has a hostname of the route"}},
		{"a listener goes", with(route("r", to("/", web), "a.example")), strings.Replace(gatewayText, httpsText, "", 1), []string{
			"port 443: closes, nothing answers there any more: listener https | CUT: new connections are refused, and open ones end; " +
				"hosts and paths that were served there: 1"}},
		{"no certificate", with(route("r", to("/", web), "a.example")),
			strings.Replace(gatewayText, "{name: cert}", "{name: c, namespace: back}", 1), []string{
				"port 443: closes, nothing answers there any more: listener https: RefNotPermitted: tls.certificateRefs[0]: " +
					"no ReferenceGrant of namespace back permits it | CUT",
				"Gateway infra/web: is not served as it asks: ListenersNotResolved: listener https: tls.certificateRefs[0]",
				"listener https of Gateway infra/web: is not served as it asks: RefNotPermitted"}},
		{"a listener of another host", with(route("r", to("/", web), "a.example")),
			strings.Replace(gatewayText, "{name: http, port: 80,", "{name: http, hostname: b.example, port: 80,", 1), []string{
				"http://a.example/: no longer served: 404; it went to Service shop/web:80 | CUT",
				"listener http, port 80: is for b.example instead of all hosts | CUT: requests for other hosts fail"}},
		{"maintenance", with(route("r", to("/", web), "a.example")), strings.Replace(route("r", to("/", web), "a.example"), "name: r}",
			"name: r, annotations: {fairlead.dev/maintenance: 'true'}}", 1), []string{
			"http and https://a.example/: no longer served: 503: maintenance (HTTPRoute shop/r, rules[0]); it went to Service shop/web:80 | CUT"}},
		{"another address", with(), strings.Replace(gatewayText, "gatewayClassName", "addresses: [{value: 192.0.2.2}], gatewayClassName", 1),
			[]string{"Gateway infra/web: asks for addresses [192.0.2.2] instead of []"}},
		{"another certificate", with(route("r", to("/", web), "a.example")),
			strings.Replace(gatewayText, "{name: cert}", "{name: new}", 1), []string{
				"certificate of *.example: Secret infra/new instead of Secret infra/cert"}},
		{"the Gateway goes", with(route("r", to("/", web), "a.example")), "delete " + gatewayText, []string{
			"Service infra/web-fairlead: goes, and gives its addresses back | CUT",
			"port 443: closes, nothing answers there any more: listener https | CUT",
			"port 5432: closes, nothing answers there any more: listener db | CUT",
			"port 80: closes, nothing answers there any more: listener http | CUT"}},
		{"a grant goes", with(far, grant), "delete " + grant, []string{
			"http and https://a.example/: no longer served: 500: it has no backend that can be used (HTTPRoute shop/r, rules[0]); " +
				"it went to Service back/far:80 | CUT",
			"HTTPRoute shop/r at Gateway infra/web: is not served as it asks: RefNotPermitted: rules[0].backendRefs[0]: no Ref"}},
		{"a grant comes", with(far), grant, []string{
			"HTTPRoute shop/r at Gateway infra/web: is accepted now; before: RefNotPermitted",
			"http and https://a.example/: is served now: goes to Service back/far:80"}},
		{"a route of TCP", with(fmt.Sprintf(tcp, web)), fmt.Sprintf(tcp, cart), []string{
			"port 5432: goes to Service shop/cart:80 instead of Service shop/web:80 (TCPRoute shop/db) | " +
				"CUT: open connections to Service shop/web:80 end with its route"}},
		{"no route of TCP", with(fmt.Sprintf(tcp, web)), "delete " + fmt.Sprintf(tcp, web), []string{
			"port 5432: no longer served: closed: no route has them; it went to Service shop/web:80 | CUT: connections are closed"}},
		{"no Gateway", with(),
			strings.Replace(route("r", to("/", web), "a.example"), "name: web, namespace: infra", "name: nothing", 1), []string{
				"! there is no Gateway shop/nothing: nothing serves what names it as its parent"}},
		{"calls", with(calls(web)), calls(cart), []string{
			"http and https://a.example/shop.Cart/*: goes to Service shop/cart:80 instead of Service shop/web:80 (GRPCRoute shop/calls, rules[0])"}},
		{"names of TLS", with(strings.Replace(gatewayText, "{name: web,", "{name: some,", 1) + "\n---\n" + passed(web)), passed(cart), []string{
			"b.example, port 8443: goes to Service shop/cart:80 instead of Service shop/web:80 (TLSRoute shop/pass) | CUT: open connections"}},
		{"a ListenerSet", with(), set, []string{"ListenerSet shop/more: is not served as it asks: NotAllowed: "}},
		{"a route and its ListenerSet", with(allowing), strings.Replace(route("r", to("/", web)), "name: web, namespace: infra",
			"group: gateway.networking.k8s.io, kind: ListenerSet, name: more", 1) + "\n---\n" + set, []string{
			"http://*:9090/: is served now: goes to Service shop/web:80", "port 9090: opens: listener shop/more/http"}},
		{"a ListenerSet that is allowed", with(allowing, set, strings.Replace(route("r", to("/", web)), "name: web, namespace: infra",
			"group: gateway.networking.k8s.io, kind: ListenerSet, name: more", 1)), "delete " + set, []string{
			"port 9090: closes, nothing answers there any more: listener shop/more/http | CUT: new connections are refused, and open ones end; " +
				"hosts and paths that were served there: 1"}},
		{"TLS to backends", with(route("r", to("/", web), "a.example")), "{kind: BackendTLSPolicy, metadata: {name: p}, spec: {targetRefs: " +
			"[{group: '', kind: Service, name: web}], validation: {hostname: web.example, wellKnownCACertificates: System}}}", []string{
			"http and https://a.example/: goes to Service shop/web:80 by TLS of BackendTLSPolicy shop/p instead of Service shop/web:80"}},
		{"TLS to backends that cannot be", with(route("r", to("/", web), "a.example")), "{kind: BackendTLSPolicy, metadata: {name: p}, spec: " +
			"{targetRefs: [{group: '', kind: Service, name: web}], validation: {hostname: web.example, caCertificateRefs: " +
			"[{group: '', kind: Service, name: web}]}}}", []string{
			"http and https://a.example/: no longer served: 503: it has no backend that can be used (HTTPRoute shop/r, rules[0]); " +
				"it went to Service shop/web:80 | CUT", "BackendTLSPolicy shop/p: is not served as it asks: NoValidCACertificate"}},
		{"an expression", with(expressed(web)), expressed(cart), []string{
			"http and https://a.example/ (paths matching /v[0-9]+/.*): goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"an expression goes", with(expressed(web) + "\n---\n" + route("s", to("/", cart), "a.example")), "delete " + expressed(web), []string{
			"http and https://a.example/ (paths matching /v[0-9]+/.*): goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"an expression takes some paths of a prefix", with(route("r", to("/", web), "a.example")),
			route("r", to("/", web)+","+byRegex("/v[0-9]+/.*", cart), "a.example"), []string{
				"http and https://a.example/ (paths matching /v[0-9]+/.*): goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"an expression takes fewer paths", with(route("r", byRegex("/v[0-9]+", web), "a.example")),
			route("r", byRegex("/v[0-5]+", web), "a.example"), []string{
				"http and https://a.example/ (paths matching /v[0-9]+), as /v6: no longer served: 404; it went to Service shop/web:80 | CUT"}},
		{"an expression behind another rule", with(route("r", to("/", web)+","+byRegex("/a[0-9a-z]*.*", web), "a.example")),
			route("r", to("/", web)+","+byRegex("/a[0-9a-z]*.*", web)+","+byRegex("/[ab].*", cart), "a.example"), []string{
				"http and https://a.example/ (paths matching /[ab].*), as /b: goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"a prefix behind an expression", with(route("r", byRegex("/v[0-9]+", web), "a.example")),
			route("r", byRegex("/v[0-9]+", web)+","+to("/v1", cart), "a.example"), []string{
				"http and https://a.example/v1: is served now: goes to Service shop/cart:80"}},
		{"an expression of all paths goes", with(route("r", byRegex(".*", web)+","+to("/", cart), "a.example")),
			route("r", to("/", cart), "a.example"), []string{
				"http and https://a.example/: goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"an expression for which there is a prefix with the same answer goes",
			with(route("r", byRegex(".*", web)+","+to("/", web), "a.example")), route("r", to("/", web), "a.example"), nil},
		{"an expression that cannot be followed goes",
			with(route("r", byRegex(`/a\b.*`, web), "a.example"), route("s", to("/y", cart), "a.example")),
			"delete " + route("r", byRegex(`/a\b.*`, web), "a.example"), []string{
				`http and https://a.example/ (paths matching /a\b.*): may change: HTTPRoute shop/r, former rules[0] and requests that no rule ` +
					"takes: which paths they share is not known | CUT: requests that no other match takes are answered with 404",
				`http and https://a.example/ (paths matching /a\b.*): no longer served: 404; it went to Service shop/web:80 | CUT`}},
		{"an expression that cannot be followed comes", with(route("s", to("/", cart), "a.example")),
			route("r", byRegex(`/a\B.*`, web), "a.example"),
			[]string{`http and https://a.example/ (paths matching /a\B.*): may change: HTTPRoute shop/r, rules[0] and HTTPRoute shop/s, rules[0]: ` +
				"which paths they share is not known"}},
		{"a namespace goes", with("{kind: Namespace, metadata: {name: gone}}"), "delete {kind: Namespace, metadata: {name: gone}}", []string{
			"Namespace gone: goes with all of its objects | CUT", "! Namespace gone: its objects go with it, which the plan does not have"}},
		{"labels of a namespace", with("{kind: Namespace, metadata: {name: shop, labels: {web: 'yes'}}}",
			strings.ReplaceAll(strings.Replace(gatewayText, "name: web", "name: some", 1), "{from: All}",
				"{from: Selector, selector: {matchLabels: {web: 'yes'}}}"),
			strings.Replace(route("r", to("/", web), "a.other"), "name: web, namespace: infra", "name: some, namespace: infra", 1)),
			"{kind: Namespace, metadata: {name: shop}}", []string{
				"Gateway infra/some | http://a.other/: no longer served: 404; it went to Service shop/web:80 | CUT",
				"HTTPRoute shop/r at Gateway infra/some: is not served as it asks: NotAllowedByListeners: no listener lets"}},
		{"at a Service", with(),
			strings.Replace(route("r", to("/", web)), "name: web, namespace: infra", "group: '', kind: Service, name: web", 1), []string{
				"! HTTPRoute shop/r: what it changes for clients in the cluster, at Service shop/web, is not in the plan"}},
		{"filters", with(route("r", to("/", web), "a.example")), route("r", strings.Replace(to("/", web), "{matches",
			"{timeouts: {request: 5s}, filters: [{type: URLRewrite, urlRewrite: {hostname: b}}], matches", 1), "a.example"), []string{
			"http and https://a.example/: timeout: 5s, new; host of the request to the backend: b, new (HTTPRoute shop/r, rules[0])"}},
		{"a match with a header", with(route("r", to("/", web), "a.example")), route("r", to("/", web)+
			",{matches: [{headers: [{name: X-New, value: 'yes'}]}], backendRefs: ["+cart+"]}", "a.example"), []string{
			"http and https://a.example/ with header x-new=yes: goes to Service shop/cart:80 instead of Service shop/web:80"}},
		{"a hostname of another kind", with(route("r", to("/", web), "a.example")),
			"{kind: GRPCRoute, metadata: {name: calls}, spec: {parentRefs: [{name: web, namespace: infra}], hostnames: [a.example], " +
				"rules: [{backendRefs: [" + web + "]}]}}", []string{
				"GRPCRoute shop/calls at Gateway infra/web: is not served as it asks: HostnameConflict: an older route of the other kind"}},
	} {
		t.Run(c.name, func(t *testing.T) { check(t, planOf(t, NewWorld(), c.before, c.after), c.want) })
	}
}

// A user who may read a namespace only gets a plan of it, and is told which part of it is a guess.
func TestUnread(t *testing.T) {
	w := NewWorld()
	beyond := func(n string) bool { return n != "shop" }
	w.Unread, w.Hidden, w.AnyGatewayClass = beyond, beyond, true
	far := "{name: far, namespace: hidden, port: 81}"
	check(t, planOf(t, w, route("r", to("/", "{name: web, port: 80}"), "a.example"), route("r", to("/", far), "a.example")), []string{
		"Gateway infra/web | a.example/: goes to Service hidden/far:81 instead of Service shop/web:80 (HTTPRoute shop/r, rules[0])",
		"! you may not read Gateway infra/web: the plan is as if its listeners took all hosts and routes"})
	w = NewWorld()
	w.AnyIngressClass = true
	const unknown = "ingressClassName: unknown, "
	check(t, planOf(t, w, ingress("x", unknown, "a.example / web"), ingress("x", unknown, "a.example / cart")),
		[]string{"http://a.example/: goes to Service shop/cart:80 instead of Service shop/web:80"})
}

// Where Services could not be read, the plan does not say which of two Gateways has the one that both need.
func TestUnowned(t *testing.T) {
	w := NewWorld()
	w.Unowned = func(namespace string) bool { return namespace == "infra" }
	check(t, planOf(t, w, dotted("w.b"), dotted("w-b")), []string{
		"Gateway infra/w-b | Service infra/w-b-fairlead: is made, and asks for an address",
		"Gateway infra/w-b | port 80: opens: listener http"})
}

// The shared front stays if Ingresses of others may be at it, with its address and its ports.
func TestPartly(t *testing.T) {
	const tls = "tls: [{hosts: [a.example], secretName: cert}], "
	w := NewWorld()
	w.Partly = true
	x := ingress("x", tls, "a.example / web")
	check(t, planOf(t, w, x, "delete "+x), []string{
		"http and https://a.example/: no longer served: 404; it went to Service shop/web:80 | CUT"})
	w = NewWorld()
	w.Partly = true
	check(t, planOf(t, w, "{kind: Namespace, metadata: {name: shop}}", x), []string{
		"http and https://a.example/: is served now: goes to Service shop/web:80 (Ingress shop/x)"})
}

// A Secret that is known not to exist leaves a host without HTTPS, and one that was not read counts.
func TestSecrets(t *testing.T) {
	w := NewWorld()
	w.Secrets[svc.Name{Namespace: "shop", Name: "cert"}] = nil
	tls := ingress("x", "tls: [{hosts: [a.example], secretName: cert}], ", "a.example / web")
	check(t, planOf(t, w, ingress("x", "", "a.example / web"), tls), []string{
		"Ingress shop/x: is not served as it asks: tls[0]: Secret shop/cert: it does not exist"})
	w = NewWorld()
	for _, o := range objects(t, always+tls) {
		w.Put(o)
	}
	p := NewPlan(w, began)
	p.Secret(svc.Name{Namespace: "shop", Name: "cert"}, &gateway.Secret{}, nil)
	check(t, lines(p.Fronts(t.Context())), []string{
		"port 443: closes, nothing answers there any more | CUT: new connections are refused, and open ones end; hosts with a certificate: 1",
		"Ingress shop/x: is not served as it asks: tls[0]: Secret shop/cert: it does not exist"})
}

// Without the Secret with the names and passwords no request passes.
func TestPasswords(t *testing.T) {
	n := svc.Name{Namespace: "shop", Name: "users"}
	w := NewWorld()
	const basic = `"nginx.ingress.kubernetes.io/auth-type": basic, "nginx.ingress.kubernetes.io/auth-secret": users|`
	for _, o := range objects(t, always+ingress("x", basic, "a.example / web")) {
		w.Put(o)
	}
	p := NewPlan(w, began)
	p.Secret(n, &gateway.Secret{NoMap: "x"}, nil)
	check(t, lines(p.Fronts(t.Context())), []string{
		"http://a.example/: no longer served: 503: there are no names and passwords to compare with (Ingress shop/x); it went to " +
			"Service shop/web:80 | CUT",
		"Ingress shop/x: is not served as it asks: annotation nginx.ingress.kubernetes.io/auth-secret: Secret shop/users"})
}

// Whatever names it: a Secret, a Service or the certificates of authorities that an existing object uses are part of a plan.
func TestHiddenReferences(t *testing.T) {
	const web, cart = "{name: web, port: 80}", "{name: cart, port: 80}"
	const mirrored = "{filters: [{type: RequestMirror, requestMirror: {backendRef: " + cart + "}}], backendRefs: [" + web + "]}"
	const asked = `"nginx.ingress.kubernetes.io/auth-url": "http://cart.shop.svc.cluster.local/check"|`
	const spare = `"nginx.ingress.kubernetes.io/default-backend": cart|`
	const goes = "delete {kind: Service, metadata: {name: cart}}"
	for _, c := range []struct {
		name, before, after string
		want                []string
	}{
		{"a mirror", gatewayText + "\n---\n" + route("r", mirrored, "a.example"), goes, []string{
			"HTTPRoute shop/r at Gateway infra/web: is not served as it asks: BackendNotFound",
			"http and https://a.example/: copies: no longer (100/100 to Service shop/cart:80)"}},
		{"authorization", ingress("x", asked, "a.example / web"), goes, []string{
			"http://a.example/: no longer served: 503: there is no server to ask for authorization (Ingress shop/x); it went to " +
				"Service shop/web:80 | CUT",
			"Ingress shop/x: is not served as it asks: "}},
		{"a spare backend", ingress("x", spare, "a.example / web"), goes, []string{
			"Ingress shop/x: is not served as it asks: annotation nginx.ingress.kubernetes.io/default-backend: there is no Service shop/cart",
			"http://a.example/: backend while the other one has no endpoint or cannot be used: no longer (Service shop/cart:80)"}},
	} {
		t.Run(c.name, func(t *testing.T) { check(t, planOf(t, NewWorld(), c.before, c.after), c.want) })
	}
	world := func(more string) *World {
		w := NewWorld()
		for _, o := range objects(t, always+more) {
			w.Put(o)
		}
		return w
	}
	cert := svc.Name{Namespace: "infra", Name: "cert"}
	p := NewPlan(world(gatewayText+"\n---\n"+route("r", to("/", web), "a.example")), began)
	p.Secret(cert, &gateway.Secret{}, nil)
	check(t, lines(p.Fronts(t.Context())), []string{
		"port 443: closes, nothing answers there any more: listener https: InvalidCertificateRef: " +
			"tls.certificateRefs[0]: Secret infra/cert: it does not exist | CUT",
		"Gateway infra/web: is not served as it asks", "listener https of Gateway infra/web: is not served as it asks: InvalidCertificateRef: "})

	policy := gatewayText + "\n---\n" + route("r", to("/", web), "a.example") + "\n---\n{kind: BackendTLSPolicy, metadata: {name: p}, spec: " +
		"{targetRefs: [{group: '', kind: Service, name: web}], validation: {hostname: web.example, caCertificateRefs: " +
		"[{group: '', kind: ConfigMap, name: ca}]}}}"
	ca := trust.Ref{Kind: trust.ConfigMap, Name: svc.Name{Namespace: "shop", Name: "ca"}}
	p = NewPlan(world(policy), began)
	p.Authority(ca, &Authority{Certificates: []string{"a"}}, nil)
	check(t, lines(p.Fronts(t.Context())), []string{
		"http and https://a.example/: no longer served: 503: it has no backend that can be used " +
			"(HTTPRoute shop/r, rules[0]); it went to Service shop/web:80 by TLS of BackendTLSPolicy shop/p | CUT",
		"BackendTLSPolicy shop/p: is not served as it asks: NoValidCACertificate"})
	p = NewPlan(world(policy), began)
	p.Authority(ca, &Authority{Certificates: []string{"a", "b"}}, &Authority{Certificates: []string{"b", "c"}})
	check(t, lines(p.Fronts(t.Context())), []string{
		"Gateway infra/web | ConfigMap shop/ca: has other certificates of authorities: 1 come, 1 go | CUT"})
	p = NewPlan(world(policy), began)
	p.Authority(ca, &Authority{Certificates: []string{"a"}}, &Authority{Certificates: []string{"a", "b"}})
	check(t, lines(p.Fronts(t.Context())), []string{
		"Gateway infra/web | ConfigMap shop/ca: has other certificates of authorities: 1 come, 0 go"})

	own := strings.Replace(gatewayText, "gatewayClassName: fairlead,",
		"gatewayClassName: fairlead, tls: {backend: {clientCertificateRef: {name: own}}},", 1)
	p = NewPlan(world(own), began)
	p.Secret(svc.Name{Namespace: "infra", Name: "own"}, &gateway.Secret{}, nil)
	check(t, lines(p.Fronts(t.Context())), []string{"Gateway infra/web: is not served as it asks: "})
}

// One change among many Ingresses, or many routes, is one line, and is found without a look at each pair of them: four times as many
// objects take about four times the work, which a look at each pair would take sixteen times.
func TestMany(t *testing.T) {
	const few, many = 1000, 4000
	const most = 7 // times the work
	small, large := manyPlans(t, few), manyPlans(t, many)
	for what, a := range small {
		b := large[what]
		t.Logf("%s: %d objects take %d allocations and %s, %d take %d and %s", what, few, a.allocations, a.cpu, many, b.allocations, b.cpu)
		if b.allocations > most*a.allocations {
			t.Errorf("%s: %d objects take %d allocations, and %d take %d", what, few, a.allocations, many, b.allocations)
		}
		// Short times say little: the collector and what the test has left behind count in them.
		if shortest := 20 * time.Millisecond; b.cpu > 2*most*max(a.cpu, shortest) {
			t.Errorf("%s: %d objects take %s, and %d take %s", what, few, a.cpu, many, b.cpu)
		}
	}
}

// work is what a plan takes: what it allocates, and the time of the process on a CPU.
type work struct {
	allocations uint64
	cpu         time.Duration
}

// worked returns the work of a call.
func worked(t *testing.T, call func()) (w work) {
	t.Helper()
	cpu := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	began := cpu()
	call()
	w.cpu = cpu() - began
	runtime.ReadMemStats(&after)
	w.allocations = after.Mallocs - before.Mallocs
	return w
}

// manyPlans makes plans among so many Ingresses, with so many routes at a Gateway, and returns their work.
func manyPlans(t *testing.T, many int) map[string]work {
	t.Helper()
	w := NewWorld()
	for _, o := range objects(t, always+gatewayText) {
		w.Put(o)
	}
	var in *networkingv1.Ingress
	var r *gwv1.HTTPRoute
	for i := range many {
		name, host := fmt.Sprintf("x%d", i), fmt.Sprintf("x%d.example", i)
		in = &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop"}}
		path := func(path, service string) networkingv1.HTTPIngressPath {
			return networkingv1.HTTPIngressPath{Path: path, PathType: new(networkingv1.PathTypePrefix), Backend: networkingv1.IngressBackend{
				Service: &networkingv1.IngressServiceBackend{Name: service, Port: networkingv1.ServiceBackendPort{Number: 80}}}}
		}
		in.Annotations = map[string]string{"nginx.ingress.kubernetes.io/use-regex": "true"}
		matching := func(expression, service string) networkingv1.HTTPIngressPath {
			p := path(expression, service)
			p.PathType = new(networkingv1.PathTypeImplementationSpecific)
			return p
		}
		in.Spec = networkingv1.IngressSpec{IngressClassName: new("fairlead"), TLS: []networkingv1.IngressTLS{
			{Hosts: []string{host}, SecretName: fmt.Sprintf("cert%d", i%100)}}, Rules: []networkingv1.IngressRule{
			{Host: host, IngressRuleValue: networkingv1.IngressRuleValue{HTTP: &networkingv1.HTTPIngressRuleValue{
				Paths: []networkingv1.HTTPIngressPath{path("/", "web"), path("/cart", "cart"), matching("/v[0-9]+/.*", "web")}}}}}}
		w.Put(in)
		r = objects(t, route("r", to("/", "{name: web, port: 80}")+","+to("/cart", "{name: cart, port: 80}")+","+
			byRegex("/v[0-9]+/.*", "{name: web, port: 80}"), host))[0].(*gwv1.HTTPRoute)
		r.Name = name
		w.Put(r)
	}
	out := map[string]work{}
	plan := func(what string, before, after any, want ...string) {
		t.Helper()
		var got []string
		out[what] = worked(t, func() {
			p := NewPlan(w, began)
			p.Add(before, after)
			got = lines(p.Fronts(t.Context()))
		})
		check(t, got, want)
	}
	last := fmt.Sprintf("http and https://x%d.example/cart: goes to Service shop/web:80 instead of Service shop/cart:80", many-1)
	next := in.DeepCopy()
	next.Spec.Rules[0].HTTP.Paths[1].Backend.Service.Name = "web"
	plan("a front of Ingresses", in, next, strings.Replace(last, "/cart:", "/ (paths matching /cart):", 1))
	to := r.DeepCopy()
	to.Spec.Rules[1].BackendRefs[0].Name = "web"
	plan("a Gateway of routes", r, to, last)
	plan("without the Gateway", w.Gateways[svc.Name{Namespace: "infra", Name: "web"}], (*gwv1.Gateway)(nil),
		"goes, and gives its addresses back | CUT",
		"port 443: closes, nothing answers there any more: listener https | CUT",
		"port 5432: closes, nothing answers there any more: listener db | CUT",
		"port 80: closes, nothing answers there any more: listener http | CUT")
	return out
}
