package gateway

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/svc"
)

// meshOf builds what becomes of the routes of manifests that name a Service of namespace default.
func meshOf(t testing.TB, o *Objects, service string) *Mesh {
	t.Helper()
	o.Meshed = map[svc.Name]map[kinds.Route]bool{}
	note := func(key kinds.Route, refs []gwv1.ParentReference) {
		for _, s := range parents.Services(key.Namespace, refs) {
			if o.Meshed[s] == nil {
				o.Meshed[s] = map[kinds.Route]bool{}
			}
			o.Meshed[s][key] = true
		}
	}
	for n, r := range o.Routes {
		note(kinds.Route{Kind: kinds.HTTPRoute, Name: n}, r.Spec.ParentRefs)
	}
	for n, r := range o.Calls {
		note(kinds.Route{Kind: kinds.GRPCRoute, Name: n}, r.Spec.ParentRefs)
	}
	return BuildMesh(o, svc.Name{Namespace: "default", Name: service}, nil)
}

// accepted returns the conditions of a route for a Service: "Accepted", or the reason and the message why not.
func (m *Mesh) accepted(kind gwv1.Kind, name string) string {
	namespace, name, _ := strings.Cut(name, "/")
	var out []string
	for _, p := range m.Parents(kinds.Route{Kind: kind, Name: svc.Name{Namespace: namespace, Name: name}}) {
		for _, c := range p.Conditions {
			if c.Type == string(gwv1.RouteConditionAccepted) || c.Status != metav1.ConditionTrue {
				out = append(out, strings.TrimSuffix(c.Reason+": "+c.Message, ": "))
			}
		}
	}
	return strings.Join(out, "; ")
}

const meshServices = `
kind: Service
metadata: {name: web, uid: u1}
spec:
  clusterIP: 10.96.0.7
  clusterIPs: [10.96.0.7, "fd00::7"]
  ports:
  - {port: 80}
  - {name: http-alt, port: 8080}
  - {name: api, port: 8081, appProtocol: kubernetes.io/h2c}
  - {name: https, port: 443}
  - {name: secure, port: 8443, appProtocol: https}
  - {name: tls-api, port: 444}
  - {name: https-plain, port: 445, appProtocol: http}
  - {name: mysql, port: 3306}
  - {name: dns, port: 53, protocol: UDP}
---
kind: Service
metadata: {name: cart}
spec: {clusterIP: 10.96.0.8, clusterIPs: [10.96.0.8], internalTrafficPolicy: Local, ports: [{port: 80}]}
---
kind: Service
metadata: {name: kubernetes}
spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{name: http, port: 80}, {name: api, port: 6443}]}
---
kind: Service
metadata: {name: headless}
spec: {clusterIP: None, clusterIPs: [None], ports: [{port: 80}]}
---
kind: Service
metadata: {name: elsewhere}
spec: {type: ExternalName, externalName: example.com, ports: [{port: 80}]}
`

// meshRoute is an HTTPRoute of a namespace with a reference, as YAML.
func meshRoute(namespace, parent string) string {
	return meshServices + `---
kind: HTTPRoute
metadata: {name: r, namespace: ` + namespace + `}
spec:
  parentRefs: [{group: "", kind: Service, ` + parent + `}]
  hostnames: [ignored.example.com]
  rules:
  - matches: [{path: {value: /cart}}]
    backendRefs: [{name: cart, port: 80}]
  - backendRefs: [{name: web, port: 80}]
`
}

// A route takes the ports that it names, or those of HTTP, of a Service of its own namespace that has a ClusterIP.
func TestMeshPorts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ namespace, parent, service, ports, why string }{
		{"default", "name: web", "web", "[80 445 8080 8081]", "Accepted"},
		{"default", "name: web, port: 8080", "web", "[8080]", "Accepted"},
		{"default", "name: web, port: 3306", "web", "[3306]", "Accepted"}, // by its number also what has another name
		{"default", "name: web, sectionName: api", "web", "[8081]", "Accepted"},
		{"default", "name: web, sectionName: api, port: 80", "web", "[]", "NoMatchingParent: the Service has no port of TCP"},
		{"default", "name: web, port: 81", "web", "[]", "NoMatchingParent: the Service has no port of TCP"},
		{"default", "name: web, port: 53", "web", "[]", "NoMatchingParent: the Service has no port of TCP"},
		{"default", "name: web, port: 8443", "web", "[]", "UnsupportedValue: port 8443: connections of appProtocol https are not read"},
		{"default", "name: web, port: 443", "web", "[]", "UnsupportedValue: port 443: its name https is of TLS, which is not read"},
		{"default", "name: web, sectionName: tls-api", "web", "[]", "UnsupportedValue: port 444: its name tls-api is of TLS"},
		{"default", "name: web, port: 445", "web", "[445]", "Accepted"},
		{"default", "name: kubernetes", "kubernetes", "[]", "UnsupportedValue: Service default/kubernetes is the API server's"},
		{"default", "name: kubernetes, port: 6443", "kubernetes", "[]", "UnsupportedValue: Service default/kubernetes is the API server's"},
		{"default", "name: headless", "headless", "[]", "UnsupportedValue: Service default/headless has no ClusterIP"},
		{"default", "name: elsewhere", "elsewhere", "[]", "UnsupportedValue: Service default/elsewhere has no ClusterIP"},
		{"default", "name: missing", "missing", "[]", "NoMatchingParent: there is no Service default/missing"},
		{"thief", "name: web, namespace: default", "web", "[]", "NotAllowedByListeners: only routes of the Service's own namespace"},
	} {
		m := meshOf(t, objects(t, meshRoute(c.namespace, c.parent)), c.service)
		if got := fmt.Sprint(slices.Sorted(maps.Keys(m.Table.Ports))); got != c.ports {
			t.Errorf("%s: ports %s, want %s", c.parent, got, c.ports)
		}
		if got := m.accepted(kinds.HTTPRoute, c.namespace+"/r"); !strings.HasPrefix(got, c.why) {
			t.Errorf("%s: %q, want %q", c.parent, got, c.why)
		}
		if serves := c.ports != "[]"; m.Serves() != serves || (len(m.Targets) > 0) != serves {
			t.Errorf("%s: serves %t with targets %v", c.parent, m.Serves(), m.Targets)
		}
	}
}

