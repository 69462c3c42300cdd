package gateway

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// A filter of type ExternalAuth leads to a Service. Without one, or in a form that is not served, no request passes, and the status of
// the route has the reason.
func TestExternalAuth(t *testing.T) {
	const fine, resolved, refused = "True Accepted", "True ResolvedRefs", "False UnsupportedValue"
	for filter, want := range map[string][4]string{ // the Service, whether requests may reach a backend, and two conditions
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {}":                               {"default/b", "a", resolved, fine},
		"protocol: HTTP, backendRef: {name: granted, namespace: open, port: 80}, http: {}":        {"open/granted", "a", resolved, fine},
		"protocol: HTTP, backendRef: {name: b, namespace: other, port: 80}, http: {}":             {"/", "503", "False RefNotPermitted", fine},
		"protocol: HTTP, backendRef: {name: c, port: 80}, http: {}":                               {"/", "503", "False BackendNotFound", fine},
		"protocol: HTTP, backendRef: {name: external, port: 80}, http: {}":                        {"/", "503", "False InvalidKind", fine},
		"protocol: HTTP, backendRef: {name: b, kind: Pod, port: 80}, http: {}":                    {"/", "503", "False InvalidKind", fine},
		"protocol: GRPC, backendRef: {name: b, port: 80}, grpc: {}":                               {"default/b", "a", resolved, fine},
		"protocol: GRPC, backendRef: {name: c, port: 80}, grpc: {}":                               {"/", "503", "False BackendNotFound", fine},
		"protocol: GRPC, backendRef: {name: b, port: 80}, grpc: {allowedHeaders: ['a b']}":        {"", "500", resolved, refused},
		"protocol: UDP, backendRef: {name: b, port: 80}":                                          {"", "500", resolved, refused},
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {path: /a/..;/b}":                 {"", "500", resolved, refused},
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {path: relative}":                 {"", "500", resolved, refused},
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {allowedHeaders: ['a b']}":        {"", "500", resolved, refused},
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {allowedResponseHeaders: [Host]}": {"", "500", resolved, refused},
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {allowedResponseHeaders: [Te]}":   {"", "500", resolved, refused},
		"protocol: HTTP, backendRef: {name: b, port: 80}, http: {allowedResponseHeaders: [X-A]}":  {"default/b", "a", resolved, fine},
		"protocol: HTTP, backendRef: {name: b, port: 80}}}, " +
			"{type: ExternalAuth, externalAuth: {protocol: HTTP, backendRef: {name: b, port: 80}": {
			"", "500", resolved, refused,
		},
	} {
		f := builtFrom(t, plainGateway+`
---
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{name: g}]
  rules: [{filters: [{type: ExternalAuth, externalAuth: {`+filter+`}}], backendRefs: [{name: a, port: 80}]}]
---
kind: ReferenceGrant
metadata: {name: x, namespace: open}
spec:
  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: default}]
  to: [{group: "", kind: Service}]
---
kind: Service
metadata: {name: external}
spec: {type: ExternalName, externalName: 169.254.169.254, ports: [{port: 80}]}`+service("a", "b", "other/b", "open/granted"))
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/", Method: "GET", Fields: fields{}})
		var got [4]string
		switch w := rule.Pick(0); {
		case w == nil:
			got[1] = "500"
		case rule.Auth.Backend == Backend{}:
			got[1] = "503"
		default:
			got[1] = w.Backend.Name.Name
		}
		if rule.Auth != nil {
			got[0] = rule.Auth.Backend.Name.String()
			if rule.Auth.GRPC && rule.Auth.Backend != (Backend{}) && rule.Auth.Backend.Protocol != H2C {
				t.Errorf("%s: asked by %s", filter, rule.Auth.Backend.Protocol)
			}
			if has := slices.Contains(f.Targets, rule.Asked()); has != (got[1] == "a") {
				t.Errorf("%s: among the targets: %t", filter, has)
			}
		}
		s := f.Parents(kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "default", Name: "r"}})[0].Conditions
		if got[2], got[3] = conditionOf(s, "ResolvedRefs"), conditionOf(s, "Accepted"); got != want {
			t.Errorf("%s: %q, want %q", filter, got, want)
		}
	}
}

