package lb

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/controller"
	"github.com/fairlead/fairlead/internal/testbed"
)

// meshBed is a server and agents, with Services whose Pods are on other machines, and clients on the agents'.
type meshBed struct {
	*frontDoor
	clients map[string]*testbed.Host
	unled   map[string]*testbed.Host // on nodes that do not serve routes
}

// newMeshBed starts an agent for each name.
func newMeshBed(t *testing.T, names ...string) *meshBed {
	t.Helper()
	c := newCluster(t, names...)
	m := &meshBed{frontDoor: &frontDoor{bed: c.bed, ca: filepath.Join(t.TempDir(), "ca.pem")}, clients: map[string]*testbed.Host{},
		unled: map[string]*testbed.Host{}}
	var err error
	m.dynamic, err = dynamic.NewForConfig(c.server.Config)
	c.must(err)
	m.api, err = api.NewClient(c.server.Config)
	c.must(err)
	for _, n := range c.nodes {
		to := m.clients
		if n.name == "iptables" {
			to = m.unled
		}
		to["the node "+n.name], to["a Pod of "+n.name] = n.host, n.host.Pod("caller-"+n.name)
	}
	testbed.Until(t, "the GatewayClass", func() error {
		_, err := m.api.Classes().Get(t.Context(), gateway.ClassName, metav1.GetOptions{})
		return err
	})
	return m
}

// backend serves port 80 of a Service on a machine of its own.
func (m *meshBed) backend(name string) {
	m.Helper()
	host := m.net.Outside(name)
	var l net.Listener
	host.Do(func() { l = host.ListenTCP(netip.AddrPortFrom(host.Addr4(), 8080)) })
	testbed.Serve(m, l, tells(name))
	m.slice(name, "http", "TCP", netip.AddrPortFrom(host.Addr4(), 8080))
}

// clusterIP returns the first ClusterIP of a Service.
func (m *meshBed) clusterIP(name string) string {
	m.Helper()
	s, err := m.client.CoreV1().Services("default").Get(m.Context(), name, metav1.GetOptions{})
	m.must(err)
	return s.Spec.ClusterIP
}

// get returns what a client gets for a URL.
func (m *meshBed) get(from *testbed.Host, args ...string) string {
	ctx, cancel := context.WithTimeout(m.Context(), 10*time.Second)
	defer cancel()
	out, err := from.Command(ctx, "curl", append([]string{"--noproxy", "*", "-sS", "-m", "5"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%s %v", strings.TrimSpace(string(out)), err)
	}
	return strings.TrimSpace(string(out))
}

// wants waits until both clients get an answer that begins so.
func (m *meshBed) wants(url, want string) {
	m.Helper()
	for name, from := range m.clients {
		testbed.Until(m, name+" asks "+url, func() error {
			if got := m.get(from, url); !strings.HasPrefix(got, want) {
				return fmt.Errorf("%q, want %q", got, want)
			}
			return nil
		})
	}
}

// plain checks that clients on nodes that do not serve routes get an answer that begins so, as ever.
func (m *meshBed) plain(url, want string) {
	m.Helper()
	for name, from := range m.unled {
		if got := m.get(from, url); !strings.HasPrefix(got, want) {
			m.Errorf("%s asks %s: %q, want %q", name, url, got, want)
		}
	}
}

// unserved waits until a route says which node does not serve it.
func (m *meshBed) unserved(route, node string) {
	m.Helper()
	testbed.Until(m, "the route to name "+node, func() error {
		r, err := m.api.Routes("default").Get(m.Context(), route, metav1.GetOptions{})
		if err != nil || len(r.Status.Parents) != 1 {
			return fmt.Errorf("%d parents, %v", len(r.Status.Parents), err)
		}
		for _, c := range r.Status.Parents[0].Conditions {
			if c.Type == controller.ConditionUnserved && strings.HasPrefix(c.Message, node+": ") && !strings.Contains(c.Message, ";") {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", r.Status.Parents[0].Conditions)
	})
}

// accepted waits until the condition Accepted of a route has a reason.
func (m *meshBed) accepted(namespace, route, reason string) {
	m.Helper()
	testbed.Until(m, "the route to be "+reason, func() error {
		r, err := m.api.Routes(namespace).Get(m.Context(), route, metav1.GetOptions{})
		if err != nil || len(r.Status.Parents) != 1 {
			return fmt.Errorf("%d parents, %v", len(r.Status.Parents), err)
		}
		for _, c := range r.Status.Parents[0].Conditions {
			if c.Type == string(gwv1.RouteConditionAccepted) && c.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", r.Status.Parents[0].Conditions)
	})
}

const meshServices = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: cart}
spec: {ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: circle}
spec: {ports: [{name: http, port: 80}]}
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

// A Service with a route is served by the node of the client: by path, for Pods and for the node itself, in mode nft and
// userspace of the node's proxy; the route tells which nodes cannot. The Service is as before once the route has gone. No other
// namespace changes it, and an EndpointSlice that names the ClusterIP itself leads no request in circles (behaviour 187).
func TestMesh(t *testing.T) {
	inParallel(t)
	m := newMeshBed(t, "n1", "iptables", "userspace")
	manifests, commands := m.document("gateway.md", "mesh_test.go")
	m.apply(meshServices)
	m.backend("web")
	m.backend("cart")
	web := m.clusterIP("web")
	m.wants("http://"+web+"/cart/7", "web: GET /cart/7")
	m.apply(consumerRoute)
	m.accepted("kube-public", "thief", "NotAllowedByListeners")
	m.wants("http://"+web+"/cart/7", "web: GET /cart/7")

	m.apply(manifests)
	m.accepted("default", "web", "Accepted")
	for _, c := range commands {
		url := c[0]
		m.wants(strings.Replace(url, "http://web", "http://"+web, 1), c[1])
	}
	m.wants("http://"+m.clusterIP("cart")+"/cart/7", "cart: GET /cart/7")
	m.unserved("web", "iptables")
	m.plain("http://"+web+"/cart/7", "web: GET /cart/7")
	m.slice("circle", "http", "TCP", netip.AddrPortFrom(netip.MustParseAddr(web), 80))
	m.apply(strings.Replace(manifests, "{name: cart, port: 80}", "{name: circle, port: 80}", 1))
	for name, from := range m.clients {
		testbed.Until(t, name+" gets no answer from a circle", func() error {
			if got := m.get(from, "-o", "/dev/null", "-w", "%{http_code}", "http://"+web+"/cart/7"); got != "503" {
				return fmt.Errorf("%q", got)
			}
			return nil
		})
	}

	m.must(m.api.Routes("default").Delete(t.Context(), "web", metav1.DeleteOptions{}))
	m.wants("http://"+web+"/cart/7", "web: GET /cart/7")
}
