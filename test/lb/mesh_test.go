package lb

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/controller"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// meshBed is a server and agents, with Services whose Pods are on other machines, and clients on the agents'.
type meshBed struct {
	*frontDoor
	pods, nodes map[string]*testbed.Host // clients on nodes that serve routes
	otherNodes  map[string]*testbed.Host // clients, also Pods, on nodes that do not
	resolver    string                   // a file for the Pods
}

// newMeshBed starts an agent in mode nft, iptables, and userspace, with the name of the mode.
func newMeshBed(t *testing.T) *meshBed {
	t.Helper()
	c := newCluster(t, clusterOptions{modes: map[string]string{"iptables": "iptables", "userspace": "userspace"}},
		"nft", "iptables", "userspace")
	m := &meshBed{
		frontDoor: &frontDoor{bed: c.bed}, pods: map[string]*testbed.Host{}, nodes: map[string]*testbed.Host{},
		otherNodes: map[string]*testbed.Host{}, resolver: filepath.Join(t.TempDir(), "resolv.conf"),
	}
	var err error
	m.dynamic, err = dynamic.NewForConfig(c.server.Config)
	c.must(err)
	m.api, err = api.NewClient(c.server.Config)
	c.must(err)
	for _, n := range c.nodes {
		nodes, pods := m.nodes, m.pods
		if n.name == "iptables" {
			nodes, pods = m.otherNodes, m.otherNodes
		}
		nodes["the node "+n.name], pods["a Pod of "+n.name] = n.host, n.host.Pod("caller-"+n.name)
	}
	dns, err := c.client.CoreV1().Services(metav1.NamespaceSystem).Get(t.Context(), svc.DNSService, metav1.GetOptions{})
	c.must(err)
	c.must(os.WriteFile(m.resolver, fmt.Appendf(nil, "nameserver %s\nsearch default.svc.cluster.local\n", dns.Spec.ClusterIP), 0o600))
	awaitClass(t, m.api)
	return m
}

// serve serves a Service on another machine, at an address of each family.
func (m *meshBed) serve(name string) {
	m.Helper()
	host := m.net.Outside(name)
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		m.backend(host, name, netip.AddrPortFrom(host.Addr(f), 8080))
	}
}

// clusterIPs returns the ClusterIPs of a Service.
func (m *meshBed) clusterIPs(name string) (out []netip.Addr) {
	m.Helper()
	s, err := m.client.CoreV1().Services("default").Get(m.Context(), name, metav1.GetOptions{})
	m.must(err)
	for _, a := range s.Spec.ClusterIPs {
		out = append(out, netip.MustParseAddr(a))
	}
	if len(out) != 2 {
		m.Fatalf("Service %s has the ClusterIPs %v, want one of each family", name, out)
	}
	return out
}

