package proxied

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

const routedGateway = `
metadata: {name: g, namespace: default}
spec: {gatewayClassName: fairlead, listeners: [{name: http, port: 80, protocol: HTTP}]}`

const routedRoute = `
metadata: {name: r, namespace: default}
spec:
  parentRefs: [{name: g}]
  rules:
  - matches: [{path: {value: /app}, headers: [{name: X-Version, value: "2"}]}]
    filters:
    - {type: URLRewrite, urlRewrite: {hostname: inner.example.com, path: {type: ReplacePrefixMatch, replacePrefixMatch: /v2}}}
    - type: RequestHeaderModifier
      requestHeaderModifier: {set: [{name: x-set, value: new}], add: [{name: X-Add, value: more}], remove: [x-remove]}
    - {type: ResponseHeaderModifier, responseHeaderModifier: {remove: [server], set: [{name: X-Out, value: "1"}]}}
    backendRefs: [{name: web, port: 80}]
  - matches: [{path: {value: /app}, queryParams: [{name: a b, value: c&d}]}]
    backendRefs: [{name: web, port: 80}]
  - matches: [{path: {value: /old}}]
    filters: [{type: RequestRedirect, requestRedirect: {scheme: https, statusCode: 308}}]
  - matches: [{path: {value: /cors}}]
    filters:
    - {type: CORS, cors: {allowOrigins: ["https://a.example"], allowMethods: [PUT]}}
    - {type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: X-Out, value: "1"}]}}
    backendRefs: [{name: web, port: 80}]
  - matches: [{path: {value: /none}}]
    backendRefs: [{name: missing, port: 80}]`

func newRouter(t testing.TB) (*router, *Config) {
	t.Helper()
	g, r := &gwv1.Gateway{}, &gwv1.HTTPRoute{}
	for text, to := range map[string]any{routedGateway: g, routedRoute: r} {
		if err := yaml.UnmarshalStrict([]byte(text), to); err != nil {
			t.Fatal(err)
		}
	}
	r.UID = types.UID("r")
	web, name := svc.Name{Namespace: "default", Name: "web"}, svc.NameOf(g)
	f := gateway.BuildGateway(&gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{name: g}, Routes: map[svc.Name]*gwv1.HTTPRoute{svc.NameOf(r): r},
		Services: map[svc.Name]*services.Service{web: {Ports: []services.Port{{Name: "http", Number: 80}}}},
	}, name, nil)
	if len(f.Targets) != 1 {
		t.Fatalf("targets %v", f.Targets)
	}
	to := &Config{}
	return &router{
		port: f.Table.Ports[80], targets: map[gateway.Target]*Config{f.Targets[0]: to},
		counts: traffic.Routes{Service: traffic.NewBook().Service(web)},
	}, to
}

func parsed(t testing.TB, text string) *http1.Request {
	t.Helper()
	r := &http1.Request{}
	if n, err := r.Parse([]byte(strings.ReplaceAll(text, "\n", "\r\n") + "\r\n\r\n")); n == 0 || err != nil {
		t.Fatalf("%q: %d, %v", text, n, err)
	}
	return r
}

func textOf(fields []http1.Field) string {
	var out []string
	for _, f := range fields {
		out = append(out, string(f.Name)+"="+string(f.Value))
	}
	return strings.Join(out, " ")
}

// The head goes on as the filters of the rule ask for, and in the form by which the rule was found.
func TestRouterChangesHeads(t *testing.T) {
	o, web := newRouter(t)
	from := Origin{At: netip.MustParseAddrPort("192.0.2.1:80")}
	r := parsed(t, "GET /x/../app//items?q=//a HTTP/1.1\nHost: Shop:80\nx-version: 2\nX-Set: old\nX-SET: older\nX-Remove: 1\nx-add: some")
	route := o.Route(r, from)
	if route.To != web || string(r.Target) != "/v2/items?q=//a" || string(r.Host) != "inner.example.com" {
		t.Errorf("%+v, %s at %s", route, r.Target, r.Host)
	}
	if got := textOf(r.Fields); got != "Host=Shop:80 x-version=2 x-add=some x-set=new X-Add=more" {
		t.Error(got)
	}
	answer := &http1.Response{}
	answer.Fields = []http1.Field{{Name: []byte("Server"), Value: []byte("x")}, {Name: []byte("x-out"), Value: []byte("0")}}
	if route.Edit(answer); textOf(answer.Fields) != "X-Out=1" {
		t.Error(textOf(answer.Fields))
	}
	for target, want := range map[string]string{
		"/app?a+b=c%26d": "", "/app?a+b=x&a%20b=c%26d": "404", "/app": "404", "/old/x?y=z": "308 https://shop/old/x?y=z",
		"/none": "500", "/": "404", "/app/..;/old": "400",
	} {
		text := "GET " + target + " HTTP/1.1\nHost: shop"
		route, got := o.Route(parsed(t, text), from), ""
		if p := route.Reply; p != nil {
			if got = strings.TrimSpace(strings.Join([]string{strconv.Itoa(p.Status), textOf(p.Fields)}, " ")); len(p.Fields) > 0 {
				got = strings.Replace(got, "Location=", "", 1)
			}
		}
		if got != want {
			t.Errorf("%s: %q, want %q", target, got, want)
		}
	}
	// A target whose endpoints have not been read yet.
	o.targets = nil
	if route := o.Route(parsed(t, "GET /app HTTP/1.1\nHost: shop\nX-Version: 2"), from); route.Reply == nil || route.Reply.Status != 503 {
		t.Errorf("%+v", route)
	}
}

