package gateway

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// route returns the manifest of an HTTPRoute for Gateway default/g. Each rule is "SERVICE MATCHES", with MATCHES in YAML.
func route(name, hosts string, rules ...string) string {
	ns, short, ok := strings.Cut(name, "/")
	if !ok {
		ns, short = "default", name
	}
	out := fmt.Sprintf("\n---\nkind: HTTPRoute\nmetadata: {namespace: %s, name: %s}\nspec:\n  parentRefs: [{name: g, namespace: default}]\n"+
		"  hostnames: [%s]\n  rules:\n", ns, short, hosts)
	for _, r := range rules {
		to, matches, _ := strings.Cut(r, " ")
		out += fmt.Sprintf("  - {matches: [%s], backendRefs: [{name: %s, port: 80}]}\n", matches, to)
	}
	return strings.TrimSuffix(out, "\n")
}

// The precedence of the specification (HTTPRouteRule.matches).
func TestPrecedence(t *testing.T) {
	f := builtFrom(t, plainGateway+service("root", "long", "longer", "exact", "post")+
		service("header", "headers", "query", "both", "regex", "late", "early")+
		route("r", "",
			`root {path: {value: /}}`,
			`long {path: {value: /a}}`,
			`longer {path: {value: /a/b/}}`,
			`exact {path: {type: Exact, value: /a/b/c}}`,
			`post {method: POST, path: {value: /a}}`,
			`header {headers: [{name: X-One, value: "1"}], path: {value: /a}}`,
			`headers {headers: [{name: X-One, value: "1"}, {name: x-two, value: "2"}], path: {value: /a}}`,
			`query {queryParams: [{name: q, value: "1"}], path: {value: /a}}`,
			`both {headers: [{name: x-one, value: "1"}], queryParams: [{name: q, value: "1"}], path: {value: /a}}`,
			`regex {path: {type: RegularExpression, value: "/a/[0-9]+"}}`)+
		route("first", "tie.example.com", `early {path: {value: /}}`)+route("second", "tie.example.com", `late {path: {value: /}}`))
	for request, want := range map[string]string{
		"http://x/": "root", "http://x/ab": "root", "http://x/a": "long", "http://x/a/": "long", "http://x/a/b": "longer",
		"http://x/a/b/c": "exact", "http://x/a/b/c/": "longer", "POST http://x/a/x": "post", "POST http://x/a/b": "longer",
		"http://x/a x-one=1": "header", "http://x/a x-one=1 x-two=2": "headers", "http://x/a?q=1": "query", "http://x/a?q=1 x-one=1": "both",
		"http://x/a?q=2 x-one=2": "long", "http://x/a/17": "regex", "http://x/a/17x": "long", "http://tie.example.com/": "early",
		// A host of a rule comes before rules for all hosts, which stay for what it does not take.
		"http://x//a///b": "longer", "http://x/c/../a": "long", "http://x/%61": "long",
	} {
		if got := ask(t, f.Table, request); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
}

// The older route wins, and then the one whose name comes first (also over namespaces).
func TestOldestWins(t *testing.T) {
	text := strings.Replace(plainGateway, "protocol: HTTP", "protocol: HTTP, allowedRoutes: {namespaces: {from: All}}", 1) +
		service("aaa/attacker", "victim/victim") +
		strings.Replace(route("aaa/r", "shop.example.com", "attacker {}"), "name: r}", `name: r, creationTimestamp: "2026-02-01T00:00:00Z"}`, 1) +
		strings.Replace(route("victim/r", "shop.example.com", "victim {}"), "name: r}", `name: r, creationTimestamp: "2026-01-01T00:00:00Z"}`, 1)
	if got := ask(t, builtFrom(t, text).Table, "http://shop.example.com/"); got != "victim" {
		t.Error(got)
	}
}

const isolated = `
kind: Gateway
metadata: {name: g, generation: 3}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: rest, port: 80, protocol: HTTP}
  - {name: wild, port: 80, protocol: HTTP, hostname: "*.example.com"}
  - name: foo
    port: 80
    protocol: HTTP
    hostname: foo.example.com
    allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: foo}}}}
  - {name: other, port: 81, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}}`

// A request is only for the routes of its most specific listener, and a route only attaches where it may.
func TestListenerIsolation(t *testing.T) {
	f := builtFrom(t, isolated+service("a", "b", "foo/foo", "evil/evil")+
		"\n---\nkind: Namespace\nmetadata: {name: foo, labels: {team: foo}}\n---\nkind: Namespace\nmetadata: {name: evil}"+
		route("a", "", `a {path: {value: /}}`)+
		strings.Replace(route("b", "", `b {path: {value: /b}}`), "namespace: default}]", "namespace: default, sectionName: wild}]", 1)+
		route("foo/r", "foo.example.com", "foo {path: {value: /foo}}")+
		strings.Replace(route("evil/r", "foo.example.com", "evil {}"), "namespace: default}]", "namespace: default, sectionName: foo}]", 1))
	for request, want := range map[string]string{
		"http://x/": "a", "http://x/b": "a", "http://y.example.com/b": "b", "http://foo.example.com/foo": "foo",
		"http://foo.example.com/": "404", "http://foo.example.com/b": "404", "http://foo.example.com:81/foo": "foo", "http://x:81/": "a",
	} {
		if got := ask(t, f.Table, request); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
	evil := f.Parents(kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "evil", Name: "r"}})
	if got := conditionOf(evil[0].Conditions, "Accepted"); got != "False NotAllowedByListeners" {
		t.Error(got)
	}
	var attached []int32
	for _, l := range f.Status(nil, "").Listeners {
		attached = append(attached, l.AttachedRoutes)
	}
	if fmt.Sprint(attached) != "[1 2 1 2]" {
		t.Errorf("attached: %v", attached)
	}
}

