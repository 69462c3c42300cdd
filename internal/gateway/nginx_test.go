package gateway

import (
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/svc"
)

// annotated returns the manifest of an Ingress of namespace/name with annotations "name: value; …" and a path of each kind as
// "KIND PATH SERVICE; …". KIND is P, E or I.
func annotated(name, host, annotations, paths string) string {
	ns, name, _ := strings.Cut(name, "/")
	var notes, list []string
	for _, a := range strings.Split(annotations, "; ") {
		if k, v, ok := strings.Cut(a, ": "); ok {
			notes = append(notes, fmt.Sprintf("%s%s: %q", nginx.Prefix, k, v))
		}
	}
	for _, p := range strings.Split(paths, "; ") {
		f := strings.Fields(p)
		kind := map[string]string{"P": "Prefix", "E": "Exact", "I": "ImplementationSpecific"}[f[0]]
		list = append(list, fmt.Sprintf("{path: %q, pathType: %s, backend: {service: {name: %s, port: {number: 80}}}}", f[1], kind, f[2]))
	}
	return fmt.Sprintf("\n---\nkind: Ingress\nmetadata: {namespace: %s, name: %s, annotations: {%s}}\n"+
		"spec: {rules: [{host: %q, http: {paths: [%s]}}]}", ns, name, strings.Join(notes, ", "), host, strings.Join(list, ", "))
}

// decide returns what becomes of a request "http://host/path name=value …": a status, with the place of a redirect, or the Service
// and the path that it gets.
func decide(t testing.TB, table *Table, text string) string {
	t.Helper()
	words := strings.Fields(text)
	u, err := url.Parse(words[0])
	if err != nil {
		t.Fatal(err)
	}
	port := map[string]uint16{"http": 80, "https": 443}[u.Scheme]
	if table.Ports[port] == nil {
		return "closed"
	}
	f := fields{map[string]string{}, u.Query()}
	for _, w := range words[1:] {
		name, value, _ := strings.Cut(w, "=")
		f.header[name] = value
	}
	path, _ := hostpath.Path(u.EscapedPath())
	rule, prefix, v := table.Ports[port].Find(&Request{Host: hostpath.Host(u.Host), Path: path, Method: "GET", Fields: f})
	switch {
	case v == NoRoute:
		return "404"
	case v == Disputed:
		return "400"
	case rule.Closed:
		return "503"
	case rule.HTTPS && u.Scheme == "http":
		return "308 https"
	case rule.Redirect != nil:
		return fmt.Sprintf("%d %s", rule.Redirect.Status, rule.Redirect.Location(u.Scheme, u.Host, port, path, u.RawQuery, prefix))
	case rule.Auth != nil && rule.Auth.Backend == Backend{}:
		return "503"
	}
	w := rule.Pick(0)
	if w == nil || !w.Valid {
		return "500"
	}
	return w.Backend.Name.Name + " " + rule.Filters.Rewrite.Path.Apply(path, prefix)
}

func nginxFront(t testing.TB, text string) *IngressFront {
	t.Helper()
	return BuildIngress(objects(t, strings.TrimPrefix(text, "\n---\n")), nil)
}

