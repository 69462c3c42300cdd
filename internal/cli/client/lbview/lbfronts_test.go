package lbview

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway/api"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// frontLists are the lists of an API server, as YAML by their paths; others are not found.
var frontLists = map[string]string{
	"/api/v1/services": `
- metadata: {name: door-fairlead, namespace: shop, labels: {fairlead.dev/front: gateway}, ownerReferences: [
    {apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, name: door, uid: g, controller: true}]}
  spec: {type: LoadBalancer, ports: [{port: 80}]}
  status: {loadBalancer: {ingress: [{ip: 192.0.2.1}]}}
- metadata: {name: fairlead-ingress, namespace: kube-system, labels: {fairlead.dev/front: ingress}}
  spec: {type: LoadBalancer, ports: [{port: 80}]}
- metadata: {name: web, namespace: shop}
  spec: {type: ClusterIP, ports: [{port: 80}]}
- metadata: {name: single-fairlead-ingress, namespace: team, labels: {fairlead.dev/front: ingress}, ownerReferences: [
    {apiVersion: networking.k8s.io/v1, kind: Ingress, name: single, uid: i3, controller: true}]}
  spec: {type: LoadBalancer, ports: [{port: 80}]}`,
	"/api/v1/namespaces": `
- metadata: {name: shop}
- metadata: {name: team, labels: {routes: "yes"}}
- metadata: {name: other}`,
	"/api/v1/nodes": "[]",
	"/api/v1/events": `
- {metadata: {name: e}, involvedObject: {uid: i2}, reason: IngressNotServed, message: "tls[0]: Secret team/c: it does not exist"}`,
	"/apis/networking.k8s.io/v1/ipaddresses":    "[]",
	"/apis/networking.k8s.io/v1/ingressclasses": `[{metadata: {name: fairlead}, spec: {controller: fairlead.dev/ingress}}]`,
	"/apis/networking.k8s.io/v1/ingresses": `
- metadata: {name: books, namespace: shop, uid: i1}
  spec: {ingressClassName: fairlead, rules: [{host: books.example, http: {paths: [
    {path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}},
    {path: /x, pathType: Exact, backend: {service: {name: none, port: {name: http}}}}]}}]}
- metadata: {name: tea, namespace: team, uid: i2}
  spec: {ingressClassName: fairlead, tls: [{hosts: [tea.example], secretName: c}]}
- metadata: {name: single, namespace: team, uid: i3, annotations: {fairlead.dev/front: own}}
  spec: {ingressClassName: fairlead, rules: [{host: books.example, http: {paths: [
    {path: /, pathType: Prefix, backend: {service: {name: none, port: {number: 80}}}}]}}]}
- metadata: {name: foreign, namespace: team}
  spec: {ingressClassName: other}`,
	"/apis/gateway.networking.k8s.io/v1/gateways": `
- metadata: {name: door, namespace: shop}
  spec:
    gatewayClassName: fairlead
    listeners:
    - {name: http, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {routes: "yes"}}}}}
    - {name: https, port: 443, protocol: HTTPS, hostname: shop.example}
    - {name: tcp, port: 5432, protocol: TCP}
  status:
    conditions: [{type: Accepted, status: "True"},
      {type: Programmed, status: "False", reason: Pending, message: "waiting for nodes to serve it: n1"}]
    listeners:
    - {name: http, attachedRoutes: 1, supportedKinds: [{kind: HTTPRoute}, {kind: GRPCRoute}],
       conditions: [{type: Accepted, status: "True"}]}
    - {name: https, attachedRoutes: 1, supportedKinds: [{kind: HTTPRoute}], conditions: [{type: Conflicted, status: "False"},
        {type: ResolvedRefs, status: "False", reason: InvalidCertificateRef, message: Secret shop/c does not exist}]}
    - {name: tcp, attachedRoutes: 1, supportedKinds: [{kind: TCPRoute}], conditions: []}`,
	"/apis/gateway.networking.k8s.io/v1/httproutes": `
- metadata: {name: cart, namespace: shop}
  spec:
    parentRefs: [{name: door}]
    hostnames: [shop.example]
    rules:
    - {matches: [{path: {type: Exact, value: /cart}, method: GET}, {headers: [{name: a, value: b}]}], backendRefs: [{name: web, port: 80}]}
    - {backendRefs: [{name: web, port: 80, weight: 9}, {name: next, port: 80}]}
    - {filters: [{type: RequestRedirect, requestRedirect: {statusCode: 301}}]}
  status: {parents: [{controllerName: fairlead.dev/gateway, parentRef: {name: door}, conditions: [{type: Accepted, status: "True"},
    {type: ResolvedRefs, status: "False", reason: BackendNotFound, message: there is no Service shop/next}]}]}
- metadata: {name: tea, namespace: team}
  spec: {parentRefs: [{name: door, namespace: shop}], rules: [{backendRefs: [{name: tea, port: 80}]}]}
  status: {parents: [{controllerName: fairlead.dev/gateway, parentRef: {name: door, namespace: shop},
    conditions: [{type: Accepted, status: "True"}]}]}
- metadata: {name: spy, namespace: other}
  spec: {parentRefs: [{name: door, namespace: shop}], rules: [{backendRefs: [{name: spy, port: 80}]}]}
  status: {parents: [{controllerName: fairlead.dev/gateway, parentRef: {name: door, namespace: shop}, conditions: [
    {type: Accepted, status: "False", reason: NotAllowedByListeners, message: no listener lets it attach}]}]}
- metadata: {name: elsewhere, namespace: shop}
  spec: {parentRefs: [{name: back}]}`,
	"/apis/gateway.networking.k8s.io/v1/tcproutes": `
- metadata: {name: db, namespace: shop}
  spec: {parentRefs: [{name: door, sectionName: tcp}], rules: [{backendRefs: [{name: db, port: 5432}]}]}`,
	"/apis/gateway.networking.k8s.io/v1/gatewayclasses": `
- {metadata: {name: fairlead}, spec: {controllerName: fairlead.dev/gateway}}
- {metadata: {name: other}, spec: {controllerName: other.example/gateway}}`,
	"/apis/fairlead.dev/v1/speakers": "[]",
}