// Statuses of routes and listeners, with the reasons of the specification.
func TestStatuses(t *testing.T) {
	const tls = `
kind: Gateway
metadata: {name: g, generation: 7}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: http, port: 80, protocol: HTTP, hostname: "*.example.com"}
  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [%s]}}
  - {name: tcp, port: 90, protocol: example.com/quic}`
	for _, c := range []struct{ name, more, ref, part, kind, want string }{
		{"a valid one", route("r", "a.example.com", "a {}"), "{name: c}", "route", "Accepted", "True Accepted"},
		{"references", route("r", "a.example.com", "a {}"), "{name: c}", "route", "ResolvedRefs", "True ResolvedRefs"},
		{"no such listener", strings.Replace(route("r", "", "a {}"), "default}]", "default, sectionName: x}]", 1), "{name: c}",
			"route", "Accepted", "False NoMatchingParent"},
		{"other port", strings.Replace(route("r", "", "a {}"), "namespace: default}]", "namespace: default, port: 8080}]", 1), "{name: c}",
			"route", "Accepted", "False NoMatchingParent"},
		{"other hosts", strings.Replace(route("r", "a.org", "a {}"), "default}]", "default, sectionName: http}]", 1), "{name: c}",
			"route", "Accepted", "False NoMatchingListenerHostname"},
		{"other namespace", route("b/r", "a.example.com", "a {}"), "{name: c}", "route", "Accepted", "False NotAllowedByListeners"},
		{"no Service", route("r", "a.example.com", "none {}"), "{name: c}", "route", "ResolvedRefs", "False BackendNotFound"},
		{"no kind", strings.Replace(route("r", "a.example.com", "a {}"), "name: a, port: 80", "name: a, kind: Bucket, group: x.dev, port: 80", 1),
			"{name: c}", "route", "ResolvedRefs", "False InvalidKind"},
		{"no grant", strings.Replace(route("r", "a.example.com", "a {}"), "name: a, port: 80", "name: a, namespace: b, port: 80", 1),
			"{name: c}", "route", "ResolvedRefs", "False RefNotPermitted"},
		{"all rules invalid", route("r", "a.example.com", `a {path: {type: RegularExpression, value: "("}}`), "{name: c}", "route", "Accepted",
			"False UnsupportedValue"},
		{"some rules invalid", route("r", "a.example.com", `a {path: {type: RegularExpression, value: "("}}`, "a {}"), "{name: c}", "route",
			"PartiallyInvalid", "True UnsupportedValue"},
		{"plain listener", "", "{name: c}", "http", "Programmed", "True Programmed"},
		{"TLS listener", "", "{name: c}", "https", "ResolvedRefs", "True ResolvedRefs"},
		{"no Secret", "", "{name: x}", "https", "ResolvedRefs", "False InvalidCertificateRef"},
		{"no Secret, programmed", "", "{name: x}", "https", "Programmed", "False Invalid"},
		{"a Secret of others", "", "{name: c, namespace: b}", "https", "ResolvedRefs", "False RefNotPermitted"},
		{"no protocol", "", "{name: c}", "tcp", "Accepted", "False UnsupportedProtocol"},
		{"the Gateway", "", "{name: c}", "gateway", "Accepted", "True ListenersNotValid"},
		{"the Gateway, programmed", "", "{name: c}", "gateway", "Programmed", "True Programmed"},
	} {
		f := builtFrom(t, fmt.Sprintf(tls, c.ref)+service("a")+c.more+
			"\n---\nkind: Secret\nmetadata: {name: c}\n---\nkind: Secret\nmetadata: {name: c, namespace: b}")
		status, got := f.Status([]string{"192.0.2.1"}, ""), ""
		switch c.part {
		case "route":
			got = conditionOf(f.Parents(routesOf(f)[0])[0].Conditions, c.kind)
		case "gateway":
			got = conditionOf(status.Conditions, c.kind)
		}
		for _, l := range status.Listeners {
			if string(l.Name) == c.part {
				got = conditionOf(l.Conditions, c.kind)
			}
		}
		if got != c.want {
			t.Errorf("%s: %s %s: %s, want %s", c.name, c.part, c.kind, got, c.want)
		}
	}
}