// The examples of ingress-nginx for rewrites and for the order of paths
// (https://kubernetes.github.io/ingress-nginx/examples/rewrite/,
// https://kubernetes.github.io/ingress-nginx/user-guide/ingress-path-matching/).
func TestNginxPaths(t *testing.T) {
	for _, c := range []struct {
		text  string
		wants map[string]string
	}{
		{
			annotated("default/rewrite", "rewrite.bar.com", "use-regex: true; rewrite-target: /$2", `I /something(/|$)(.*) a`),
			map[string]string{
				"http://rewrite.bar.com/something": "a /", "http://rewrite.bar.com/something/": "a /",
				"http://rewrite.bar.com/something/new": "a /new", "http://rewrite.bar.com/SomeThing/new": "a /new",
				"http://rewrite.bar.com/somethingelse": "404", "http://rewrite.bar.com/x/something": "404",
				"http://rewrite.bar.com/something//new/../x": "a /x",
			},
		},
		{
			annotated("default/i1", "test.com", "", "P /foo/bar a; P /foo/bar/baz b") +
				annotated("default/i2", "test.com", "rewrite-target: /$1", "I /foo/bar/(.+) c"),
			map[string]string{
				"http://test.com/foo/bar/1": "c /1", "http://test.com/foo/bar": "a /foo/bar", "http://test.com/foo/bar/": "a /foo/bar/",
				// A longer text comes first, whether it is an expression or not.
				"http://test.com/foo/bar/baz": "c /baz",
			},
		},
		{
			annotated("default/i", "test.com", "use-regex: true", `P /foo/bar/bar a; I /foo/bar/[A-Z0-9]{3} b`),
			map[string]string{"http://test.com/foo/bar/bar": "b /foo/bar/bar", "http://test.com/foo/bar/b": "404"},
		},
		{ // A prefix with a target: all of the path is replaced. A path that is its own target stays.
			annotated("default/i", "h", "rewrite-target: /", "P /api a") + annotated("default/j", "g", "rewrite-target: /", "P / a; E /e b"),
			map[string]string{
				"http://h/api/users": "a /", "http://h/api": "a /", "http://g/x/y": "a /x/y", "http://g/e": "b /", "http://g/E": "a /E",
			},
		},
		{ // A group that is a part of an encoded byte makes no path.
			annotated("default/i", "h", "rewrite-target: /$1", "I /a/(..).* a"),
			map[string]string{"http://h/a/%20x": "a ", "http://h/a/%2Fx": "400", "http://h/a/xyz": "a /xy"},
		},
		{
			annotated("default/i", "approot.bar.com", "app-root: /app1", "P / a"),
			map[string]string{"http://approot.bar.com/": "302 http://approot.bar.com/app1", "http://approot.bar.com/app1": "a /app1"},
		},
		{
			annotated("default/i", "h", "permanent-redirect: https://www.google.com", "P / a") +
				annotated("default/j", "g", "temporal-redirect: /new; temporal-redirect-code: 307", "P /old a"),
			map[string]string{"http://h/x?y": "301 https://www.google.com", "http://g/old/x": "307 http://g/new"},
		},
		{
			annotated("default/i", "example.com", "from-to-www-redirect: true; server-alias: alias.example.com", "P / a") +
				annotated("default/j", "www.foo.com", "from-to-www-redirect: true", "P / a"),
			map[string]string{
				"http://www.example.com/x?y=1": "308 http://example.com/x?y=1", "http://foo.com/": "308 http://www.foo.com/",
				"http://example.com/x": "a /x", "http://alias.example.com/x": "a /x", "http://www.alias.example.com/": "404",
			},
		},
		{ // What protects is not left out: nothing of the Ingress is served, and nothing else takes its paths.
			annotated("default/i", "h", "auth-url: http://auth.default.svc/", "P /private a") + annotated("default/j", "h", "", "P / b"),
			map[string]string{"http://h/private/x": "503", "http://h/private": "503", "http://h/public": "b /public"},
		},
		{
			annotated("default/i", "h", "use-regex: true", `I /admin(?!x) a`) + annotated("default/j", "h", "", "P / b"),
			map[string]string{"http://h/admin": "503", "http://h/Admin/x": "503", "http://h/adminx": "503", "http://h/other": "b /other"},
		},
		{
			annotated("default/i", "h", "use-regex: true", `I /admins?/(?!x) a`) + annotated("default/j", "h", "", "P / b"),
			map[string]string{"http://h/admin/": "503", "http://h/admins/x": "503", "http://h/other": "b /other"},
		},
		{
			annotated("default/i", "h", "use-regex: true", `I /admin/(?!x)|/internal a`) + annotated("default/j", "h", "", "P / b"),
			map[string]string{"http://h/admin/": "503", "http://h/internal": "503"},
		},
		{ // A path that is too long for expressions gets round none of them.
			annotated("default/i", "h", "rewrite-target: /$2", `I /admin(/|$)(.*) a`) + annotated("default/j", "h", "", "P / b"),
			map[string]string{
				"http://h/admin/" + strings.Repeat("x", 5000): "503", "http://h/" + strings.Repeat("x", 5000): "503",
				"http://h/" + strings.Repeat("x", 4000): "b /" + strings.Repeat("x", 4000),
			},
		},
	} {
		f := nginxFront(t, c.text+service("a", "b", "c"))
		for request, want := range c.wants {
			if got := decide(t, f.Table, request); got != want {
				t.Errorf("%s: %s: %q, want %q; %v", c.text, request, got, want, f.Problems)
			}
		}
	}
}

