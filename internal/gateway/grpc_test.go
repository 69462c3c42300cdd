package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// grpcRoute is a GRPCRoute of Gateway g.
func grpcRoute(name, spec string) string {
	return fmt.Sprintf("\n---\nkind: GRPCRoute\nmetadata: {name: %s, uid: %s}\nspec:\n  parentRefs: [{name: g}]\n%s", name, name, spec)
}

// Calls go where the precedence of the specification leads them: more characters of the service, then of the method, then more
// header fields, then the first rule.
func TestCallPrecedence(t *testing.T) {
	f := builtFrom(t, plainGateway+grpcRoute("r", `  rules:
  - backendRefs: [{name: any, port: 80}]
  - {matches: [{method: {method: Get}}], backendRefs: [{name: method, port: 80}]}
  - {matches: [{method: {service: shop.Cart}}], backendRefs: [{name: service, port: 80}]}
  - {matches: [{method: {service: shop.Cart}}], backendRefs: [{name: later, port: 80}]}
  - {matches: [{method: {service: shop.Cart, method: Get}}], backendRefs: [{name: both, port: 80}]}
  - matches: [{method: {service: shop.Cart, method: Get}, headers: [{name: Version, value: "2"}]}]
    backendRefs: [{name: field, port: 80}]
  - matches: [{method: {service: shop.Cart, method: Get}, headers: [{name: version, value: "[3-5]", type: RegularExpression}]}]
    backendRefs: [{name: regexfield, port: 80}]
  - matches: [{method: {type: RegularExpression, service: 'shop\.(Stock|Price)', method: 'List.+'}}]
    backendRefs: [{name: regex, port: 80}]
  - matches: [{method: {type: RegularExpression, service: 'shop[.]P.*'}}]
    backendRefs: [{name: short, port: 80}]`)+
		service("any", "method", "service", "later", "both", "field", "regexfield", "regex", "short"))
	for path, want := range map[string]string{
		"/shop.Cart/Get": "both", "/shop.Cart/Put": "service", "/other.Cart/Get": "method", "/other.Cart/Put": "any",
		"/shop.Cart/Get version=2": "field", "/shop.Cart/Get version=4": "regexfield", "/shop.Cart/Get version=45": "both",
		"/shop.Stock/ListAll": "regex", "/shop.Price/ListAll": "regex", "/shop.Price/Get": "short", "/shop.Stock/List": "any",
		"/shop.cart/Put": "any", "/shop.Cart": "404", "/": "404", "/shop.Cart/Get/x": "404", "/shop.Cart/": "404",
		// A call is compared in one form, which backends get.
		"/shop.Cart/%47et": "both", "/x/../shop.Cart/Get": "both", "//shop.Cart/Get": "both", "/shop.Cart%2FGet": "400",
	} {
		if got := ask(t, f.Table, "POST http://shop.example.com"+path); got != want {
			t.Errorf("%s goes to %s, want %s", path, got, want)
		}
	}
}

// A call takes as long to find among 10,000 services as among few: an index leads to it.
func BenchmarkCall(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		var matches []*match
		for i := range n {
			matches = append(matches, &match{Rule: &Rule{}, kind: callMatch, call: &filter.Call{Service: fmt.Sprint("shop.S", i), Method: "Get"}})
		}
		p := newPaths(matches)
		r := &Request{Path: "/shop.S7/Get", Method: "POST"}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				if p.find(r, r.Path) != matches[7] {
					b.Fatal("another match")
				}
			}
		})
	}
}