// A reference into another namespace holds while a ReferenceGrant of that namespace permits it, and no longer.
func TestReferenceGrants(t *testing.T) {
	text := plainGateway + service("b/there") +
		strings.Replace(route("r", "", "there {}"), "name: there, port", "name: there, namespace: b, port", 1)
	grant := "\n---\nkind: ReferenceGrant\nmetadata: {name: g, namespace: %s}\nspec:\n" +
		"  from: [{group: gateway.networking.k8s.io, kind: %s, namespace: %s}]\n  to: [{group: \"\", kind: %s}]"
	for _, c := range []struct{ at, kind, from, to, want string }{
		{"b", "HTTPRoute", "default", "Service", "there"}, {"default", "HTTPRoute", "default", "Service", "500"},
		{"b", "Gateway", "default", "Service", "500"}, {"b", "HTTPRoute", "c", "Service", "500"}, {"b", "HTTPRoute", "default", "Secret", "500"},
		{"b", "HTTPRoute", "default", "Service, name: other", "500"}, {"b", "HTTPRoute", "default", "Service, name: there", "there"},
	} {
		o := objects(t, text+fmt.Sprintf(grant, c.at, c.kind, c.from, c.to))
		f := BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, nil)
		if got := ask(t, f.Table, "http://x/"); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
		clear(o.Grants)
		if f = BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, f); ask(t, f.Table, "http://x/") != "500" {
			t.Errorf("%+v: the grant has gone, and the backend is still reached", c)
		}
	}
}

// All of the listeners that cannot be told from each other are out, and the others serve.
func TestConflictedListeners(t *testing.T) {
	f := builtFrom(t, `
kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: a, port: 80, protocol: HTTP, hostname: a.example.com}
  - {name: b, port: 80, protocol: HTTP, hostname: a.example.com}
  - {name: c, port: 81, protocol: HTTP}
  - {name: d, port: 81, protocol: HTTPS, tls: {certificateRefs: [{name: c}]}}
  - {name: e, port: 82, protocol: HTTP}`+service("a")+route("r", "", "a {}"))
	if got := conflicts(f); got != "[HostnameConflict HostnameConflict ProtocolConflict ProtocolConflict NoConflicts]" {
		t.Error(got)
	}
	if f.Table.Ports[80] != nil || f.Table.Ports[81] != nil || ask(t, f.Table, "http://x:82/") != "a" {
		t.Errorf("ports %v", f.Ports())
	}
}