// Canaries as documented: a header comes before a cookie, and that before the weight.
func TestNginxCanary(t *testing.T) {
	main := annotated("default/main", "h", "whitelist-source-range: 10.0.0.0/8", "P / a; E /e a")
	for annotations, wants := range map[string]map[string]string{
		"canary-by-header: X-C; canary-by-cookie: ck": {
			"http://h/": "a /", "http://h/ x-c=always": "b /", "http://h/ x-c=always cookie=ck=never": "b /",
			"http://h/ x-c=never cookie=ck=always": "a /",
			"http://h/ x-c=other cookie=ck=always": "b /", "http://h/ cookie=ck=never": "a /", "http://h/e x-c=always": "a /e",
		},
		"canary-by-header: X-C; canary-by-header-value: v1": {"http://h/ x-c=v1": "b /", "http://h/ x-c=always": "a /", "http://h/x": "a /x"},
		"canary-by-header: X-C; canary-by-header-pattern: ^v[12]$": {
			"http://h/ x-c=v2": "b /", "http://h/ x-c=v3": "a /", "http://h/ x-c=v22": "a /",
		},
		"canary-weight: 100":                          {"http://h/": "b /", "http://h/e": "a /e"},
		"canary-weight: 0":                            {"http://h/": "a /"},
		"canary-weight: 100; canary-by-header: X-C":   {"http://h/ x-c=never": "a /", "http://h/": "b /"},
		"canary-weight: 1; configuration-snippet: x;": {"http://h/": "a /"},
	} {
		f := nginxFront(t, main+annotated("default/canary", "h", "canary: true; "+annotations, "P / b")+service("a", "b"))
		for request, want := range wants {
			if got := decide(t, f.Table, request); got != want {
				t.Errorf("%s: %s: %q, want %q; %v", annotations, request, got, want, f.Problems)
			}
		}
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/", Fields: fields{map[string]string{"x-c": "always"}, nil}})
		if rule.Access.Admits(netip.MustParseAddr("192.0.2.1")) || !rule.Access.Admits(netip.MustParseAddr("::ffff:10.1.2.3")) {
			t.Errorf("%s: the canary is open", annotations)
		}
	}
	f := nginxFront(t, main+annotated("default/canary", "h", "canary: true; canary-weight: 25", "P / b")+
		annotated("default/second", "h", "canary: true; canary-weight: 25", "P / c")+service("a", "b", "c"))
	rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/", Fields: fields{}})
	second := svc.Name{Namespace: "default", Name: "second"}
	if len(rule.Backends) != 2 || rule.Backends[1].Weight != 25 || rule.total != 100 || f.Problems[second] == "" {
		t.Errorf("%+v, %v", rule.Backends, f.Problems)
	}
}

// A canary that asks for an authorization gets no requests without it: the one of the other Ingress counts.
func TestNginxCanaryIsAuthorized(t *testing.T) {
	const url, basic = "auth-url: http://auth/x", "auth-type: basic; auth-secret: staff"
	for _, c := range []struct {
		main, canary string
		want         bool
	}{
		{"", url, false}, {"", basic, false}, {url, basic, false}, {basic, url, false}, {url, "auth-url: http://auth/y", false},
		{basic, "auth-type: basic; auth-secret: others", false}, {url, url + "; " + basic, false},
		{"", "", true}, {url, url, true}, {basic, basic, true}, {url + "; " + basic, basic, true}, {url, "", true}, {basic, "", true},
	} {
		f := nginxFront(t, annotated("default/main", "h", c.main, "P / a")+
			annotated("default/canary", "h", "canary: true; canary-weight: 100; "+c.canary, "P / b")+service("a", "b", "auth"))
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/", Fields: fields{}})
		problem := f.Problems[svc.Name{Namespace: "default", Name: "canary"}]
		if got := len(rule.Backends) == 2; got != c.want || !c.want && problem == "" {
			t.Errorf("%q, %q: the canary gets requests: %t, want %t; %s", c.main, c.canary, got, c.want, problem)
		}
	}
}

