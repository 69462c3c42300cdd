package gateway

import (
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// The table of examples of the reference (https://kubernetes.io/docs/concepts/services-networking/ingress/#examples).
func TestIngressPathsOfTheReference(t *testing.T) {
	for _, c := range []struct {
		kind, paths, request string
		match                string // the path that takes it, "" for none
	}{
		{"Prefix", "/", "/any", "/"},
		{"Exact", "/foo", "/foo", "/foo"},
		{"Exact", "/foo", "/bar", ""},
		{"Exact", "/foo", "/foo/", ""},
		{"Exact", "/foo/", "/foo", ""},
		{"Prefix", "/foo", "/foo", "/foo"},
		{"Prefix", "/foo", "/foo/", "/foo"},
		{"Prefix", "/foo/", "/foo", "/foo/"},
		{"Prefix", "/foo/", "/foo/", "/foo/"},
		{"Prefix", "/aaa/bb", "/aaa/bbb", ""},
		{"Prefix", "/aaa/bbb", "/aaa/bbb", "/aaa/bbb"},
		{"Prefix", "/aaa/bbb/", "/aaa/bbb", "/aaa/bbb/"},
		{"Prefix", "/aaa/bbb", "/aaa/bbb/", "/aaa/bbb"},
		{"Prefix", "/aaa/bbb", "/aaa/bbb/ccc", "/aaa/bbb"},
		{"Prefix", "/aaa/bbb", "/aaa/bbbxyz", ""},
		{"Prefix", "/ /aaa", "/aaa/ccc", "/aaa"},
		{"Prefix", "/aaa /", "/aaa/ccc", "/aaa"},
		{"Prefix", "/ /aaa /aaa/bbb", "/aaa/bbb", "/aaa/bbb"},
		{"Prefix", "/ /aaa /aaa/bbb", "/ccc", "/"},
		{"Prefix", "/aaa", "/ccc", ""},
		{"ImplementationSpecific", "/foo", "/foo/bar", "/foo"},
	} {
		paths := strings.Fields(c.paths)
		var list []string
		names := []string{"fallback"}
		want := "fallback"
		for i, p := range paths {
			name := fmt.Sprintf("s%d", i)
			names = append(names, name)
			list = append(list, fmt.Sprintf("{path: %q, pathType: %s, backend: {service: {name: %s, port: {number: 80}}}}", p, c.kind, name))
			if p == c.match {
				want = name
			}
		}
		text := fmt.Sprintf("kind: Ingress\nmetadata: {name: i}\nspec:\n  defaultBackend: {service: {name: fallback, port: {name: http}}}\n"+
			"  rules: [{http: {paths: [%s]}}]", strings.Join(list, ", "))
		f := BuildIngress(objects(t, text+service(names...)), nil)
		if got := ask(t, f.Table, "http://host"+c.request); got != want {
			t.Errorf("%+v: %s, want %s", c, got, want)
		}
	}
	// "Mixed match types can match": exact comes first.
	mixed := `
kind: Ingress
metadata: {name: i}
spec:
  rules:
  - http:
      paths:
      - {path: /foo, pathType: Prefix, backend: {service: {name: prefix, port: {number: 80}}}}
      - {path: /foo, pathType: Exact, backend: {service: {name: exact, port: {number: 80}}}}`
	f := BuildIngress(objects(t, mixed+service("prefix", "exact")), nil)
	if got := ask(t, f.Table, "http://host/foo"); got != "exact" {
		t.Error(got)
	}
}

// The table of wildcards of the reference, and which rules count for a host.
func TestIngressHosts(t *testing.T) {
	f := BuildIngress(objects(t, `
kind: Ingress
metadata: {name: i}
spec:
  rules:
  - {host: "*.foo.com", http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: wild, port: {number: 80}}}}]}}
  - {host: bar.com, http: {paths: [{path: /a, pathType: Prefix, backend: {service: {name: bar, port: {number: 80}}}}]}}
  - {http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: any, port: {number: 80}}}}]}}
---
kind: Ingress
metadata: {name: all}
spec: {defaultBackend: {service: {name: last, port: {number: 80}}}}`+service("wild", "bar", "any", "last")), nil)
	for request, want := range map[string]string{
		"http://bar.foo.com/": "wild", "http://baz.bar.foo.com/": "any", "http://foo.com/": "any", "http://bar.com/a/b": "bar",
		// The host of a rule is not open to rules without a host, only to the default backend.
		"http://bar.com/b": "last", "http://BAR.com:80/a": "bar",
	} {
		if got := ask(t, f.Table, request); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
}

// An Ingress cannot take over what an older one of another namespace has, nor lead to anything but a Service of its namespace.
func TestIngressConflicts(t *testing.T) {
	ingress := func(ns, created, secret, more string) string {
		return fmt.Sprintf(`
kind: Ingress
metadata: {name: i, namespace: %s, creationTimestamp: %q}
spec:
  tls: [{hosts: [shop.example.com], secretName: %s}]
  rules: [{host: shop.example.com, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: %s, port: {number: 80}}}}%s]}}]`,
			ns, created, secret, ns, more)
	}
	o := objects(t, ingress("victim", "2026-01-01T00:00:00Z", "cert", "")+"\n---\n"+
		ingress("attacker", "2026-02-01T00:00:00Z", "cert", `, {path: /r, pathType: Exact, backend: {resource: {kind: Bucket, name: b}}}`)+
		service("victim/victim", "attacker/attacker")+
		"\n---\nkind: Secret\nmetadata: {name: cert, namespace: victim}\n---\nkind: Secret\nmetadata: {name: cert, namespace: attacker}")
	f := BuildIngress(o, nil)
	if got := ask(t, f.Table, "https://shop.example.com/"); got != "victim" {
		t.Error(got)
	}
	attacker := svc.Name{Namespace: "attacker", Name: "i"}
	if l := f.Table.Ports[443].ListenerFor("shop.example.com"); l.Certificates[0].Namespace != "victim" {
		t.Errorf("%v", l.Certificates)
	}
	if got := ask(t, f.Table, "http://shop.example.com/r"); got != "victim" {
		t.Errorf("a path of an older Ingress's host: %s", got)
	}
	resource := BuildIngress(objects(t, `
kind: Ingress
metadata: {name: i}
spec: {rules: [{http: {paths: [{path: /r, pathType: Exact, backend: {resource: {kind: Bucket, name: b}}}]}}]}`), nil)
	if got := ask(t, resource.Table, "http://x/r"); got != "500" || len(resource.Problems) == 0 {
		t.Errorf("a resource: %s", got)
	}
	if f.Problems[attacker] == "" {
		t.Error("no problem of the second Ingress")
	}
	if p := f.Table.Ports[443]; !p.Admits("shop.example.com", "shop.example.com") || p.Admits("shop.example.com", "other") {
		t.Error("a request whose TLS is of another host is admitted")
	}
	// Without a valid certificate there is no HTTPS, but HTTP.
	o.Secrets[svc.Name{Namespace: "victim", Name: "cert"}] = Secret{Problem: "it is no certificate"}
	delete(o.Ingresses, attacker)
	if f = BuildIngress(o, f); f.Table.Ports[443] != nil || ask(t, f.Table, "http://shop.example.com/") != "victim" {
		t.Error("HTTPS without a certificate")
	}
}

// A younger Ingress gets nothing of the hosts of another namespace: no path, no host below a "*", no requests that no path
// takes, and no certificate. What is of the same namespace is shared.
func TestIngressOwners(t *testing.T) {
	const victim = `
kind: Ingress
metadata: {name: i, namespace: victim, creationTimestamp: "2026-01-01T00:00:00Z"}
spec:
  tls: [{hosts: [shop.example.com, "*.wild.example.com", bare.example.com], secretName: cert}]
  rules:
  - {host: shop.example.com, http: {paths: [{path: /a, pathType: Prefix, backend: {service: {name: victim, port: {number: 80}}}}]}}
  - {host: "*.wild.example.com", http: {paths: [{path: /a, pathType: Prefix, backend: {service: {name: victim, port: {number: 80}}}}]}}
  - {host: plain.other.com, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: victim, port: {number: 80}}}}]}}
---
kind: Secret
metadata: {name: cert, namespace: victim}
---
kind: Secret
metadata: {name: cert, namespace: attacker}
`
	path := func(host string) string {
		return fmt.Sprintf("{host: %q, "+
			"http: {paths: [{path: /login, pathType: Exact, backend: {service: {name: attacker, port: {number: 80}}}}]}}", host)
	}
	const backend = "defaultBackend: {service: {name: attacker, port: {number: 80}}}"
	for _, c := range []struct {
		name, spec string
		want       map[string]string
		problem    bool
	}{
		{"a path", "rules: [" + path("SHOP.example.com") + "]", map[string]string{"https://shop.example.com/login": "404"}, true},
		{"a default backend", backend + "\n  rules: [" + path("shop.example.com") + "]", map[string]string{
			"https://shop.example.com/b": "404", "http://shop.example.com/b": "404"}, true},
		{"only a default backend", backend, map[string]string{
			"https://shop.example.com/b": "404", "https://bare.example.com/": "404", "http://free/": "attacker"}, false},
		{"below a wildcard", "rules: [" + path("x.wild.example.com") + "]", map[string]string{
			"https://x.wild.example.com/login": "404", "https://x.wild.example.com/a": "victim"}, true},
		{"without a host", "tls: [{secretName: cert}]\n  rules: [" + path("") + "]", map[string]string{
			"https://shop.example.com/login": "404", "https://bare.example.com/login": "404", "https://free/login": "404",
			"http://free/login": "attacker"}, false},
		{"a certificate", `tls: [{hosts: [shop.example.com], secretName: cert}]`, map[string]string{
			"https://shop.example.com/a": "victim"}, true},
		{"a certificate below a wildcard", `tls: [{hosts: [x.wild.example.com], secretName: cert}]`, map[string]string{
			"https://x.wild.example.com/a": "victim"}, true},
		{"a wide certificate", `tls: [{hosts: ["*.other.com"], secretName: cert}]`, map[string]string{
			"https://plain.other.com/": "404", "http://plain.other.com/": "victim"}, false},
	} {
		text := "kind: Ingress\nmetadata: {name: i, namespace: attacker, creationTimestamp: \"2026-02-01T00:00:00Z\"}\nspec:\n  " + c.spec
		f := BuildIngress(objects(t, text+"\n---"+victim+strings.TrimPrefix(service("victim/victim", "attacker/attacker"), "\n")), nil)
		for request, want := range c.want {
			if got := ask(t, f.Table, request); got != want {
				t.Errorf("%s: %s: %s, want %s", c.name, request, got, want)
			}
		}
		if got := f.Problems[svc.Name{Namespace: "attacker", Name: "i"}]; c.problem != strings.Contains(got, "of another namespace") {
			t.Errorf("%s: problem %q", c.name, got)
		}
		for _, h := range []string{"shop.example.com", "x.wild.example.com", "bare.example.com"} {
			if l := f.Table.Ports[443].ListenerFor(h); l == nil || l.Certificates[0].Namespace != "victim" {
				t.Errorf("%s: %s has the certificate %v", c.name, h, l)
			}
		}
	}
}

// A port of UDP is no backend of an Ingress, also if it has the number or the name that one asks for.
func TestIngressOfUDP(t *testing.T) {
	for _, c := range []struct{ port, more, want string }{
		{"number: 80", "", "500"}, {"name: dns", "", "500"}, {"number: 80", ", {name: web, port: 80}", "s"},
	} {
		f := BuildIngress(objects(t, "kind: Ingress\nmetadata: {name: i}\nspec: {defaultBackend: {service: {name: s, port: {"+c.port+
			"}}}}\n---\n"+
			"kind: Service\nmetadata: {name: s}\nspec: {ports: [{name: dns, port: 80, protocol: UDP}"+c.more+"]}"), nil)
		if got := ask(t, f.Table, "http://x/"); got != c.want {
			t.Errorf("%s: %s, want %s", c.port, got, c.want)
		}
	}
}