// A rule with something that is not served, or that could break a message apart, answers its requests with 500: they do not
// fall to a rule that asks for less.
func TestInvalidRulesFailClosed(t *testing.T) {
	for _, filter := range []string{
		`{type: ExtensionRef, extensionRef: {group: x.dev, kind: Auth, name: a}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-a, value: "1\r\nContent-Length: 5"}]}}`,
		`{type: ResponseHeaderModifier, responseHeaderModifier: {add: [{name: x-a, value: "1\nSet-Cookie: a=b"}]}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: Transfer-Encoding, value: chunked}]}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {remove: [host]}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: X-Forwarded-For, value: "192.0.2.1"}]}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {add: [{name: x-forwarded-proto, value: https}]}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {add: [{name: x-forwarded-port, value: "1"}]}}`,
		`{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: "a b", value: x}]}}`,
		`{type: URLRewrite, urlRewrite: {path: {type: ReplaceFullPath, replaceFullPath: "/a HTTP/1.1\r\nHost: b"}}}`,
		`{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: "/a/..;/b"}}}`,
		`{type: RequestRedirect, requestRedirect: {scheme: javascript}}`,
	} {
		guarded := route("guard", "", "a {path: {value: /admin}}")
		guarded = strings.Replace(guarded, "backendRefs:", "filters: ["+filter+"], backendRefs:", 1)
		f := builtFrom(t, plainGateway+service("a", "open")+guarded+route("open", "", "open {}"))
		if got := ask(t, f.Table, "http://x/admin"); got != "500" {
			t.Errorf("%s: %s", filter, got)
		}
		if got := ask(t, f.Table, "http://x/"); got != "open" {
			t.Errorf("%s: %s", filter, got)
		}
	}
}

// No form of a path leads around a rule for it.
func TestPathsDoNotLeadAroundRules(t *testing.T) {
	f := builtFrom(t, plainGateway+service("public", "admin")+
		route("r", "", "public {path: {value: /}}", "admin {path: {value: /admin}}", "public {path: {type: Exact, value: /admin/health}}"))
	for _, path := range []string{
		"/admin", "//admin", "/./admin", "/x/../admin", "/%61dmin", "/%2e/admin", "/x/%2e%2e/admin", "/admin/", "/admin//",
		"/admin;v=1/../x/../admin",
		"/x%2f..%2fadmin", "/..;/admin", "/x/..;/admin", "/admin%2fx", "/x%5c..%5cadmin", "/%2fadmin", "/admin/health/", "/admin/health%2f",
		"/admin/health/../x",
	} {
		if got := ask(t, f.Table, "http://x"+path); got != "admin" && got != "400" {
			t.Errorf("%s: %s", path, got)
		}
	}
}

// A regular expression is bounded, and takes a time that grows with the input and not faster.
func TestRegexBounds(t *testing.T) {
	nested := `a {headers: [{name: x, type: RegularExpression, value: "(a*)*b"}]}`
	f := builtFrom(t, plainGateway+service("a", "b")+route("r", "", nested, "b {}"))
	for _, n := range []int{10, filter.MaxInput, filter.MaxInput + 1, 60000} {
		if got := ask(t, f.Table, "http://x/ x="+strings.Repeat("a", n)); got != "b" {
			t.Error(got)
		}
	}
	long := fmt.Sprintf(`a {path: {type: RegularExpression, value: "/%s"}}`, strings.Repeat("a?", 200))
	f = builtFrom(t, plainGateway+service("a")+route("r", "", long))
	if got := conditionOf(f.Parents(routesOf(f)[0])[0].Conditions, "Accepted"); got != "False UnsupportedValue" {
		t.Error(got)
	}
}