// An Ingress has requests authorized by a Service of its namespace, or of one that permits it: else none of them passes.
func TestIngressAuth(t *testing.T) {
	const grant = "\n---\nkind: ReferenceGrant\nmetadata: {name: x, namespace: open}\nspec:\n" +
		"  from: [{group: networking.k8s.io, kind: Ingress, namespace: default}]\n  to: [{group: \"\", kind: Service, name: auth}]" +
		"\n---\nkind: Service\nmetadata: {name: external}\nspec: {type: ExternalName, externalName: 127.0.0.1, ports: [{port: 80}]}"
	for annotations, c := range map[string]struct{ want, problem string }{
		"auth-url: http://auth/":                                                   {"a /", ""},
		"auth-url: https://auth:80/":                                               {"a /", ""},
		"auth-url: http://auth.open.svc/":                                          {"a /", ""},
		"auth-url: http://auth.other.svc/":                                         {"503", "of namespace other permits Service other/auth"},
		"auth-url: http://second.open.svc/":                                        {"503", "of namespace open permits Service open/second"},
		"auth-url: http://localhost/":                                              {"503", "there is no Service default/localhost"},
		"auth-url: http://0x7f000001/":                                             {"503", "there is no Service default/0x7f000001"},
		"auth-url: http://external/":                                               {"503", "Service default/external is of type ExternalName"},
		"auth-url: http://auth:81/":                                                {"503", "Service default/auth has no such port"},
		"auth-url: http://auth/; auth-response-headers: Content-Length":            {"503", "content-length belongs to messages"},
		"auth-url: http://auth/; auth-response-headers: X-User, Transfer-Encoding": {"503", "transfer-encoding belongs to messages"},
	} {
		f := nginxFront(t, annotated("default/i", "h", annotations, "P /private a")+annotated("default/j", "h", "", "P / b")+grant+
			service("a", "b", "auth", "other/auth", "open/auth", "open/second"))
		problem := f.Problems[svc.Name{Namespace: "default", Name: "i"}]
		if !strings.Contains(problem, c.problem) || (problem == "") != (c.problem == "") {
			t.Errorf("%s: %q, want %q", annotations, problem, c.problem)
		}
		if got := strings.TrimSuffix(decide(t, f.Table, "http://h/private/x"), "private/x"); got != c.want {
			t.Errorf("%s: %q, want %q", annotations, got, c.want)
		}
		if got := decide(t, f.Table, "http://h/x"); got != "b /x" {
			t.Errorf("%s: the other Ingress: %q", annotations, got)
		}
		if got := f.Granted(); got != strings.Contains(annotations, ".svc") {
			t.Errorf("%s: looks for grants: %t", annotations, got)
		}
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/private", Fields: fields{}})
		if asked := rule.Auth != nil && slices.Contains(f.Targets, rule.Asked()); asked != (c.problem == "") {
			t.Errorf("%s: among the targets %s: %t", annotations, fmt.Sprint(f.Targets), asked)
		}
	}
}