// forbidden is a list that the user may not read.
const forbidden = "forbidden"

// apiOf serves the lists of an API server, and counts how often each is read.
func apiOf(t *testing.T, lists map[string]string) (*rest.Config, map[string]int) {
	t.Helper()
	reads := map[string]int{}
	var mu sync.Mutex
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		reads[r.URL.Path]++
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		text, ok := lists[r.URL.Path]
		if !ok || text == forbidden {
			status := metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
			if ok {
				status.Reason, status.Code = metav1.StatusReasonForbidden, http.StatusForbidden
				status.Details = &metav1.StatusDetails{Kind: path.Base(r.URL.Path)}
			}
			w.WriteHeader(int(status.Code))
			_ = json.NewEncoder(w).Encode(status)
			return
		}
		var items []map[string]any
		if err := yaml.Unmarshal([]byte(text), &items); err != nil {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		_, reason, _ := strings.Cut(r.URL.Query().Get("fieldSelector"), ",reason=")
		items = slices.DeleteFunc(items, func(i map[string]any) bool { return reason != "" && i["reason"] != reason })
		_ = json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"resourceVersion": "1"}, "items": items})
	}))
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL, QPS: -1}, reads
}

// reportOf reports about the lists of an API server.
func reportOf(t *testing.T, lists map[string]string) *Report {
	t.Helper()
	config, _ := apiOf(t, lists)
	client, own, gateways := kubernetes.NewForConfigOrDie(config), must(v1.NewClient(config)), must(api.NewClient(config))
	r, services, err := collectLB(t.Context(), client, own, "", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	r.fronts(t.Context(), client, gateways, services)
	return r
}

// An Ingress with a front for itself is shown at its own Service, with what is wrong with it, and not at the shared one.
func TestFrontOfOneIngress(t *testing.T) {
	all := reportOf(t, frontLists).Services
	i := slices.IndexFunc(all, func(s lbService) bool { return s.Name == "single-fairlead-ingress" })
	if i < 0 {
		t.Fatalf("%+v", all)
	}
	f := all[i].Front
	if f == nil || f.Kind != "Ingress" || f.Name != "single" || f.Problem != "" || len(f.Routes) != 1 || f.Routes[0].Name != "single" ||
		!strings.Contains(f.Routes[0].Problem, "there is no Service team/none") {
		t.Errorf("%+v", f)
	}
	for _, r := range all[1].Front.Routes {
		if r.Name == "single" {
			t.Errorf("at the shared front, too: %+v", r)
		}
	}
}

// Of the Events of an Ingress the last one counts, also of two within a second.
func TestLastEventOfIngress(t *testing.T) {
	event := func(version int, reason string) string {
		return fmt.Sprintf("- {metadata: {name: e%d, resourceVersion: '%d'}, involvedObject: {uid: i2}, reason: %s, message: m%d, "+
			"lastTimestamp: '2026-01-01T00:00:00Z'}\n", version, version, reason, version)
	}
	for text, want := range map[string]string{
		event(9, "IngressNotServed"):                                  "m9",
		event(9, "IngressNotServed") + event(10, "IngressServed"):     "",
		event(9, "IngressServed") + event(10, "IngressNotServed"):     "m10",
		event(11, "IngressNotServed") + event(10, "IngressNotServed"): "m11",
	} {
		lists := maps.Clone(frontLists)
		lists["/api/v1/events"] = text
		routes := reportOf(t, lists).Services[1].Front.Routes
		if i := slices.IndexFunc(routes, func(r lbRoute) bool { return r.Name == "tea" }); i < 0 || routes[i].Problem != want {
			t.Errorf("%s: %+v, want the problem %q", text, routes, want)
		}
	}
}

// A user who may not list Gateways is told that, and not that there is none.
func TestUnreadGateways(t *testing.T) {
	const at = "/apis/gateway.networking.k8s.io/v1/gateways"
	for text, want := range map[string]string{forbidden: "you may not list gateways", "[]": "the Gateway does not exist"} {
		lists := maps.Clone(frontLists)
		lists[at] = text
		if got := reportOf(t, lists).Services[0].Front.Problem; !strings.HasPrefix(got, want) {
			t.Errorf("Gateways %s: %q, want %q", text, got, want)
		}
	}
}

// 'fairlead lb status' and 'explain' name the listeners and routes of fronts, where these lead, and why one is not served.
func TestRoutesOfFronts(t *testing.T) {
	r := reportOf(t, frontLists)
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"shop/door-fairlead is the front of Gateway door",
		"not served as it asks: Programmed is False, Pending: waiting for nodes to serve it: n1",
		"http 80 HTTP * 1 -", "https 443 HTTPS shop.example 1 ResolvedRefs is False, InvalidCertificateRef: Secret shop/c does not exist",
		"HTTPRoute shop/cart https shop.example shop/web:80, shop/web:80 (weight 9), shop/next:80 (weight 1), redirect 301 " +
			"ResolvedRefs is False, BackendNotFound: there is no Service shop/next",
		"HTTPRoute team/tea http * team/tea:80 -",
		"HTTPRoute other/spy - * other/spy:80 Accepted is False, NotAllowedByListeners: no listener lets it attach",
		"TCPRoute shop/db - * shop/db:5432 its controller has not looked at it yet",
		"kube-system/fairlead-ingress is the front of all Ingresses", "http 80 HTTP * 2 -", "https 443 HTTPS * 2 -",
		"Ingress shop/books - books.example shop/web:80, shop/none:http rules[0].http.paths[1].backend: there is no Service shop/none",
		"Ingress team/tea - * - tls[0]: Secret team/c: it does not exist",
	} {
		if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), want) {
			t.Errorf("no %q", want)
		}
	}
	if t.Failed() || strings.Contains(out.String(), "elsewhere") || strings.Contains(out.String(), "foreign") {
		t.Errorf("%s", out.String())
	}
	front := r.Services[0].Front
	out.Reset()
	if err := front.print(&out, "shop/door-fairlead", len(front.routes()), true); err != nil {
		t.Fatal(err)
	}
	const rule = "GET = /cart or / with 1 header fields shop/web:80 everything shop/web:80 (weight 9), shop/next:80 (weight 1)"
	if got := strings.Join(strings.Fields(out.String()), " "); !strings.Contains(got, rule) {
		t.Errorf("no %q in %s", rule, out.String())
	}
	// However many routes there are, the report about all Services names some: first the ones that are not served.
	good := front.Routes[0]
	for i := range maxRows {
		good.Name, good.Problem = fmt.Sprint("more", i), ""
		front.Routes = append([]lbRoute{good}, front.Routes...)
	}
	out.Reset()
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"and 4 more routes: fairlead lb status shop/door-fairlead\n", "other/spy"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %s", want, out.String())
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