// The text of an expression is short where its program is not. A rule whose expression is refused answers with 500.
func TestRegexPrograms(t *testing.T) {
	small := strings.Repeat("a?", 100) + strings.Repeat("b", 40)
	for text, wrong := range map[string]string{
		`(?:.?){1000}`: "too complex", `((a{10}){10}){10}`: "too complex", `a)|(b`: "invalid", `(`: "invalid", `[a-z]{1,100}`: "", small: "",
	} {
		for kind, request := range map[string]string{"headers": "http://x/a x=!", "queryParams": "http://x/a?x=!"} {
			f := builtFrom(t, plainGateway+service("a", "open")+route("open", "", "open {}")+
				route("r", "", fmt.Sprintf("a {path: {value: /a}, %s: [{name: x, type: RegularExpression, value: '%s'}]}", kind, text)))
			key := kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "default", Name: "r"}}
			got := conditionOf(f.Parents(key)[0].Conditions, "Accepted")
			if (got == "True Accepted") != (wrong == "") {
				t.Errorf("%s: %s", text, got)
			}
			want := "500"
			if wrong == "" {
				want = "open"
			}
			if got := ask(t, f.Table, request); got != want || ask(t, f.Table, "http://x/a") != "open" {
				t.Errorf("%s of %s: %s, want %s", text, kind, got, want)
			}
		}
		if _, got := filter.RegexSize(text); !strings.Contains(got, wrong) || wrong == "" && got != "" {
			t.Errorf("%s: %s", text, got)
		}
	}
	var rules []string
	for i := range 16 {
		rules = append(rules, fmt.Sprintf("a {path: {type: RegularExpression, value: '/%d(?:.?){450}'}}", i))
	}
	f := builtFrom(t, plainGateway+service("a")+route("r", "", rules...)+route("foo/r", "", rules...))
	cached := func(namespace string) *cachedRoute {
		return f.routes[kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: namespace, Name: "r"}}].cachedRoute
	}
	if c := cached("default"); len(c.matches) != 11 || !strings.Contains(c.invalid, "too complex together") {
		t.Errorf("%d expressions: %s", len(c.matches), c.invalid)
	}
	// No listener takes routes of another namespace: nothing is compiled for them, and nodes do not follow their backends.
	if c := cached("foo"); c.program != 0 || len(f.Targets) != 1 {
		t.Errorf("a route that no listener takes: %d instructions, targets %v", c.program, f.Targets)
	}
}

func TestWeights(t *testing.T) {
	text := strings.Replace(route("r", "", "a {}"), "[{name: a, port: 80}]",
		"[{name: a, port: 80, weight: 3}, {name: none, port: 80, weight: 1}, {name: b, port: 80, weight: 0}]", 1)
	f := builtFrom(t, plainGateway+service("a", "b")+text)
	rule, _, _ := f.Table.Ports[80].Find(&Request{Path: "/"})
	counts := map[string]int{}
	for i := range uint64(400) {
		counts[rule.Pick(i).Backend.Name.Name]++
	}
	if counts["a"] != 300 || counts[""] != 100 || counts["b"] != 0 {
		t.Error(counts)
	}
}

// manyRoutes returns a Gateway with n routes, each with a host of hosts and some paths.
func manyRoutes(t testing.TB, n, hosts, paths int) *Objects {
	o := objects(t, plainGateway+service("a")+route("r", "x.example.com", `a {path: {value: /app}}`))
	template := o.Routes[svc.Name{Namespace: "default", Name: "r"}]
	clear(o.Routes)
	for i := range n {
		r := template.DeepCopy()
		r.Name, r.UID = fmt.Sprintf("r%d", i), types.UID(fmt.Sprint(i))
		r.Spec.Hostnames[0] = gwv1.Hostname(fmt.Sprintf("h%d.example.com", i%hosts))
		for j := range paths {
			rule := template.Spec.Rules[0].DeepCopy()
			rule.Matches[0].Path.Value = new(fmt.Sprintf("/app/v%d/%d", i, j))
			r.Spec.Rules = append(r.Spec.Rules, *rule)
		}
		r.Spec.Rules = r.Spec.Rules[1:]
		o.Routes[svc.NameOf(r)] = r
	}
	return o
}