// get returns what a client prints that asks as a Pod does, with the cluster's DNS.
func (m *meshBed) get(from *testbed.Host, args ...string) string {
	ctx, cancel := context.WithTimeout(m.Context(), 10*time.Second)
	defer cancel()
	const inPod = `mount --bind "$0" /etc/resolv.conf && exec curl --noproxy '*' -sS -m 5 "$@"`
	out, err := from.Command(ctx, "unshare", append([]string{"--mount", "sh", "-c", inPod, m.resolver}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%s %v", strings.TrimSpace(string(out)), err)
	}
	return strings.TrimSpace(string(out))
}

// wants waits until clients print something.
func (m *meshBed) wants(clients map[string]*testbed.Host, want string, args ...string) {
	m.Helper()
	for name, from := range clients {
		testbed.Until(m, fmt.Sprint(name, " asks ", args), func() error {
			if got := m.get(from, args...); got != want {
				return fmt.Errorf("%q, want %q", got, want)
			}
			return nil
		})
	}
}

// at is the URL of a path at a ClusterIP.
func at(a netip.Addr, path string) string {
	return "http://" + netip.AddrPortFrom(a, 80).String() + path
}

// direct waits until all clients get the answers of a Service without a route.
func (m *meshBed) direct(service string) {
	m.Helper()
	for _, a := range m.clusterIPs(service) {
		for _, clients := range []map[string]*testbed.Host{m.pods, m.nodes, m.otherNodes} {
			m.wants(clients, service+": GET /cart/7 HTTP/1.1", at(a, "/cart/7"))
		}
	}
}

// unserved reports whether a condition says that only this node does not serve the route.
func unserved(c metav1.Condition, node string) bool {
	return c.Type == controller.ConditionUnserved && strings.HasPrefix(c.Message, node+": ") && !strings.Contains(c.Message, ";")
}

// condition waits until a route has a condition.
func (m *meshBed) condition(route svc.Name, what string, is func(metav1.Condition) bool) {
	m.Helper()
	testbed.Until(m, "the route "+what, func() error {
		r, err := m.api.Routes(route.Namespace).Get(m.Context(), route.Name, metav1.GetOptions{})
		if err != nil || len(r.Status.Parents) != 1 {
			return fmt.Errorf("%d parents, %v", len(r.Status.Parents), err)
		}
		if !slices.ContainsFunc(r.Status.Parents[0].Conditions, is) {
			return fmt.Errorf("conditions %+v", r.Status.Parents[0].Conditions)
		}
		return nil
	})
}

// accepted waits until the condition Accepted of a route has a reason.
func (m *meshBed) accepted(route svc.Name, reason string) {
	m.Helper()
	m.condition(route, reason, func(c metav1.Condition) bool {
		return c.Type == string(gwv1.RouteConditionAccepted) && c.Reason == reason
	})
}

const meshServices = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ipFamilyPolicy: PreferDualStack, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: cart}
spec: {ipFamilyPolicy: PreferDualStack, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: circle}
spec: {ipFamilyPolicy: PreferDualStack, ports: [{name: http, port: 80}]}
`

// consumerRoute is of another namespace than the Service.
const consumerRoute = `
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: thief, namespace: kube-public}
spec:
  parentRefs: [{group: "", kind: Service, name: web, namespace: default}]
  rules: [{filters: [{type: RequestRedirect, requestRedirect: {hostname: evil.example.com}}]}]
`

// A Service with a route is served by the node of the client: by path and for both families, for Pods and for the node itself, in
// mode nft and userspace of the node's proxy; the route's condition names the nodes that do not. The Service is as before when the
// route is deleted. No other namespace changes it, and an EndpointSlice that names the ClusterIPs leads no request in circles
// (behaviour 187).
func TestMesh(t *testing.T) {
	inParallel(t)
	m := newMeshBed(t)
	manifests, commands := m.document("gateway.md", "mesh_test.go")
	m.apply(meshServices)
	m.serve("web")
	m.serve("cart")
	m.direct("web")
	m.apply(consumerRoute)
	m.accepted(svc.Name{Namespace: "kube-public", Name: "thief"}, "NotAllowedByListeners")
	m.direct("web")

	web := svc.Name{Namespace: "default", Name: "web"}
	m.apply(manifests)
	m.accepted(web, "Accepted")
	for _, c := range commands {
		m.wants(m.pods, c[1], c[0])
		for _, a := range m.clusterIPs("web") {
			m.wants(m.nodes, c[1], strings.Replace(c[0], "http://web/", at(a, "/"), 1))
			m.wants(m.pods, c[1], strings.Replace(c[0], "http://web/", at(a, "/"), 1))
		}
	}
	m.direct("cart")
	m.condition(web, "names the node that does not serve it", func(c metav1.Condition) bool { return unserved(c, "iptables") })
	for _, a := range m.clusterIPs("web") {
		m.wants(m.otherNodes, "web: GET /cart/7 HTTP/1.1", at(a, "/cart/7"))
		m.slice("circle", "http", "TCP", netip.AddrPortFrom(a, 80))
	}
	m.apply(strings.Replace(manifests, "{name: cart, port: 80}", "{name: circle, port: 80}", 1))
	for _, a := range m.clusterIPs("web") {
		for _, clients := range []map[string]*testbed.Host{m.pods, m.nodes} {
			m.wants(clients, "503", "-o", "/dev/null", "-w", "%{http_code}", at(a, "/cart/7"))
		}
	}

	m.must(m.api.Routes("default").Delete(t.Context(), "web", metav1.DeleteOptions{}))
	m.direct("web")
}
