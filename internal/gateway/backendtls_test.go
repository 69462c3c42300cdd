package gateway

import (
	"fmt"
	"strings"
	"testing"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// policy returns the manifest of a BackendTLSPolicy of a minute after midnight.
func policyFor(name string, minute int, targets, validation string) string {
	ns, n, ok := strings.Cut(name, "/")
	if !ok {
		ns, n = "default", name
	}
	return fmt.Sprintf("\n---\nkind: BackendTLSPolicy\nmetadata: {namespace: %s, name: %s, creationTimestamp: '2026-01-01T00:%02d:00Z'}\n"+
		"spec:\n  targetRefs: [%s]\n  validation: {hostname: web.example.com, %s}", ns, n, minute, targets, validation)
}

const (
	toWeb     = `{group: "", kind: Service, name: web}`
	toWebHTTP = `{group: "", kind: Service, name: web, sectionName: http}`
	byMap     = `caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]`
	authority = "\n---\nkind: ConfigMap\nmetadata: {name: ca}\ndata: {ca.crt: x}"
)

// verdicts returns the conditions of a policy, "Accepted, ResolvedRefs".
func verdicts(f *Front, n svc.Name) string {
	list := f.PolicyStatuses()[n]
	return conditionOf(list, "Accepted") + ", " + conditionOf(list, "ResolvedRefs")
}

// Of the policies of a port the oldest counts, and one for the port before one for the Service. A backend whose policy cannot be met
// is no target, so that nothing speaks to it without TLS.
func TestBackendTLSPolicies(t *testing.T) {
	const fine, plain, refused = "True Accepted, True ResolvedRefs", "plain", "no target"
	const missing, invalid = "False NoValidCACertificate, False InvalidCACertificateRef", "False Invalid, True ResolvedRefs"
	const kind, lost = "False NoValidCACertificate, False InvalidKind", "False Conflicted, True ResolvedRefs"
	there := strings.Replace(authority, "name: ca", "name: ca, namespace: b", 1)
	n := func(name string) svc.Name { return svc.Name{Namespace: "default", Name: name} }
	type by map[string]string
	for what, c := range map[string]struct {
		objects string
		want    by     // by policy
		target  string // the policy of the target
	}{
		"none":           {"", nil, plain},
		"of the Service": {policyFor("p", 1, toWeb, byMap) + authority, by{"p": fine}, "p"},
		"of the port":    {policyFor("p", 1, toWebHTTP, byMap) + authority, by{"p": fine}, "p"},
		"the port's first": {
			policyFor("a", 1, toWeb, byMap) + policyFor("p", 2, toWebHTTP, byMap) + authority, by{"a": fine, "p": fine}, "p",
		},
		"the older one": {
			policyFor("a", 2, toWeb, byMap) + policyFor("z", 1, toWeb, byMap) + authority, by{"z": fine, "a": lost}, "z",
		},
		"as old: by name": {
			policyFor("b", 1, toWeb, byMap) + policyFor("a", 1, toWeb, byMap) + authority, by{"a": fine, "b": lost}, "a",
		},
		"another Service": {policyFor("p", 1, `{group: "", kind: Service, name: other}`, byMap) + authority, by{"p": ", "}, plain},
		"another kind": {
			policyFor("p", 1, `{group: apps, kind: Deployment, name: web}`, byMap) + authority, by{"p": ", "}, plain,
		},
		"another namespace": {policyFor("b/p", 1, toWeb, byMap) + there, nil, plain},
		"the system's":      {policyFor("p", 1, toWeb, "wellKnownCACertificates: System"), by{"p": fine}, "p"},
		"unknown ones":      {policyFor("p", 1, toWeb, "wellKnownCACertificates: example.com/x"), by{"p": invalid}, refused},
		"no ConfigMap":      {policyFor("p", 1, toWeb, byMap), by{"p": missing}, refused},
		"an empty ConfigMap": {
			policyFor("p", 1, toWeb, byMap) + strings.Replace(authority, "x}", "''}", 1), by{"p": missing}, refused,
		},
		"a ConfigMap of another namespace": {policyFor("p", 1, toWeb, byMap) + there, by{"p": missing}, refused},
		"a section with a slip": {
			policyFor("p", 1, strings.Replace(toWebHTTP, "http", "htpp", 1), byMap) + authority,
			by{"p": "False TargetNotFound, True ResolvedRefs"}, plain,
		},
		"a Secret": {
			policyFor("p", 1, toWeb, strings.Replace(byMap, "ConfigMap", "Secret", 1)) + "\n---\nkind: Secret\nmetadata: {name: ca}",
			by{"p": fine}, "p",
		},
		"a Service as authority": {policyFor("p", 1, toWeb, strings.Replace(byMap, "ConfigMap", "Service", 1)), by{"p": kind}, refused},
		"one of two authorities": {
			policyFor("p", 1, toWeb, strings.Replace(byMap, "[", `[{group: "", kind: ConfigMap, name: missing}, `, 1)) + authority,
			by{"p": "True Accepted, False InvalidCACertificateRef"}, "p",
		},
		"a name without a scheme": {
			policyFor("p", 1, toWeb, byMap+", subjectAltNames: [{type: URI, uri: web}]") + authority, by{"p": invalid}, refused,
		},
		"an invalid one that is older": {
			policyFor("a", 1, toWeb, "wellKnownCACertificates: x/y") + policyFor("z", 2, toWeb, byMap) + authority,
			by{"a": invalid, "z": lost}, refused,
		},
	} {
		f := builtFrom(t, plainGateway+service("web")+route("r", "", "web {}")+c.objects)
		target := refused
		for _, to := range f.Targets {
			if target = to.Policy.Name; to.Policy == (svc.Name{}) {
				target = plain
			}
		}
		if target != c.target {
			t.Errorf("%s: the target is %s, want %s", what, target, c.target)
		}
		for name, want := range c.want {
			if got := verdicts(f, n(name)); got != want {
				t.Errorf("%s: %s: %s, want %s", what, name, got, want)
			}
		}
	}
}

// A port whose appProtocol asks for TLS is served by a policy, which tells whom to trust, and refused without.
func TestProtocolsOfPolicies(t *testing.T) {
	for app, want := range map[string][2]BackendProtocol{
		"": {HTTP1, HTTP1}, "https": {"", HTTP1}, "kubernetes.io/wss": {"", HTTP1}, "tls": {"", HTTP1}, "kubernetes.io/h2c": {H2C, H2C},
	} {
		for i, objects := range []string{"", policyFor("p", 1, toWeb, byMap) + authority} {
			text := plainGateway + strings.Replace(service("web"), "port: 80", "port: 80, appProtocol: '"+app+"'", 1)
			f, got := builtFrom(t, text+route("r", "", "web {}")+objects), BackendProtocol("")
			for _, to := range f.Targets {
				got = to.Protocol
			}
			if got != want[i] {
				t.Errorf("%q, with %d policies: %q, want %q", app, i, got, want[i])
			}
		}
	}
}

// A route that may not refer to a Service has no part in the status of the Service's policy.
func TestAncestorsNeedAGrant(t *testing.T) {
	text := plainGateway + service("b/web") +
		strings.Replace(route("r", "", "web {}"), "name: web, port", "name: web, namespace: b, port", 1) +
		policyFor("b/p", 1, toWeb, byMap) + strings.Replace(authority, "name: ca", "name: ca, namespace: b", 1)
	p := svc.Name{Namespace: "b", Name: "p"}
	if f := builtFrom(t, text); f.PolicyStatuses()[p] != nil || len(f.NamedAuthorities()) > 0 {
		t.Errorf("without a grant: %v, %v", f.PolicyStatuses()[p], f.NamedAuthorities())
	}
	f := builtFrom(t, text+"\n---\nkind: ReferenceGrant\nmetadata: {name: g, namespace: b}\nspec:\n"+
		"  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: default}]\n  to: [{group: \"\", kind: Service}]")
	if got := verdicts(f, p); got != "True Accepted, True ResolvedRefs" {
		t.Error(got)
	}
	if got := fmt.Sprint(f.OpenedByPolicies()); got != "map[b/p:[ConfigMap b/ca]]" {
		t.Errorf("the Service of the policy opens %s", got)
	}
}

// twoRoutes lead to web and to other.
var twoRoutes = service("web", "other") + route("r", "", "web {path: {value: /web}}") + route("s", "", "other {path: {value: /other}}")

// A change of the policies of a Service compiles the routes that lead to it, and no others.
func TestPoliciesChange(t *testing.T) {
	o := objects(t, plainGateway+twoRoutes+authority)
	g := svc.Name{Namespace: "default", Name: "g"}
	before := BuildGateway(o, g, nil)
	added := objects(t, strings.TrimPrefix(policyFor("p", 1, toWeb, byMap), "\n---\n")).Policies.All()
	n := svc.Name{Namespace: "default", Name: "p"}
	if got := fmt.Sprint(o.Policies.Set(n, added[n])); got != "[default/web]" {
		t.Errorf("it concerns %s", got)
	}
	after := BuildGateway(o, g, before)
	for name, same := range map[string]bool{"r": false, "s": true} {
		key := kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "default", Name: name}}
		if (before.routes[key].cachedRoute == after.routes[key].cachedRoute) != same {
			t.Errorf("route %s: kept %t", name, !same)
		}
	}
	status := *added[n]
	status.Status.Ancestors = []gwv1.PolicyAncestorStatus{{}}
	if got := o.Policies.Set(n, &status); got != nil {
		t.Errorf("a status concerns %v", got)
	}
	web := svc.Name{Namespace: "default", Name: "web"}
	if o.Policies.Set(n, nil); BuildGateway(o, g, after).Policies[n] != nil || o.Policies.At(web) != nil {
		t.Error("it is still there")
	}
}

