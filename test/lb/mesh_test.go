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

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// meshBed is a server and an agent, with Services whose Pods are on other machines, and clients on the agent's.
type meshBed struct {
	*frontDoor
	clients map[string]*testbed.Host
}

func newMeshBed(t *testing.T, ofAgents ...string) *meshBed {
	t.Helper()
	c := newClusterWith(t, nil, ofAgents, "n1")
	m := &meshBed{frontDoor: &frontDoor{bed: c.bed, ca: filepath.Join(t.TempDir(), "ca.pem")}}
	var err error
	m.dynamic, err = dynamic.NewForConfig(c.server.Config)
	c.must(err)
	m.api, err = api.NewClient(c.server.Config)
	c.must(err)
	node := c.nodes[0].host
	m.clients = map[string]*testbed.Host{"Pod": node.Pod("caller"), "node": node}
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

const meshServices = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{name: http, port: 80, targetPort: 8080}, {name: other, port: 81, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: cart}
spec: {ports: [{name: http, port: 80, targetPort: 8080}]}
`

const meshRoute = `
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: web}
spec:
  parentRefs: [{group: "", kind: Service, name: web}]
  rules:
  - matches: [{path: {value: /cart}}]
    backendRefs: [{name: cart, port: 80}]
  - backendRefs: [{name: web, port: 80}]
`

// A Service with a route is served by the node of the client: by path, for Pods and for the node itself; its other ports, other
// Services, and the Service after the route has gone are as before (behaviour 187).
func TestMesh(t *testing.T) {
	inParallel(t)
	m := newMeshBed(t)
	m.apply(meshServices)
	m.backend("web")
	m.backend("cart")
	web := m.clusterIP("web")
	m.wants("http://"+web+"/cart/7", "web: GET /cart/7")
	testbed.Until(t, "the kind of routes", func() error {
		_, err := m.api.Classes().Get(t.Context(), gateway.ClassName, metav1.GetOptions{})
		return err
	})
	m.apply(meshRoute)
	m.wants("http://"+web+"/cart/7", "cart: GET /cart/7")
	m.wants("http://"+web+"/", "web: GET /")
	_ = svc.TCP
}