// Who may write Ingresses of a namespace takes nothing from another one: no host by an alias or by www, no requests by a canary.
func TestNginxNamespaces(t *testing.T) {
	f := nginxFront(t, annotated("victim/i", "shop.com", "", "P / victim")+annotated("victim/w", "www.bank.com", "", "P / victim")+
		annotated("evil/a", "evil.com", "server-alias: shop.com,*.shop.com,free.com", "P / evil")+
		annotated("evil/b", "bank.com", "from-to-www-redirect: true", "P / evil")+
		annotated("evil/c", "shop.com", "canary: true; canary-weight: 100", "P / evil")+
		annotated("evil/d", "single.com", "canary: true; canary-weight: 100", "P / evil")+service("victim/victim", "evil/evil"))
	for request, want := range map[string]string{
		"http://shop.com/": "victim /", "http://www.bank.com/": "victim /", "http://free.com/": "evil /", "http://single.com/": "404",
		"http://evil.com/": "evil /",
	} {
		if got := decide(t, f.Table, request); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		if f.Problems[svc.Name{Namespace: "evil", Name: name}] == "" {
			t.Errorf("%s: no problem", name)
		}
	}
}

// Expressions have bounds, as in routes, and take a time that grows with the path and not faster.
func TestNginxExpressions(t *testing.T) {
	for _, path := range []string{`/((a*)*)*b`, `/(?:.?){1000}`, `/((a{10}){10}){10}`, `/a)|(b`, "/" + strings.Repeat("a?", 300)} {
		f := nginxFront(t, annotated("default/i", "h", "rewrite-target: /$1", "I "+path+" a")+service("a"))
		began := time.Now()
		for range 10 {
			decide(t, f.Table, "http://h/"+strings.Repeat("a", 4000))
		}
		if d := time.Since(began); d > 30*time.Second {
			t.Errorf("%.50s: %v", path, d)
		}
	}
	var many []string
	for i := range 16 {
		many = append(many, fmt.Sprintf("I /%c(?:.?){450} a", 'a'+i))
	}
	f := nginxFront(t, annotated("default/i", "h", "use-regex: true", strings.Join(many, "; "))+service("a"))
	problem := f.Problems[svc.Name{Namespace: "default", Name: "i"}]
	if got := decide(t, f.Table, "http://h/p"); got != "503" || !strings.Contains(problem, "together") {
		t.Errorf("%s, %v", got, f.Problems)
	}
}

// A host with TLS has only that if its Ingress asks for it, or is of a class for ingress-nginx. A challenge of ACME comes before
// there is a certificate.
func TestNginxHTTPS(t *testing.T) {
	const paths = "P / a; P /.well-known/acme-challenge/x a"
	for annotations, wants := range map[string][3]string{ // with TLS, without, and with TLS in a class for ingress-nginx
		"":                         {"a /", "a /", "308 https"},
		"ssl-redirect: true":       {"308 https", "a /", "308 https"},
		"ssl-redirect: false":      {"a /", "a /", "a /"},
		"force-ssl-redirect: true": {"308 https", "308 https", "308 https"},
	} {
		const tls = "spec: {tls: [{hosts: [h.x], secretName: s}], "
		text := strings.Replace(annotated("default/i", "h.x", annotations, paths), "spec: {", tls, 1) +
			annotated("default/j", "g.x", annotations, paths) + service("a") + "\n---\nkind: Secret\nmetadata: {name: s}"
		o := objects(t, strings.TrimPrefix(text, "\n---\n"))
		f := BuildIngress(o, nil)
		o.Secured = map[svc.Name]bool{{Namespace: "default", Name: "i"}: true}
		secured := BuildIngress(o, f)
		got := [3]string{decide(t, f.Table, "http://h.x/"), decide(t, f.Table, "http://g.x/"), decide(t, secured.Table, "http://h.x/")}
		if got != wants {
			t.Errorf("%q: %q, want %q", annotations, got, wants)
		}
		if got := decide(t, f.Table, "https://h.x/"); got != "a /" {
			t.Errorf("%q: %s", annotations, got)
		}
		for _, front := range []*IngressFront{f, secured} {
			if got := decide(t, front.Table, "http://h.x/.well-known/acme-challenge/x"); !strings.HasPrefix(got, "a ") {
				t.Errorf("%q: the challenge: %s", annotations, got)
			}
		}
	}
}