// A question of a browser is answered here; a backend's own CORS fields are replaced by the rule's.
func TestRouterAnswersBrowsers(t *testing.T) {
	o, web := newRouter(t)
	ask := "OPTIONS /cors HTTP/1.1\nHost: shop\nOrigin: https://a.example\n"
	route := o.Route(parsed(t, ask+"Access-Control-Request-Method: PUT"), Origin{})
	if p := route.Reply; p == nil || p.Status != 200 || !strings.Contains(textOf(p.Fields), "Access-Control-Allow-Methods=PUT") {
		t.Errorf("%+v", route)
	}
	if route := o.Route(parsed(t, strings.TrimSpace(ask)), Origin{}); route.To != web { // OPTIONS without a question is for the backend
		t.Errorf("%+v", route)
	}
	for origin, want := range map[string]string{
		"https://a.example": "Vary=Origin Access-Control-Allow-Origin=https://a.example X-Out=1", "https://b.example": "Vary=Origin X-Out=1",
	} {
		route := o.Route(parsed(t, "GET /cors HTTP/1.1\nHost: shop\nOrigin: "+origin), Origin{})
		answer := &http1.Response{}
		answer.Fields = []http1.Field{{Name: []byte("access-control-allow-origin"), Value: []byte("*")}}
		if route.Edit(answer); textOf(answer.Fields) != want {
			t.Errorf("%s: %s, want %s", origin, textOf(answer.Fields), want)
		}
	}
}

func BenchmarkRoute(b *testing.B) {
	o, _ := newRouter(b)
	text := "GET /app/items HTTP/1.1\r\nHost: shop\r\nX-Version: 2\r\nAccept: */*\r\n\r\n"
	r := &http1.Request{}
	b.ReportAllocs()
	for b.Loop() {
		r.Reset()
		if _, err := r.Parse([]byte(text)); err != nil {
			b.Fatal(err)
		}
		o.Route(r, Origin{})
	}
}

// A request is parsed once, however many rules look at it.
func TestHeadOfRequest(t *testing.T) {
	r := &http1.Request{Host: []byte("a.b")}
	r.Fields = []http1.Field{
		{Name: []byte("X-A"), Value: []byte("1")}, {Name: []byte("x-b"), Value: []byte("")}, {Name: []byte("x-a"), Value: []byte("2")},
	}
	h := &head{r: r, query: "q=1&q=2&%zz=3&bad=%zz&bad=ok&empty&a%20b=c+d"}
	for name, want := range map[string]string{"x-a": "1,2", "x-b": "", "x-c": "none", "host": "a.b"} {
		if v, ok := h.Header(name); ok != (want != "none") || ok && v != want {
			t.Errorf("%s: %q, %t", name, v, ok)
		}
	}
	for name, want := range map[string]string{"q": "1", "bad": "ok", "empty": "", "a b": "c d", "%zz": "none", "": "none"} {
		if v, ok := h.Query(name); ok != (want != "none") || ok && v != want {
			t.Errorf("%s: %q, %t", name, v, ok)
		}
	}
	if n := testing.AllocsPerRun(10, func() { h.Query("q") }); n > 0 {
		t.Errorf("%v allocations for a second look at the query", n)
	}
}

// A front shows the certificates that its own listeners name, although all fronts have the ones of all.
func TestCertificatesOfFronts(t *testing.T) {
	name := func(n string) svc.Name { return svc.Name{Namespace: "shop", Name: n} }
	shared := map[svc.Name]*tls.Certificate{}
	for _, n := range []string{"a", "b", "c"} {
		c, _, _ := lbtest.Certificate(t, n+".example.com")
		shared[name(n)] = &c
	}
	standIn := *shared[name("c")] // clients have it until the first one is issued
	standIn.Leaf = &x509.Certificate{Subject: pkix.Name{CommonName: svc.ACMEStandInName}, NotAfter: time.Now().AddDate(10, 0, 0)}
	shared[name("c")] = &standIn
	single := &Service{Certificates: []tls.Certificate{*shared[name("a")], standIn}}
	single.Spec.Certificates = []string{"a", "c"}
	if got := certificateEnds(single); len(got) != 1 || got["a"] != shared[name("a")].Leaf.NotAfter {
		t.Errorf("a Service shows %v", got)
	}
	for _, own := range []string{"a", "b"} {
		v := &Service{Routes: &Routes{Certificates: shared, Ports: map[uint16]*gateway.Port{
			443: {Listeners: []*gateway.Listener{{Certificates: []svc.Name{name(own), name("c"), name("gone")}}}}, 80: {},
		}}}
		if got := certificateEnds(v); len(got) != 1 || got["shop/"+own] != shared[name(own)].Leaf.NotAfter {
			t.Errorf("front %s shows %v", own, got)
		}
	}
}