// An address of the request's own host leads to the Service that the host has at its path, within the namespace that owns the host, and
// only if that is open.
func TestIngressAuthAtOwnHost(t *testing.T) {
	private := func(address string) string {
		return annotated("default/i", "h", "auth-url: "+address+"; auth-signin: https://$host/start", "P /private a")
	}
	open := func(annotations, path string) string { return annotated("default/p", "h", annotations, path) }
	for name, c := range map[string]struct{ ingresses, want, problem string }{
		"a path of another Ingress": {
			private("https://$host/oauth2/auth?x=y") + open("", "P /oauth2 auth"), "a auth /oauth2/auth?x=y ", "",
		},
		"an exact path": {private("http://$http_host/ask") + open("", "E /ask auth"), "a auth /ask ", ""},
		"another name of the host for Pods": {
			private("https://$host/ask") + open("upstream-vhost: in.example.com", "E /ask auth"),
			"a auth /ask in.example.com", "",
		},
		"a path as servers read it": {
			private("https://$best_http_host/a/../ask") + open("", "E /ask auth"), "a auth /ask ", "",
		},
		"no such path":      {private("https://$host/oauth2/auth"), "503", `host "h" has no path for /oauth2/auth`},
		"another host":      {private("https://$host/ask") + annotated("default/p", "other", "", "P /ask auth"), "503", `host "h" has no path`},
		"another namespace": {private("https://$host/ask") + annotated("other/p", "h", "", "P /ask auth"), "503", `host "h" has no path`},
		"itself":            {private("https://$host/private/ask"), "503", `host "h" has no path`},
		"a path that is protected": {
			private("https://$host/ask") + open("whitelist-source-range: 10.0.0.0/8", "P /ask auth"), "503", "without authorization",
		},
		"a path that is rewritten": {
			private("https://$host/ask") + open("rewrite-target: /x", "P /ask auth"), "503", "rewrites",
		},
		"a path that leads away": {
			private("https://$host/ask") + open("permanent-redirect: https://x/", "P /ask auth"), "503", "redirects",
		},
		"a path without a Service": {private("https://$host/ask") + open("", "P /ask missing"), "503", "leads to a Service"},
		"a variable in the path":   {private("https://$host/$request_uri"), "503", "without variables"},
		"a port":                   {private("https://$host:8443/ask") + open("", "P /ask auth"), "503", "cannot be asked"},
		"a suffix":                 {private("https://$host.evil.example/ask") + open("", "P /ask auth"), "503", "cannot be asked"},
	} {
		f := nginxFront(t, c.ingresses+service("a", "auth", "other/auth"))
		problem := f.Problems[svc.Name{Namespace: "default", Name: "i"}]
		if !strings.Contains(problem, c.problem) || (problem == "") != (c.problem == "") {
			t.Errorf("%s: %q, want %q", name, problem, c.problem)
		}
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/private/x", Fields: fields{}})
		got := "503"
		if rule.Auth != nil && rule.Auth.Backend != (Backend{}) {
			got = fmt.Sprint(rule.Pick(0).Backend.Name.Name, " ", rule.Auth.Backend.Name.Name, " ", rule.Auth.Target, " ", rule.Auth.Host)
		}
		if rule.Auth == nil && !rule.Closed || got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if asked := rule.Auth != nil && slices.Contains(f.Targets, rule.Asked()); asked != (c.problem == "") {
			t.Errorf("%s: among the targets: %t", name, asked)
		}
	}
}

// Names and passwords are in a Secret of the Ingress's namespace, which nodes may read only if it can be used. One Secret can be a
// certificate's for another Ingress.
func TestIngressBasic(t *testing.T) {
	staff, other := svc.Name{Namespace: "default", Name: "staff"}, svc.Name{Namespace: "other", Name: "staff"}
	for annotations, c := range map[string]struct {
		secret  Secret
		problem string
	}{
		"auth-type: basic; auth-secret: staff":                                {Secret{Problem: "not TLS", NoMap: "no"}, ""},
		"auth-type: basic; auth-secret: default/staff":                        {Secret{Problem: "not TLS", NoMap: "no"}, ""},
		"auth-type: basic; auth-secret: staff; auth-secret-type: auth-map":    {Secret{Problem: "not TLS", NoFile: "no"}, ""},
		"auth-type: basic; auth-secret: staff; auth-secret-type: auth-file":   {Secret{NoFile: "it has no entry auth"}, "staff: it has no entry"},
		"auth-type: basic; auth-secret: staff; auth-secret-type:  auth-map":   {Secret{NoMap: "it is empty"}, "staff: it is empty"},
		"auth-type: basic; auth-secret: other/staff":                          {Secret{}, "it is of another namespace"},
		"auth-type: basic; auth-secret: missing; auth-secret-type: auth-file": {Secret{}, "missing: it does not exist"},
	} {
		o := objects(t, strings.TrimPrefix(annotated("default/i", "h", annotations, "P /private a")+annotated("default/j", "h", "", "P / b")+
			service("a", "b"), "\n---\n"))
		o.Secrets[staff], o.Secrets[other] = c.secret, c.secret
		f := BuildIngress(o, nil)
		problem := f.Problems[svc.Name{Namespace: "default", Name: "i"}]
		if !strings.Contains(problem, c.problem) || (problem == "") != (c.problem == "") {
			t.Errorf("%s: %q, want %q", annotations, problem, c.problem)
		}
		if usable := slices.Contains(f.Secrets, staff); usable != (c.problem == "") || slices.Contains(f.Named, other) {
			t.Errorf("%s: nodes may read %v, and %v is followed", annotations, f.Secrets, f.Named)
		}
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/private/x", Fields: fields{}})
		if rule.Basic == nil || c.problem == "" && rule.Basic.Secret != staff {
			t.Errorf("%s: %+v", annotations, rule.Basic)
		}
	}
}