// The other annotations reach the rules, and what is the same as before is kept.
func TestNginxRules(t *testing.T) {
	text := annotated("default/i", "h", "rewrite-target: /$1; x-forwarded-prefix: /p; upstream-vhost: in.example.com; proxy-body-size: 1k; "+
		"proxy-read-timeout: 90; backend-protocol: HTTPS; affinity: cookie; session-cookie-max-age: 60; enable-cors: true; "+
		"proxy-next-upstream: http_502; proxy-next-upstream-tries: 2; load-balance: ewma; limit-rps: 2; "+
		"limit-whitelist: 192.0.2.0/24", "I /(.*) a") + service("a")
	o := objects(t, strings.TrimPrefix(text, "\n---\n"))
	f := BuildIngress(o, nil)
	find := func(f *IngressFront) *Rule {
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/x", Fields: fields{}})
		return rule
	}
	r := find(f)
	if r.Filters.Request.Set[0].Value != "/p" || r.Filters.Rewrite.Host != "in.example.com" || r.Body != 1024 || r.Timeout != 90*time.Second ||
		r.Backends[0].Backend.Protocol != HTTPS || r.Session.Name != "INGRESSCOOKIE" || r.Session.Absolute != time.Minute || r.CORS == nil ||
		r.Retry.Attempts != 1 || !r.Retry.Has(502) || r.Retry.Has(503) {
		t.Errorf("%+v", r)
	}
	if l := r.Limits.For(netip.MustParseAddr("192.0.3.1")); len(l) != 1 || l[0].Each != time.Second/2 || l[0].AtOnce != 11 ||
		r.Limits.For(netip.MustParseAddr("::ffff:192.0.2.1")) != nil {
		t.Errorf("%+v", r.Limits)
	}
	if want := r.Target(&r.Backends[0]); len(f.Targets) != 1 || f.Targets[0] != want {
		t.Errorf("%+v, want %+v", f.Targets, want)
	}
	if got := f.Ignored[svc.Name{Namespace: "default", Name: "i"}]; !strings.Contains(got, "load-balance") || len(f.Problems) != 0 {
		t.Errorf("%q, %v", got, f.Problems)
	}
	if status, _ := r.CORS.Preflight("https://evil.example.com", "PUT", ""); status != 200 {
		t.Error(status)
	}
	for _, field := range r.CORS.Answer("https://evil.example.com").Add {
		if strings.HasSuffix(field.Name, "Credentials") || field.Value == "https://evil.example.com" {
			t.Errorf("every page may use sessions: %+v", field)
		}
	}
	if again := BuildIngress(o, f); find(again) != r {
		t.Error("what has not changed was made again")
	}
}