// Backends of a GRPCRoute are spoken to by HTTP/2, whatever their port says, unless that rules it out.
func TestCallBackends(t *testing.T) {
	for app, want := range map[string]string{
		"": "h2c True ResolvedRefs", "kubernetes.io/h2c": "h2c True ResolvedRefs", "grpc": "h2c True ResolvedRefs",
		"http": "h2c True ResolvedRefs", "https": "503 False UnsupportedProtocol", "kubernetes.io/ws": "503 False UnsupportedProtocol",
		"tls": "503 False UnsupportedProtocol", "kubernetes.io/wss": "503 False UnsupportedProtocol",
	} {
		f := builtFrom(t, plainGateway+grpcRoute("r", "  rules: [{backendRefs: [{name: a, port: 80}]}]")+
			"\n---\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: 80, appProtocol: "+app+"}]}")
		rule, _, v := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/a.B/C", Method: "POST", Fields: fields{}})
		if v != Routed {
			t.Fatalf("%s: verdict %d", app, v)
		}
		got := ""
		if w := rule.Pick(0); w.Valid {
			got = string(w.Backend.Protocol)
		} else {
			got = fmt.Sprint(rule.Refusal())
		}
		if got += " " + grpcStatus(f, "ResolvedRefs"); !strings.HasPrefix(got, want) {
			t.Errorf("appProtocol %q: %s, want %s", app, got, want)
		}
	}
}

// grpcStatus returns a condition of GRPCRoute default/r, with its message.
func grpcStatus(f *Front, kind string) string {
	parents := f.Parents(kinds.Route{Kind: kinds.GRPCRoute, Name: svc.Name{Namespace: "default", Name: "r"}})
	for _, c := range parents[0].Conditions {
		if c.Type == kind {
			return strings.TrimSpace(string(c.Status) + " " + c.Reason + " " + c.Message)
		}
	}
	return "none"
}

// What is wrong with a GRPCRoute is in its status with the field, and calls of such a rule get no backend.
func TestCallStatuses(t *testing.T) {
	const to = "backendRefs: [{name: a, port: 80}]"
	for rule, want := range map[string][3]string{
		to: {"a", "Accepted", "True Accepted"},
		"matches: [{method: {type: RegularExpression, service: '('}}, {}], " + to: {
			"503", "Accepted", "False UnsupportedValue rules[0].matches[0].method.service: the regular expression is invalid",
		},
		"matches: [{method: {service: a/b}}], " + to: {
			"404", "Accepted", `False UnsupportedValue rules[0].matches[0].method: "a/b" is no name of a service or of a method`,
		},
		"matches: [{method: {}}], " + to: {
			"404", "Accepted", "False UnsupportedValue rules[0].matches[0].method: service and method are both missing",
		},
		"matches: [{method: {type: Prefix, service: a}}], " + to: {
			"404", "Accepted", "False UnsupportedValue rules[0].matches[0].method.type: want Exact or RegularExpression",
		},
		"filters: [{type: ExtensionRef, extensionRef: {group: g, kind: K, name: n}}], " + to: {
			"503", "Accepted", "False UnsupportedValue rules[0].filters[0].type: filter ExtensionRef is not served here",
		},
		"backendRefs: [{name: b, port: 80}]": {
			"503", "ResolvedRefs", "False BackendNotFound rules[0].backendRefs[0]: there is no Service default/b",
		},
		"backendRefs: [{name: c, namespace: other, port: 80}]": {
			"503", "ResolvedRefs", "False RefNotPermitted rules[0].backendRefs[0]: no ReferenceGrant of namespace other permits it",
		},
		"backendRefs: [{name: a, port: 80, weight: 0}]": {"503", "ResolvedRefs", "True ResolvedRefs"},
	} {
		f := builtFrom(t, plainGateway+grpcRoute("r", "  rules: [{"+rule+"}]")+service("a", "other/c"))
		got := ask(t, f.Table, "POST http://h/a.B/C")
		if got == "500" {
			r, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/a.B/C", Method: "POST", Fields: fields{}})
			got = fmt.Sprint(r.Refusal())
		}
		if status := grpcStatus(f, want[1]); got != want[0] || !strings.HasPrefix(status, want[2]) {
			t.Errorf("%s: %s, %q; want %q", rule, got, status, want)
		}
	}
}