// A tenant with 10,000 routes does not change what others have, and one change of them leaves the other hosts as they are.
func TestManyRoutes(t *testing.T) {
	o := manyRoutes(t, 10000, 1000, 1)
	name := svc.Name{Namespace: "default", Name: "g"}
	before := BuildGateway(o, name, nil)
	if got := ask(t, before.Table, "http://h999.example.com/app/v9999/0/x"); got != "a" {
		t.Error(got)
	}
	changed := svc.Name{Namespace: "default", Name: "r0"}
	o.Routes[changed] = o.Routes[changed].DeepCopy()
	o.Routes[changed].Generation++
	o.Routes[changed].Spec.Hostnames = []gwv1.Hostname{"h1.example.com"}
	after := BuildGateway(o, name, before)
	index := func(f *Front) *hostpath.Index[*paths] { return f.Table.Ports[80].Listeners[0].hosts }
	same := 0
	for i := range 1000 {
		h := fmt.Sprintf("h%d.example.com", i)
		if p := index(after).Get(h); p != nil && index(before).Get(h) == p {
			same++
		}
	}
	added, gone := ask(t, after.Table, "http://h1.example.com/app/v0/0"), ask(t, after.Table, "http://h0.example.com/app/v0/0")
	if same != 998 || added != "a" || gone != "404" {
		t.Errorf("%d of 1,000 hosts are as before", same)
	}
}

// A lookup at 1,000 hosts with 5 paths each.
func BenchmarkFind(b *testing.B) {
	f := BuildGateway(manyRoutes(b, 1000, 1000, 5), svc.Name{Namespace: "default", Name: "g"}, nil)
	p := f.Table.Ports[80]
	r := &Request{Host: "h500.example.com", Path: "/app/v500/3/items/17", Method: "GET", Fields: fields{}}
	b.ReportAllocs()
	for b.Loop() {
		if rule, _, _ := p.Find(r); rule == nil {
			b.Fatal("not found")
		}
	}
}

// One change of 5,000 routes.
func BenchmarkChange(b *testing.B) {
	o := manyRoutes(b, 5000, 1000, 1)
	name, changed := svc.Name{Namespace: "default", Name: "g"}, svc.Name{Namespace: "default", Name: "r17"}
	f := BuildGateway(o, name, nil)
	for b.Loop() {
		o.Routes[changed] = o.Routes[changed].DeepCopy()
		o.Routes[changed].Generation++
		f = ChangeGateway(o, name, f, map[kinds.Route]bool{{Kind: kinds.HTTPRoute, Name: changed}: true})
	}
}

// The status of a Gateway without an address reports whether that was asked for, and cannot be had.
func TestAddressNotUsable(t *testing.T) {
	const asked = ", addresses: [{value: 203.0.113.9}]"
	for addresses, want := range map[string]string{
		"": "False AddressNotAssigned", asked: "False AddressNotUsable", ", addresses: [{type: IPAddress}]": "False AddressNotAssigned",
	} {
		f := builtFrom(t, strings.Replace(plainGateway, "protocol: HTTP}]", "protocol: HTTP}]"+addresses, 1))
		if got := conditionOf(f.Status(nil, "no address yet").Conditions, "Programmed"); got != want {
			t.Errorf("%q: %s, want %s", addresses, got, want)
		}
		want = "True Programmed"
		if addresses == asked {
			want = "False AddressNotUsable" // also while it keeps an earlier one
		}
		if got := conditionOf(f.Status([]string{"192.0.2.1"}, "").Conditions, "Programmed"); got != want {
			t.Errorf("%q with another address: %s, want %s", addresses, got, want)
		}
	}
}

// A Gateway has the addresses that it asks for, all of them.
func TestStaticAddresses(t *testing.T) {
	both := []string{"192.0.2.1", "2001:db8::1"}
	for addresses, want := range map[string]string{
		"{value: 192.0.2.1}": "", "{value: '2001:DB8:0::1'}": "", "{value: 192.0.2.1}, {value: '2001:db8::1'}": "",
		"{value: 192.0.2.1}, {type: IPAddress}":      "",
		"{type: IPAddress}, {value: 192.0.2.2}":      "addresses[1]: 192.0.2.2 is of no pool",
		"{value: 192.0.2.1}, {value: 192.0.2.2}":     "addresses[1]: a Gateway has one address",
		"{value: 192.0.2.1}, {value: '2001:db8::2'}": "addresses[1]: 2001:db8::2 is",
		"{value: name}": "addresses[0].value: want an IP",
	} {
		f := builtFrom(t, strings.Replace(plainGateway, "protocol: HTTP}]", "protocol: HTTP}], addresses: ["+addresses+"]", 1))
		if got := f.Unusable(both); !strings.HasPrefix(got, want) || (got == "") != (want == "") {
			t.Errorf("%s: %q, want %q", addresses, got, want)
		}
	}
}