// What protects holds for all that ingress-nginx has it for, beside an open Ingress of the same host.
func TestNginxProtection(t *testing.T) {
	const ranges = "allowlist-source-range: 10.0.0.0/8"
	open := annotated("default/open", "h", "", "P / b")
	long := "/long" + strings.Repeat("x", maxPath)
	for _, c := range []struct{ text, guarded, open string }{ // the requests that only the networks may have, or none, and the other ones
		{annotated("default/i", "h", "auth-tls-secret: default/ca", "P /a a") + open, "/a /b /", ""},
		{annotated("default/i", "h", "server-snippet: x", "P /a a") +
			annotated("default/j", "h", "rewrite-target: /", "I /(x|y) b"), "/a /x", ""},
		{annotated("default/i", "h", "auth-url: x", "P /a a") + open, "/a", "/b"},
		// ImplementationSpecific goes on with anything, but not in an Ingress that asks for nothing; a prefix comes first.
		{annotated("default/i", "h", ranges, "I /admin a; I /dir/ a") + open, "/admin /admin.php /adminx/y /dir /dir/x", "/Admin /directory /"},
		{annotated("default/i", "h", "auth-url: x", "P /admin a") + annotated("default/a", "h", "ssl-redirect: true", "I /admin b"),
			"/admin /admin/x", "/admin.php"},
		{annotated("default/i", "h", "", "I /admin a") + open, "", "/admin.php"},
		// Beside an expression all paths are expressions, in any case of letters.
		{
			annotated("default/i", "h", ranges, "P /admin a; I /v[12] a; P /dir/ a") +
				annotated("default/j", "h", "rewrite-target: /$1", "I /x/(.*) b") + open,
			"/admin /Admin /ADMIN/x /admin.php /v1 /V2/x /v[12] /dir /dir/x", "/v3 /x/admin /directory",
		},
		{annotated("default/i", "h", ranges, "P /c++ a") + annotated("default/j", "h", "use-regex: true", "I /x b") + open, "/c++ /c", "/x /d"},
		// A path that cannot be used is not left to another Ingress.
		{annotated("default/i", "h", ranges, "P "+long+" a") + open, long + " " + long + "/x", "/long"},
		{annotated("default/i", "h", ranges, `P /admin%zz a`) + open, "/admin /admin/x", "/x"},
		{annotated("default/i", "h", ranges, `E /a/..;x/b a`) + open, "/b /a", ""},
		{annotated("default/i", "h", "use-regex: true", "I "+long+"(.*) a") + open, long, "/other"},
	} {
		f := nginxFront(t, c.text+service("a", "b"))
		check := func(requests string, want bool) {
			for _, path := range strings.Fields(requests) {
				rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: path, Fields: fields{}})
				if rule == nil || (rule.Closed || !rule.Access.Admits(netip.MustParseAddr("192.0.2.1"))) != want {
					t.Errorf("%.300s: %.80s: %+v, want protection: %v; %v", c.text, path, rule, want, f.Problems)
				}
			}
		}
		check(c.guarded, true)
		check(c.open, false)
	}
	// An expression that is added later changes the paths of the others, also where the host has no other matches than before.
	guarded := annotated("default/i", "h", ranges, "I /admin a") + service("a", "b")
	before := nginxFront(t, guarded+annotated("default/j", "h", "", "E / b"))
	after := objects(t, strings.TrimPrefix(guarded+annotated("default/j", "h", "use-regex: true", "E / b"), "\n---\n"))
	table := BuildIngress(after, before).Table
	if rule, _, _ := table.Ports[80].Find(&Request{Host: "h", Path: "/ADMIN", Fields: fields{}}); rule == nil || rule.Access == nil {
		t.Errorf("after an expression elsewhere: %+v", rule)
	}
	// An Ingress does not close the host of another namespace. An alias is closed as its host is.
	f := nginxFront(t, annotated("default/i", "h", "server-alias: alias.h", "P / a")+annotated("evil/i", "h", "server-snippet: x", "P / a")+
		annotated("default/j", "g", "server-alias: alias.g; ssl-passthrough: true", "P / a")+
		annotated("default/k", "k", "server-alias: alias.k", "P / a")+
		"\n---\nkind: Ingress\nmetadata: {namespace: default, name: l, annotations: {"+nginx.Prefix+"server-snippet: x}}\n"+
		"spec: {rules: [{host: alias.k}]}"+service("a"))
	for request, want := range map[string]string{"http://h/": "a /", "http://alias.h/": "a /", "http://g/": "503", "http://alias.g/": "503",
		"http://k/": "a /", "http://alias.k/": "503"} {
		if got := decide(t, f.Table, request); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
}

// A class for ingress-nginx has its ImplementationSpecific paths, also for canaries.
func TestNginxImplementationSpecific(t *testing.T) {
	text := annotated("default/i", "h", "", "I /api a; P /v a") + annotated("default/c", "h", "canary: true; canary-weight: 100", "I /api b") +
		service("a", "b")
	o := objects(t, strings.TrimPrefix(text, "\n---\n"))
	o.Secured = map[svc.Name]bool{{Namespace: "default", Name: "i"}: true}
	f := BuildIngress(o, nil)
	long := strings.Repeat("x", 5000)
	for request, want := range map[string]string{
		"http://h/api.php": "b /api.php", "http://h/api": "b /api", "http://h/API": "404", "http://h/v.php": "404",
		"http://h/v/" + long: "a /v/" + long,
	} {
		if got := decide(t, f.Table, request); got != want {
			t.Errorf("%.40s: %.40s, want %.40s", request, got, want)
		}
	}
}

// An alias of a host with TLS is not served in clear text, and has its certificate.
func TestNginxAliasHTTPS(t *testing.T) {
	for _, host := range []string{"h.x", "*.x"} { // that TLS is asked for at
		text := strings.Replace(annotated("default/i", "h.x", "ssl-redirect: true; server-alias: alias.y", "P / a"), "spec: {",
			fmt.Sprintf("spec: {tls: [{hosts: [%q], secretName: s}], ", host), 1) + service("a") + "\n---\nkind: Secret\nmetadata: {name: s}"
		f := nginxFront(t, text)
		for _, name := range []string{"h.x", "alias.y"} {
			if got := decide(t, f.Table, "http://"+name+"/"); got != "308 https" {
				t.Errorf("%s: %s: %s", host, name, got)
			}
			if got := decide(t, f.Table, "https://"+name+"/"); got != "a /" {
				t.Errorf("%s: https: %s: %s", host, name, got)
			}
		}
	}
}