// A ReferenceGrant for GRPCRoutes opens a Service of another namespace to them; one for HTTPRoutes does not.
func TestCallGrants(t *testing.T) {
	for kind, want := range map[string]string{"GRPCRoute": "c", "HTTPRoute": "500"} {
		f := builtFrom(t, plainGateway+grpcRoute("r", "  rules: [{backendRefs: [{name: c, namespace: other, port: 80}]}]")+service("other/c")+
			"\n---\nkind: ReferenceGrant\nmetadata: {name: g, namespace: other}\nspec:\n"+
			"  from: [{group: gateway.networking.k8s.io, kind: "+kind+", namespace: default}]\n  to: [{group: '', kind: Service}]")
		if got := ask(t, f.Table, "POST http://h/a.B/C"); got != want {
			t.Errorf("with a grant for %s: %s, want %s", kind, got, want)
		}
	}
}

// A hostname of a listener belongs to routes of one kind, HTTPRoute or GRPCRoute: the older one has it, and the other one is not
// accepted. A younger route so takes no part of an older one's host, by a wildcard or a longer path either.
func TestHostsOfOneKind(t *testing.T) {
	const conflict, fine = "False HostnameConflict", "True Accepted"
	for _, c := range []struct {
		http, grpc string // hostnames; the first route is the older one
		firstGRPC  bool
		want       [2]string // of the HTTPRoute, of the GRPCRoute
	}{
		{"a.example.com", "a.example.com", false, [2]string{fine, conflict}},
		{"a.example.com", "a.example.com", true, [2]string{conflict, fine}},
		{"a.example.com", "b.example.com", false, [2]string{fine, fine}},
		{"'*.example.com'", "a.b.example.com", false, [2]string{fine, conflict}},
		{"a.b.example.com", "'*.example.com'", false, [2]string{fine, conflict}},
		{"'*.b.example.com'", "'*.example.com'", false, [2]string{fine, conflict}},
		{"'*.example.com'", "'*.b.example.com'", true, [2]string{conflict, fine}},
		{"'*.example.com'", "example.com", false, [2]string{fine, fine}},
		{"example.com", "'*.example.com'", true, [2]string{fine, fine}},
		{"'*.example.com'", "'*.example.org'", false, [2]string{fine, fine}},
		{"", "a.example.com", false, [2]string{fine, conflict}},
		{"", "a.example.com", true, [2]string{conflict, fine}},
		{"a.example.com", "", false, [2]string{fine, conflict}},
		{"a.example.com, b.example.com", "c.example.com, b.example.com", false, [2]string{fine, conflict}},
	} {
		o := objects(t, plainGateway+grpcRoute("r", "  hostnames: ["+c.grpc+"]\n  rules: [{backendRefs: [{name: grpc, port: 80}]}]")+
			"\n---\nkind: HTTPRoute\nmetadata: {name: a}\nspec: {parentRefs: [{name: g}], hostnames: ["+c.http+
			"], rules: [{backendRefs: [{name: http, port: 80}]}]}"+service("http", "grpc"))
		http, grpc := svc.Name{Namespace: "default", Name: "a"}, svc.Name{Namespace: "default", Name: "r"}
		old, young := metav1.NewTime(time.Unix(1000, 0)), metav1.NewTime(time.Unix(2000, 0))
		o.Routes[http].CreationTimestamp, o.Calls[grpc].CreationTimestamp = old, young
		if c.firstGRPC {
			o.Routes[http].CreationTimestamp, o.Calls[grpc].CreationTimestamp = young, old
		}
		f := BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, nil)
		got := [2]string{
			conditionOf(f.Parents(kinds.Route{Kind: kinds.HTTPRoute, Name: http})[0].Conditions, "Accepted"),
			conditionOf(f.Parents(kinds.Route{Kind: kinds.GRPCRoute, Name: grpc})[0].Conditions, "Accepted"),
		}
		if got != c.want {
			t.Errorf("HTTPRoute [%s], GRPCRoute [%s]: %v, want %v", c.http, c.grpc, got, c.want)
		}
		attached := int32(0)
		for i, s := range f.Status(nil, "").Listeners {
			attached += s.AttachedRoutes
			if len(s.SupportedKinds) != 2 {
				t.Errorf("listener %d takes %v", i, s.SupportedKinds)
			}
		}
		if want := int32(strings.Count(fmt.Sprint(got), "True")); attached != want {
			t.Errorf("%d routes are attached, want %d", attached, want)
		}
	}
}