// Requests are led by their path whatever their host is, also back to the Service itself; what no rule takes has no route. The
// backend's internalTrafficPolicy holds.
func TestMeshTable(t *testing.T) {
	t.Parallel()
	o := objects(t, meshRoute("default", "name: web, port: 80"))
	m := meshOf(t, o, "web")
	if fmt.Sprintf("%v %s", m.Addrs, m.Key) != "[10.96.0.7 fd00::7] u1" {
		t.Errorf("addresses %v, key %s", m.Addrs, m.Key)
	}
	for path, want := range map[string]string{"/cart/7": "cart true", "/": "web false"} {
		rule, _, verdict := m.Table.Ports[80].Find(&Request{Host: "anything", Path: path, Method: "GET"})
		if verdict != Routed {
			t.Errorf("%s: verdict %d", path, verdict)
			continue
		}
		w := rule.Pick(0)
		if got := fmt.Sprint(w.Backend.Name.Name, " ", w.Backend.Local); got != want {
			t.Errorf("%s goes to %s, want %s", path, got, want)
		}
		if !slices.Contains(m.Targets, rule.Target(w)) {
			t.Errorf("%s: %v is no target", path, rule.Target(w))
		}
	}
	if !m.Refers(svc.Name{Namespace: "default", Name: "cart"}) || !m.Refers(svc.Name{Namespace: "default", Name: "web"}) ||
		m.Refers(svc.Name{Namespace: "default", Name: "headless"}) {
		t.Error("it does not depend only on its Services")
	}
	again := BuildMesh(o, svc.Name{Namespace: "default", Name: "web"}, m)
	if a, b := m.Table.Ports[80].Listeners[0], again.Table.Ports[80].Listeners[0]; a.hosts.Get("") != b.hosts.Get("") {
		t.Error("a table without changes is compiled again")
	}
}

// An HTTPRoute and a GRPCRoute do not share a port: the older one has it. Both can have one Service.
func TestMeshKinds(t *testing.T) {
	t.Parallel()
	text := strings.Replace(meshRoute("default", "name: web, port: 80"), "name: r,", `name: r, creationTimestamp: "2026-01-02T00:00:00Z",`, 1)
	for port, want := range map[string]string{
		"80": "HostnameConflict: port 80: an older route of the other kind, of HTTPRoute and GRPCRoute, has it", "8081": "Accepted",
	} {
		m := meshOf(t, objects(t, text+`---
kind: GRPCRoute
metadata: {name: g, namespace: default, creationTimestamp: "2026-01-03T00:00:00Z"}
spec:
  parentRefs: [{group: "", kind: Service, name: web, port: `+port+`}]
  rules: [{backendRefs: [{name: web, port: 8081}]}]
`), "web")
		if got := m.accepted(kinds.GRPCRoute, "default/g"); got != want {
			t.Errorf("port %s: %q, want %q", port, got, want)
		}
		if got := m.accepted(kinds.HTTPRoute, "default/r"); got != "Accepted" {
			t.Errorf("the older one: %q", got)
		}
	}
}

// What a node asks of a Service decides whether two are the same.
func TestServiceEqual(t *testing.T) {
	t.Parallel()
	of := func(change func(*corev1.Service)) *services.Service {
		s := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Port: 80}}}}
		change(s)
		return services.Of(s)
	}
	same := of(func(*corev1.Service) {})
	if !same.Equal(of(func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "x"} })) {
		t.Error("a selector counts")
	}
	for what, change := range map[string]func(*corev1.Service){
		"ClusterIPs":            func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.96.0.2"} },
		"internalTrafficPolicy": func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal) },
		"UID":                   func(s *corev1.Service) { s.UID = "other" },
	} {
		if same.Equal(of(change)) {
			t.Errorf("%s does not count", what)
		}
	}
}

// A backend with a BackendTLSPolicy is no target, and the route's status tells why. Others are.
func TestMeshPolicies(t *testing.T) {
	t.Parallel()
	m := meshOf(t, objects(t, meshRoute("default", "name: web, port: 80")+`---
kind: BackendTLSPolicy
metadata: {name: p}
spec:
  targetRefs: [{group: "", kind: Service, name: cart}]
  validation: {hostname: cart.example.com, wellKnownCACertificates: System}
`), "web")
	if len(m.Targets) != 1 || m.Targets[0].Name.Name != "web" {
		t.Errorf("targets are %v", m.Targets)
	}
	const want = "Accepted; UnsupportedProtocol: rules[0].backendRefs[0]: Service default/cart has a BackendTLSPolicy, and none counts " +
		"for routes at a Service: it gets no requests"
	if got := m.accepted(kinds.HTTPRoute, "default/r"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