// The authorities of one namespace do not use up what another one may have.
func TestAuthoritiesAreBounded(t *testing.T) {
	known := map[trust.Ref]string{}
	ref := func(ns string, i int) trust.Ref {
		return trust.Ref{Kind: trust.ConfigMap, Name: svc.Name{Namespace: ns, Name: fmt.Sprint(i)}}
	}
	a := trust.NewAuthorities(known)
	for i := range 300 {
		known[ref("a", i)], known[ref("b", i)] = "", ""
		if problem := a.Add(ref("a", i)); (problem == "") != (i < 256) {
			t.Errorf("%d: %q", i, problem)
		}
	}
	if problem := a.Add(ref("b", 0)); problem != "" || len(a.Usable()) != 257 {
		t.Errorf("%q, %d", problem, len(a.Usable()))
	}
}

// A TLSRoute has its backends spoken to by TLS where TLS has ended; what passes through is left as it is.
func TestPoliciesOfTLSRoutes(t *testing.T) {
	f := builtFrom(t, `kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: passes, port: 443, protocol: TLS, hostname: a.example.com, tls: {mode: Passthrough}}
  - {name: ends, port: 443, protocol: TLS, hostname: b.example.com, tls: {mode: Terminate, certificateRefs: [{name: c}]}}
---
kind: TLSRoute
metadata: {name: r}
spec: {parentRefs: [{name: g}], hostnames: [a.example.com, b.example.com], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
kind: Secret
metadata: {name: c}`+service("web")+policyFor("p", 1, toWeb, byMap)+authority)
	for host, want := range map[string]string{"a.example.com": "/", "b.example.com": "default/p"} {
		_, rule := f.Table.Ports[443].Connection(host)
		if got := rule.Backends[0].Backend.Policy.String(); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
	if len(f.Targets) != 2 {
		t.Errorf("targets %v", f.Targets)
	}
}

const httpsGateway = `kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  tls: {%s}
  listeners:
  - {name: http, port: 80, protocol: HTTP}
  - {name: one, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: c}]}}
  - {name: two, port: 8443, protocol: HTTPS, tls: {certificateRefs: [{name: c}]}}
---
kind: Secret
metadata: {name: c}`

// Who asks for certificates of clients gets the ports of HTTPS closed while there is no authority to verify them by; the ports of
// HTTP, and of a valid authority, stay open.
func TestCertificatesOfClients(t *testing.T) {
	ask := func(ref, more string) string { return "validation: {caCertificateRefs: [" + ref + "]" + more + "}" }
	const ca, none, other = `{group: "", kind: ConfigMap, name: ca}`, `{group: "", kind: ConfigMap, name: none}`,
		`{group: "", kind: ConfigMap, name: ca, namespace: b}`
	grant := "\n---\nkind: ReferenceGrant\nmetadata: {name: x, namespace: b}\nspec:\n" +
		"  from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: default}]\n  to: [{group: \"\", kind: %s}]"
	there := strings.Replace(authority, "name: ca", "name: ca, namespace: b", 1)
	const fine = "True Accepted, True ResolvedRefs, verified"
	const open, insecure = "True Accepted, True ResolvedRefs, open", "True Accepted, True ResolvedRefs, insecure"
	const missing, closed = "False NoValidCACertificate, False InvalidCACertificateRef, closed", "False NoValidCACertificate, False "
	const kind, permitted = closed + "InvalidCACertificateKind, closed", closed + "RefNotPermitted, closed"
	all := func(ref, more string) string { return "default: {" + ask(ref, more) + "}" }
	for what, c := range map[string]struct{ frontend, objects, one, two string }{
		"no question":        {"default: {}", "", open, open},
		"of all":             {all(ca, ""), "", fine, fine},
		"of a port":          {"default: {}, perPort: [{port: 443, tls: {" + ask(ca, "") + "}}]", "", fine, open},
		"not of a port":      {all(ca, "") + ", perPort: [{port: 8443, tls: {}}]", "", fine, open},
		"by nothing":         {all(none, "") + ", perPort: [{port: 8443, tls: {" + ask(ca, "") + "}}]", "", missing, fine},
		"by a Service":       {all(`{group: "", kind: Service, name: web}`, ""), "", kind, kind},
		"without a grant":    {all(other, ""), there, permitted, permitted},
		"a grant of Secrets": {all(other, ""), there + fmt.Sprintf(grant, "Secret"), permitted, permitted},
		"with a grant":       {all(other, ""), there + fmt.Sprintf(grant, "ConfigMap"), fine, fine},
		"one of two": {
			all(ca+", "+none, ""), "", "True Accepted, False InvalidCACertificateRef, closed",
			"True Accepted, False InvalidCACertificateRef, closed",
		},
		"insecure": {all(ca, ", mode: AllowInsecureFallback"), "", insecure, insecure},
	} {
		f := builtFrom(t, fmt.Sprintf(httpsGateway, "frontend: {"+c.frontend+"}")+authority+c.objects)
		status := f.Status([]string{"192.0.2.1"}, "")
		for _, l := range status.Listeners {
			number := map[gwv1.SectionName]uint16{"http": 80, "one": 443, "two": 8443}[l.Name]
			got := conditionOf(l.Conditions, "Accepted") + ", " + conditionOf(l.Conditions, "ResolvedRefs") + ", "
			switch p := f.Table.Ports[number]; {
			case p == nil:
				got += "closed"
			case p.Clients == nil:
				got += "open"
			case p.Clients.Insecure:
				got += "insecure"
			default:
				got += "verified"
			}
			if want := map[gwv1.SectionName]string{"http": open, "one": c.one, "two": c.two}[l.Name]; got != want {
				t.Errorf("%s: %s: %s, want %s", what, l.Name, got, want)
			}
		}
		if f.Table.Subjects != (what != "no question") { // also while no port is open that asks
			t.Errorf("%s: subjects %t", what, f.Table.Subjects)
		}
		if got := conditionOf(status.Conditions, "InsecureFrontendValidationMode"); (got == "True ConfigurationChanged") != (what == "insecure") {
			t.Errorf("%s: the Gateway is %q", what, got)
		}
		if granted := fmt.Sprint(f.Granted()); (granted == "map[b/x:[ConfigMap b/ca]]") != (what == "with a grant") {
			t.Errorf("%s: granted %s", what, granted)
		}
	}
}

// A listener that a ListenerSet adds asks clients for what the Gateway asks at its port.
func TestClientsOfListenerSets(t *testing.T) {
	f := builtFrom(t, strings.Replace(fmt.Sprintf(httpsGateway,
		`frontend: {default: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]}}}`),
		"  tls: {", "  allowedListeners: {namespaces: {from: All}}\n  tls: {", 1)+authority+
		set("default/s", "{name: l, port: 9443, protocol: HTTPS, tls: {certificateRefs: [{name: c}]}}"))
	if p := f.Table.Ports[9443]; p == nil || p.Clients == nil {
		t.Errorf("port %+v", p)
	}
}

// Backends with TLS are not spoken to while the certificate that the Gateway has to show is missing. The others are.
func TestCertificateOfAGateway(t *testing.T) {
	grant := "\n---\nkind: ReferenceGrant\nmetadata: {name: x, namespace: b}\nspec:\n" +
		"  from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: default}]\n  to: [{group: \"\", kind: Secret}]"
	const there = "\n---\nkind: Secret\nmetadata: {name: d, namespace: b}"
	for what, c := range map[string]struct{ ref, objects, want string }{
		"a Secret":           {"{name: c}", "", "True ResolvedRefs, default/c, [other web]"},
		"no Secret":          {"{name: d}", "", "False InvalidClientCertificateRef, /, [other]"},
		"another kind":       {"{kind: ConfigMap, name: c}", "", "False InvalidClientCertificateRef, /, [other]"},
		"another group":      {"{group: example.com, name: c}", "", "False InvalidClientCertificateRef, /, [other]"},
		"without a grant":    {"{name: d, namespace: b}", there, "False RefNotPermitted, /, [other]"},
		"with a grant":       {"{name: d, namespace: b}", there + grant, "True ResolvedRefs, b/d, [other web]"},
		"none is asked for":  {"", "", "True ResolvedRefs, /, [other web]"},
		"nothing to be read": {"{name: d, namespace: b}", grant, "False InvalidClientCertificateRef, /, [other]"},
	} {
		tls := ""
		if c.ref != "" {
			tls = "backend: {clientCertificateRef: " + c.ref + "}"
		}
		f := builtFrom(t, fmt.Sprintf(httpsGateway, tls)+twoRoutes+
			policyFor("p", 1, toWeb, byMap)+authority+c.objects)
		targets := []string{}
		for _, name := range []string{"other", "web"} {
			for _, to := range f.Targets {
				if to.Name.Name == name {
					targets = append(targets, name)
				}
			}
		}
		status := f.Status([]string{"192.0.2.1"}, "").Conditions
		got := fmt.Sprintf("%s, %s, %v", conditionOf(status, "ResolvedRefs"), f.ClientCertificate, targets)
		if got != c.want || conditionOf(status, "Accepted") != "True Accepted" {
			t.Errorf("%s: %s, want %s; %s", what, got, c.want, conditionOf(status, "Accepted"))
		}
	}
}