// A route that was not accepted keeps no host from others, and has its host once the older one has gone.
func TestHostIsFreeAgain(t *testing.T) {
	o := objects(t, plainGateway+grpcRoute("r", `  hostnames: [a.example.com, b.example.com]
  rules: [{backendRefs: [{name: grpc, port: 80}]}]`)+`
---
kind: HTTPRoute
metadata: {name: a}
spec: {parentRefs: [{name: g}], hostnames: [a.example.com], rules: [{backendRefs: [{name: http, port: 80}]}]}
---
kind: HTTPRoute
metadata: {name: z}
spec: {parentRefs: [{name: g}], hostnames: [b.example.com], rules: [{backendRefs: [{name: http, port: 80}]}]}`+service("http", "grpc"))
	name := func(n string) svc.Name { return svc.Name{Namespace: "default", Name: n} }
	f := BuildGateway(o, name("g"), nil)
	for host, want := range map[string]string{"a": "http", "b": "http"} { // "z" comes behind "r", which has nothing
		if got := ask(t, f.Table, "POST http://"+host+".example.com/a.B/C"); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
	delete(o.Routes, name("a"))
	f = BuildGateway(o, name("g"), f)
	if got := ask(t, f.Table, "POST http://a.example.com/a.B/C"); got != "grpc" {
		t.Errorf("without the older route: %s", got)
	}
	z := f.Parents(kinds.Route{Kind: kinds.HTTPRoute, Name: name("z")})
	if got := conditionOf(z[0].Conditions, "Accepted"); got != "False HostnameConflict" {
		t.Errorf("the younger HTTPRoute: %s", got)
	}
}

// allowedRoutes.kinds can take one of the two kinds, and others than these are named.
func TestKindsOfListeners(t *testing.T) {
	for allowed, want := range map[string]string{
		"{kind: GRPCRoute}":                    "[GRPCRoute] True ResolvedRefs; False NotAllowedByListeners; True Accepted",
		"{kind: HTTPRoute}":                    "[HTTPRoute] True ResolvedRefs; True Accepted; False NotAllowedByListeners",
		"{kind: GRPCRoute}, {kind: GRPCRoute}": "[GRPCRoute] True ResolvedRefs; False NotAllowedByListeners; True Accepted",
		"{kind: GRPCRoute}, {kind: TLSRoute}":  "[GRPCRoute] False InvalidRouteKinds; False NotAllowedByListeners; True Accepted",
	} {
		f := builtFrom(t, "kind: Gateway\nmetadata: {name: g}\nspec: {gatewayClassName: fairlead, listeners: [{name: http, port: 80, "+
			"protocol: HTTP, allowedRoutes: {kinds: ["+allowed+"]}}]}"+
			grpcRoute("r", "  hostnames: [b]\n  rules: [{backendRefs: [{name: a, port: 80}]}]")+
			"\n---\nkind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{name: g}], hostnames: [a]}"+service("a"))
		l := f.Status(nil, "").Listeners[0]
		var taken []gwv1.Kind
		for _, k := range l.SupportedKinds {
			taken = append(taken, k.Kind)
		}
		name := svc.Name{Namespace: "default", Name: "r"}
		got := fmt.Sprint(taken, " ", conditionOf(l.Conditions, "ResolvedRefs"), "; ",
			conditionOf(f.Parents(kinds.Route{Kind: kinds.HTTPRoute, Name: name})[0].Conditions, "Accepted"), "; ",
			conditionOf(f.Parents(kinds.Route{Kind: kinds.GRPCRoute, Name: name})[0].Conditions, "Accepted"))
		if got != want {
			t.Errorf("%s: %s, want %s", allowed, got, want)
		}
	}
}
