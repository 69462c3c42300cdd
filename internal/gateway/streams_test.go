package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// streamRoute returns the manifest of a route of connections. to is "namespace/service" or "service".
func streamRoute(kind, name, spec, to string) string {
	ns, name, ok := strings.Cut(name, "/")
	if !ok {
		ns, name = "default", ns
	}
	backend := "name: " + to
	if n, s, ok := strings.Cut(to, "/"); ok {
		backend = "namespace: " + n + ", name: " + s
	}
	return fmt.Sprintf("\n---\nkind: %s\nmetadata: {namespace: %s, name: %s, uid: %s-%s}\n"+
		"spec: {%s, rules: [{backendRefs: [{%s, port: 80}]}]}", kind, ns, name, kind, name, spec, backend)
}

const streamGateway = `
kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: https, port: 443, protocol: HTTPS, hostname: web.example.com, tls: {certificateRefs: [{name: c}]}}
  - {name: pass, port: 443, protocol: TLS, hostname: "*.example.com", tls: {mode: Passthrough}}
  - {name: end, port: 443, protocol: TLS, hostname: end.example.com, tls: {mode: Terminate, certificateRefs: [{name: c}]}}
  - {name: tcp, port: 5432, protocol: TCP}
  - {name: udp, port: 5432, protocol: UDP}
---
kind: Secret
metadata: {name: c}`

// A connection goes to the listener and the route whose host is the most specific for its name, by SNI without a look into it.
// Nothing that names no host, or one that no route has, gets anywhere.
func TestStreams(t *testing.T) {
	udp := "\n---\nkind: Service\nmetadata: {name: dns}\nspec: {ports: [{name: dns, port: 80, protocol: UDP}]}"
	text := streamGateway + service("wild", "exact", "end", "db", "other") + udp +
		streamRoute("TLSRoute", "wild", `parentRefs: [{name: g}], hostnames: ["*.example.com"]`, "wild") +
		streamRoute("TLSRoute", "exact", `parentRefs: [{name: g, sectionName: pass}], hostnames: ["a.example.com", "b.example.org"]`, "exact") +
		streamRoute("TLSRoute", "end", `parentRefs: [{name: g, sectionName: end}], hostnames: ["end.example.com"]`, "end") +
		streamRoute("TCPRoute", "db", `parentRefs: [{name: g}]`, "db") +
		streamRoute("UDPRoute", "dns", `parentRefs: [{name: g, port: 5432}]`, "dns")
	f := builtFrom(t, text)
	for _, c := range []struct {
		port uint16
		udp  bool
		name string
		want string
	}{
		{443, false, "x.example.com", "wild"}, {443, false, "x.y.example.com", "wild"}, {443, false, "a.example.com", "exact"},
		{443, false, "web.example.com", "requests"}, {443, false, "end.example.com", "end"}, {443, false, "b.example.org", "no listener"},
		{443, false, "example.com", "no listener"}, {443, false, "", "no listener"}, {443, false, "*.example.com", "wild"},
		{443, false, "evil-example.com", "no listener"}, {5432, false, "", "db"}, {5432, true, "", "dns"}, {443, true, "", "closed"},
	} {
		if got := connect(f.Table, c.port, c.udp, c.name); got != c.want {
			t.Errorf("port %d, name %q: %s, want %s", c.port, c.name, got, c.want)
		}
	}
	if got := fmt.Sprint(f.Ports()); got != "map[{443 false}:tls {5432 false}:tcp {5432 true}:udp]" {
		t.Error(got)
	}
	if f.Table.Ports[443].Admits("x.example.com", "web.example.com") || !f.Table.Ports[443].Admits("web.example.com", "web.example.com") {
		t.Error("a connection for one listener may ask for another")
	}
	for i, want := range []string{"HTTPRoute 0", "TLSRoute 2", "TLSRoute 2", "TCPRoute 1", "UDPRoute 1"} {
		l := f.Status(nil, "").Listeners[i]
		if got := fmt.Sprint(l.SupportedKinds[0].Kind, " ", l.AttachedRoutes); got != want {
			t.Errorf("listener %s: %s, want %s", l.Name, got, want)
		}
	}
	if len(f.Targets) != 5 {
		t.Errorf("targets %v", f.Targets)
	}
}

func TestStreamStatuses(t *testing.T) {
	at := `parentRefs: [{name: g}]`
	named := at + `, hostnames: ["a.example.com"]`
	for _, c := range []struct{ name, route, kind, want string }{
		{"served", streamRoute("TLSRoute", "r", named, "a"), "Accepted", "True Accepted"},
		{"resolved", streamRoute("TLSRoute", "r", named, "a"), "ResolvedRefs", "True ResolvedRefs"},
		{"no host", streamRoute("TLSRoute", "r", at+`, hostnames: ["a.example.org"]`, "a"), "Accepted", "False NoMatchingListenerHostname"},
		{"wrong kind", streamRoute("TCPRoute", "r", `parentRefs: [{name: g, sectionName: pass}]`, "a"), "Accepted",
			"False NotAllowedByListeners"},
		{"wrong port", streamRoute("TCPRoute", "r", `parentRefs: [{name: g, port: 1}]`, "a"), "Accepted", "False NoMatchingParent"},
		{"another namespace", streamRoute("TCPRoute", "b/r", `parentRefs: [{name: g, namespace: default}]`, "a"), "Accepted",
			"False NotAllowedByListeners"},
		{"no Service", streamRoute("TCPRoute", "r", at, "none"), "ResolvedRefs", "False BackendNotFound"},
		{"no port of UDP", streamRoute("UDPRoute", "r", at, "a"), "ResolvedRefs", "False BackendNotFound"},
		{"a Service of others", streamRoute("UDPRoute", "r", at, "b/a"), "ResolvedRefs", "False RefNotPermitted"},
	} {
		f := builtFrom(t, streamGateway+service("a", "b/a")+c.route)
		for key, parents := range f.streams {
			if got := conditionOf(parents[0].Conditions, c.kind); got != c.want {
				t.Errorf("%s: %s of %v: %s, want %s", c.name, c.kind, key, got, c.want)
			}
		}
		if len(f.streams) != 1 {
			t.Errorf("%s: %v", c.name, f.streams)
		}
	}
}

