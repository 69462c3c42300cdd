package capture

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

func node(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// slice has one endpoint, a Pod of a node.
func slice(name, manager, pod, on, addr string, port int32) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelManagedBy: manager}},
		Ports:      []discoveryv1.EndpointPort{{Port: &port}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{addr}, NodeName: &on,
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "kube-system", Name: pod}}},
	}
}

// What two slices, or two nodes, name stays until both are gone.
func TestPeersNamedTwice(t *testing.T) {
	p := NewPeers("node")
	none := func(*discoveryv1.EndpointSlice) {}
	slices := p.Slices(reflector.Sink[*discoveryv1.EndpointSlice]{Set: none, Delete: none})
	for range 2 { // the second time in place of the first
		slices.Set(slice("one", svc.ManagedBySelector, "remote", "far", "10.244.1.9", 80))
		slices.Set(slice("two", svc.ManagedBySelector, "remote", "far", "10.244.1.9", 80))
	}
	nodes := p.Nodes()
	nodes.Set(node("far", "192.0.2.2"))
	nodes.Set(node("renamed", "192.0.2.2"))
	slices.Delete(slice("two", svc.ManagedBySelector, "remote", "far", "10.244.1.9", 80))
	nodes.Delete(node("renamed"))
	if got, _ := p.Of(ap("10.244.1.9:80")); got.Pod != "remote" {
		t.Errorf("an endpoint of a slice that is left is %+v", got)
	}
	if got, _ := p.Of(ap("192.0.2.2:1")); got != hubble.RemoteNode {
		t.Errorf("an address of a node that is left is %+v", got)
	}
	slices.Delete(slice("one", svc.ManagedBySelector, "remote", "far", "10.244.1.9", 80))
	nodes.Delete(node("far"))
	if len(p.endpoints)+len(p.slices)+len(p.hosts)+len(p.nodes) > 0 {
		t.Errorf("after all are gone %v, %v, %v and %v are left", p.endpoints, p.slices, p.hosts, p.nodes)
	}
}

func TestPeers(t *testing.T) {
	p := NewPeers("node")
	passed := 0
	count := func(*discoveryv1.EndpointSlice) { passed++ }
	slices := p.Slices(reflector.Sink[*discoveryv1.EndpointSlice]{
		Set: count, Delete: count, Replace: func(all []*discoveryv1.EndpointSlice) { passed += len(all) },
	})
	check := func(what, at string, want *hubble.Peer, pod string, local bool) {
		t.Helper()
		got, here := p.Of(ap(at))
		if here != local || got.Pod != pod || want != nil && got != want || pod != "" && got.Namespace != "shop" {
			t.Errorf("%s: at %s is %+v, local %t", what, at, got, here)
		}
	}
	nodes, pods := p.Nodes(), p.Pods()
	nodes.Replace([]*corev1.Node{node("node", "192.0.2.1", "2001:db8::1"), node("far", "192.0.2.2")})
	check("this node", "[2001:db8::1]:1", hubble.Host, "", true)
	ranged := node("far", "192.0.2.2")
	ranged.Spec.PodCIDRs = []string{"10.244.1.0/24"}
	nodes.Set(ranged)
	check("the node's address among its Pods'", "10.244.1.1:1", hubble.RemoteNode, "", false)
	check("another node", "192.0.2.2:1", hubble.RemoteNode, "", false)
	check("loopback", "127.0.0.1:1", hubble.Host, "", true)
	check("nobody", "10.244.0.5:1", hubble.World, "", false)

	old := pod("old", "a", 1, "10.244.0.5", "fd00::5")
	pods.Set(old)
	check("a Pod", "[fd00::5]:9", nil, "old", true)
	pods.Set(pod("new", "b", 2, "10.244.0.5"))
	check("a Pod with the address of an older one", "10.244.0.5:1", nil, "new", true)
	pods.Set(old) // it ends slowly
	pods.Delete(old)
	check("a Pod whose predecessor has gone", "10.244.0.5:1", nil, "new", true)
	check("an address that was given back", "[fd00::5]:9", hubble.World, "", false)
	done := pod("new", "b", 2, "10.244.0.5")
	done.Status.Phase = corev1.PodSucceeded
	pods.Set(done)
	check("a Pod that has ended", "10.244.0.5:1", hubble.World, "", false)

	// A registered program has its node's address, and is known by its port.
	program := pod("program", "c", 3, "192.0.2.1")
	pods.Set(program)
	slices.Set(slice("s", svc.ManagedBySelector, "program", "node", "192.0.2.1", 5432))
	check("a registered program", "192.0.2.1:5432", nil, "program", true)
	if got, _ := p.Of(ap("192.0.2.1:5432")); got.Partial || len(got.Labels) != 2 {
		t.Errorf("a registered program without its labels: %+v", got)
	}
	check("the node beside it", "192.0.2.1:22", hubble.Host, "", true)

	slices.Set(slice("r", svc.ManagedBySelector, "remote", "far", "10.244.1.9", 80))
	check("a Pod of another node", "10.244.1.9:80", nil, "remote", false)
	check("another port of it", "10.244.1.9:81", hubble.World, "", false)
	// A tenant writes a slice: neither its reference nor its address is believed.
	slices.Set(slice("t", "me", "forged", "far", "10.244.1.9", 80))
	slices.Set(slice("u", "me", "forged", "far", "10.244.1.77", 80))
	check("a Pod that a tenant claims", "10.244.1.9:80", nil, "remote", false)
	check("an address that a tenant claims", "10.244.1.77:80", hubble.World, "", false)
	slices.Delete(slice("r", svc.ManagedBySelector, "remote", "far", "10.244.1.9", 80))
	check("an endpoint that has gone", "10.244.1.9:80", hubble.World, "", false)
	slices.Replace(nil)
	check("a program without a Service", "192.0.2.1:5432", hubble.Host, "", true)
	if passed != 5 {
		t.Errorf("%d slices passed on, want 5", passed)
	}
	nodes.Delete(node("far"))
	pods.Replace(nil)
	check("a node that has gone", "192.0.2.2:1", hubble.World, "", false)
}