// Pages are of the default backend, which is a Service of the namespace: one that is missing or leads out of the cluster gives none, and
// answers of Pods stay. Pages are by HTTP where Pods speak something else.
func TestNginxErrorPages(t *testing.T) {
	const codes = "custom-http-errors: 404,503; "
	services := "\n---\nkind: Service\nmetadata: {namespace: other, name: alien}\nspec: {ports: [{port: 80}]}"
	for _, name := range []string{"web", "pages", "outside"} {
		more := map[string]string{"outside": "type: ExternalName, externalName: example.com, "}[name]
		services += fmt.Sprintf("\n---\nkind: Service\nmetadata: {namespace: shop, name: %s}\nspec: {%sports: [{port: 80}]}", name, more)
	}
	for annotations, want := range map[string]string{
		codes + "default-backend: pages":                                        "http http",
		codes + "default-backend: pages; backend-protocol: HTTPS":               "https http",
		codes + "default-backend: missing":                                      "there is no Service shop/missing",
		codes + "default-backend: alien":                                        "there is no Service shop/alien",
		codes + "default-backend: outside":                                      "of type ExternalName",
		"default-backend: pages":                                                "http none",
		codes + "default-backend: pages; whitelist-source-range: of-the-office": "closed",
	} {
		f := BuildIngress(objects(t, strings.TrimPrefix(annotated("shop/i", "a.example", annotations, "P / web")+services, "\n---\n")), nil)
		rule, _, v := f.Table.Ports[80].Find(&Request{Host: "a.example", Path: "/", Method: "GET", Fields: fields{}})
		got := f.Problems[svc.Name{Namespace: "shop", Name: "i"}]
		switch {
		case v != Routed:
			t.Errorf("%s: %v", annotations, v)
		case rule.Closed && rule.Pages == nil && len(f.Targets) == 0:
			got = "closed"
		case rule.Spare != nil:
			got = string(rule.Spare.Protocol) + " none"
			if rule.Pages != nil {
				got = string(rule.Spare.Protocol) + " " + string(rule.Pages.Protocol)
			}
			if rule.Pages != nil && (!slices.Contains(f.Targets, *rule.Pages) || !rule.Errors.Has(404, false) || rule.Errors.Has(500, true)) {
				t.Errorf("%s: %+v", annotations, rule)
			}
		case rule.Errors != nil || rule.Pages != nil:
			t.Errorf("%s: %+v", annotations, rule)
		}
		if !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", annotations, got, want)
		}
	}
}

// Which backends of an Ingress its default backend answers for: Services that are missing, have no such port, or cannot be used. The
// problem stays, and nodes follow nothing else.
func TestNginxDefaultBackend(t *testing.T) {
	services := ""
	for _, name := range []string{"web", "pages", "outside"} {
		more := map[string]string{"outside": "type: ExternalName, externalName: example.com, "}[name]
		services += fmt.Sprintf("\n---\nkind: Service\nmetadata: {namespace: shop, name: %s}\nspec: {%sports: [{port: 80}]}", name, more)
	}
	for _, c := range []struct{ annotations, backend, want, problem string }{
		{"default-backend: pages", "web", "valid", ""},
		{"default-backend: pages", "gone", "spared", "there is no Service shop/gone"},
		{"default-backend: pages", "outside", "spared", "of type ExternalName"},
		{"", "gone", "refused", "there is no Service shop/gone"},
		{"default-backend: missing", "gone", "refused", "there is no Service shop/gone"},
		{"default-backend: pages; denylist-source-range: of-the-office", "gone", "closed", "denylist-source-range"},
	} {
		manifests := annotated("shop/i", "a.example", c.annotations, "P / "+c.backend) + services
		f := BuildIngress(objects(t, strings.TrimPrefix(manifests, "\n---\n")), nil)
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "a.example", Path: "/", Method: "GET", Fields: fields{}})
		got := "refused"
		switch w := &rule.Backends[0]; {
		case rule.Closed:
			got = "closed"
		case w.Valid && !rule.Spared(w):
			got = "valid"
		case rule.Spared(w) && slices.Equal(f.Targets, []Target{*rule.Spare}) && w.Backend.Name.String() == "shop/"+c.backend:
			got = "spared"
		}
		if problem := f.Problems[svc.Name{Namespace: "shop", Name: "i"}]; got != c.want || !strings.Contains(problem, c.problem) {
			t.Errorf("%s, %s: %s, %q", c.annotations, c.backend, got, problem)
		}
	}
}