// A rule without a backend that it may reach rejects its share, and a route that no listener takes takes nothing.
func TestStreamsFailClosed(t *testing.T) {
	for route, want := range map[string]string{
		streamRoute("TCPRoute", "r", `parentRefs: [{name: g}]`, "none"):                             "rejected",
		streamRoute("TCPRoute", "r", `parentRefs: [{name: g}]`, "b/db"):                             "rejected",
		streamRoute("TCPRoute", "b/r", `parentRefs: [{name: g, namespace: default}]`, "db"):         "no route",
		streamRoute("TLSRoute", "r", `parentRefs: [{name: g}], hostnames: ["*.example.com"]`, "db"): "no route",
	} {
		f := builtFrom(t, streamGateway+service("b/db")+route)
		if got := connect(f.Table, 5432, false, ""); got != want {
			t.Errorf("%s\n%s, want %s", route, got, want)
		}
	}
}

// Of two routes for the same connections the older one counts, and both are attached.
func TestOlderStreamCounts(t *testing.T) {
	o := objects(t, streamGateway+service("old", "new")+streamRoute("TCPRoute", "a", `parentRefs: [{name: g}]`, "new")+
		streamRoute("TCPRoute", "z", `parentRefs: [{name: g}]`, "old"))
	for key, s := range o.Streams {
		at := time.Unix(2000, 0)
		if key.Name.Name == "z" {
			at = time.Unix(1000, 0)
		}
		s.Object.SetCreationTimestamp(metav1.NewTime(at))
	}
	f := BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, nil)
	if got := connect(f.Table, 5432, false, ""); got != "old" || f.Status(nil, "").Listeners[3].AttachedRoutes != 2 {
		t.Errorf("%s, %d routes", got, f.Status(nil, "").Listeners[3].AttachedRoutes)
	}
}

// A backend of another namespace is reached while a ReferenceGrant for the kind permits it, and is reported when it is lost.
func TestStreamGrants(t *testing.T) {
	grant := "\n---\nkind: ReferenceGrant\nmetadata: {name: g, namespace: b}\nspec:\n" +
		"  from: [{group: gateway.networking.k8s.io, kind: %s, namespace: default}]\n  to: [{group: \"\", kind: Service}]"
	for kind, want := range map[string]string{"TCPRoute": "db", "HTTPRoute": "rejected", "TLSRoute": "rejected"} {
		o := objects(t, streamGateway+service("b/db")+streamRoute("TCPRoute", "r", `parentRefs: [{name: g}]`, "b/db")+fmt.Sprintf(grant, kind))
		name := svc.Name{Namespace: "default", Name: "g"}
		f := BuildGateway(o, name, nil)
		if got := connect(f.Table, 5432, false, ""); got != want || len(f.Revoked) != b2i(want != "db") {
			t.Errorf("%s: %s, %v", kind, got, f.Revoked)
		}
		clear(o.Grants)
		f = BuildGateway(o, name, f)
		lost := Revocation{kinds.Route{Kind: "TCPRoute", Name: svc.Name{Namespace: "default", Name: "r"}}, svc.Name{Namespace: "b", Name: "db"}}
		if got := connect(f.Table, 5432, false, ""); got != "rejected" || !f.Revoked[lost] || len(f.Targets) != 0 {
			t.Errorf("%s: without the grant %s, %v", kind, got, f.Revoked)
		}
	}
}

// HTTPS and TLS share a port by names, UDP shares it with every protocol, and TCP with none.
func TestConflictedStreams(t *testing.T) {
	f := builtFrom(t, `
kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: a, port: 443, protocol: HTTPS, hostname: a.example.com, tls: {certificateRefs: [{name: c}]}}
  - {name: b, port: 443, protocol: TLS, hostname: a.example.com, tls: {mode: Passthrough}}
  - {name: c, port: 443, protocol: TLS, hostname: c.example.com, tls: {mode: Passthrough}}
  - {name: d, port: 81, protocol: TCP}
  - {name: e, port: 81, protocol: HTTP}
  - {name: f, port: 81, protocol: UDP}
  - {name: g, port: 82, protocol: TLS, tls: {mode: Terminate}}`)
	got := conflicts(f)
	if got != "[HostnameConflict HostnameConflict NoConflicts ProtocolConflict ProtocolConflict NoConflicts NoConflicts]" {
		t.Error(got)
	}
	if got := fmt.Sprint(f.Ports()); got != "map[{81 true}:udp {443 false}:tls]" {
		t.Error(got)
	}
}
