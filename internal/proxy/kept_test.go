package proxy

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// onNode is a Proxy that runs on the node of a network, in zone z.
type onNode struct {
	*flows.Env
	t      *testing.T
	client *fake.Clientset
}

// runOnNode starts a Proxy with nothing to do; relayed is Options.Relayed.
func runOnNode(t *testing.T, create flows.Factory, relayed bool) *onNode {
	t.Helper()
	e := flows.NewEnv(t, create)
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "node", Labels: map[string]string{corev1.LabelTopologyZone: "z"},
	}})
	startProxy(t, e.Node, Options{
		Client: client, NodeName: "node", Dataplane: e.Dataplane, Relayed: relayed,
		Conntrack: func() (Tracker, error) { return conntrack.Dial() },
	})
	return &onNode{e, t, client}
}

// service makes a Service with one port, 80, without endpoints, and returns where
// it is.
func (n *onNode) service(name, vip string, p svc.Protocol) netip.AddrPort {
	n.t.Helper()
	proto := corev1.Protocol(p.String())
	meta := metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}
	_, err := n.client.CoreV1().Services("default").Create(n.t.Context(), &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		ClusterIP: vip, ClusterIPs: []string{vip}, Ports: []corev1.ServicePort{{Protocol: proto, Port: 80}},
	}}, metav1.CreateOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	_, err = n.client.DiscoveryV1().EndpointSlices("default").Create(n.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: new(""), Protocol: &proto, Port: new(int32(9376))}},
	}, metav1.CreateOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return netip.AddrPortFrom(netip.MustParseAddr(vip), 80)
}

// at is the ready endpoint on a host.
func (n *onNode) at(host string) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{n.Host(host).Addr4().String()}}
}

// endpoints replaces those of a Service.
func (n *onNode) endpoints(name string, all ...discoveryv1.Endpoint) {
	n.t.Helper()
	slices := n.client.DiscoveryV1().EndpointSlices("default")
	s, err := slices.Get(n.t.Context(), name, metav1.GetOptions{})
	if err == nil {
		s = s.DeepCopy()
		s.Endpoints = all
		_, err = slices.Update(n.t.Context(), s, metav1.UpdateOptions{})
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// dial opens a UDP socket of pod c.
func (n *onNode) dial(to netip.AddrPort) net.Conn {
	n.t.Helper()
	c, err := n.Host("c").Dial(n.t.Context(), svc.UDP, to)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = c.Close() })
	return c
}

const (
	// oneTry is how long a datagram that is sent again may wait for its answer.
	oneTry = 250 * time.Millisecond
	// onlyTry is that of one that is not.
	onlyTry = 30 * time.Second
)

// reaches returns an error unless a datagram over c is answered by an endpoint.
func reaches(c net.Conn, name string, wait time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	got, err := testbed.AskOn(c)
	if err == nil && got.Name != name {
		err = fmt.Errorf("%s answers, want %s", got.Name, name)
	}
	return err
}

// new waits until a new UDP socket reaches an endpoint.
func (n *onNode) new(to netip.AddrPort, name string) {
	n.t.Helper()
	testbed.Until(n.t, "a new socket at "+name, func() error { return reaches(n.dial(to), name, oneTry) })
}

// relayedMode reports whether a mode of modes answers clients itself.
func relayedMode(name string) bool { return name == "userspace" }

// A UDP flow stays with its endpoint as long as that serves, whatever new
// connections do, and goes when the endpoint does.
func TestFlowsStayWithServingEndpoints(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			n := runOnNode(t, m.create, relayedMode(m.name))
			web, marker := n.service("web", "10.96.0.10", svc.UDP), n.service("marker", "10.96.0.11", svc.UDP)
			n.endpoints("web", n.at("a"))
			n.new(web, "a")
			flow := n.dial(web)
			stays := func(when string) {
				t.Helper()
				n.new(web, "b")
				// Flows are removed in the order of changes: once one of another
				// Service has followed its endpoint, all before is done.
				n.endpoints("marker", n.at("a"))
				n.new(marker, "a")
				other := n.dial(marker)
				if err := reaches(other, "a", onlyTry); err != nil {
					t.Fatal(err)
				}
				n.endpoints("marker", n.at("b"))
				testbed.Until(t, "a flow of another Service at b", func() error { return reaches(other, "b", oneTry) })
				if err := reaches(flow, "a", onlyTry); err != nil {
					t.Errorf("%s: %v", when, err)
				}
			}
			if err := reaches(flow, "a", onlyTry); err != nil {
				t.Fatal(err)
			}
			a, b := n.at("a"), n.at("b")
			a.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
			n.endpoints("web", a, b)
			stays("terminating but serving")

			a, b = n.at("a"), n.at("b")
			a.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "another"}}}
			b.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}}}
			n.endpoints("web", a, b)
			stays("its hint names another zone")

			a = n.at("a")
			a.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(true)}
			n.endpoints("web", a, n.at("b"))
			testbed.Until(t, "the flow at b, since a does not serve", func() error { return reaches(flow, "b", oneTry) })
			n.endpoints("web", n.at("a"))
			testbed.Until(t, "the flow at a, since b is gone", func() error { return reaches(flow, "a", oneTry) })
		})
	}
}

// A TCP client whose endpoint does not answer gets another one with its next try,
// as soon as that endpoint is removed.
func TestConnectingClientLeavesDeadEndpoint(t *testing.T) {
	for _, m := range modes {
		if relayedMode(m.name) {
			continue // it tries another endpoint by itself
		}
		t.Run(m.name, func(t *testing.T) {
			n := runOnNode(t, m.create, false)
			web := n.service("web", "10.96.0.10", svc.TCP)
			rules := "add table ip deaf; add chain ip deaf in { type filter hook input priority 0; }; add rule ip deaf in tcp flags syn drop"
			if out, err := n.Host("b").Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
				t.Fatalf("nft: %v\n%s", err, out)
			}
			n.endpoints("web", n.at("a"))
			testbed.Until(t, "the Service", func() error {
				_, err := n.Host("c").Ask(t.Context(), svc.TCP, web)
				return err
			})
			n.Forget(t)
			n.endpoints("web", n.at("b"))
			type answer struct {
				testbed.Answer
				err error
			}
			answered := make(chan answer, 1)
			testbed.Until(t, "a client that tries the dead endpoint", func() error {
				select {
				case <-answered: // of an earlier try, by a
				default:
				}
				go func() {
					got, err := n.Host("c").Ask(t.Context(), svc.TCP, web)
					answered <- answer{got, err}
				}()
				return n.tries(web, "b")
			})
			n.endpoints("web", n.at("a"))
			if got := <-answered; got.err != nil || got.Name != "a" {
				t.Errorf("after the dead endpoint was removed: %+v, %v, want a", got.Answer, got.err)
			}
		})
	}
}

// tries returns an error unless the node tracks an unanswered connection to an
// endpoint.
func (n *onNode) tries(to netip.AddrPort, name string) error {
	found := false
	var err error
	n.Node.Do(func() {
		var c *conntrack.Conn
		if c, err = conntrack.Dial(); err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		_, err = c.Sweep(n.t.Context(), conntrack.Scope{Unreplied: true}, func(e conntrack.Entry) bool {
			found = found || e.OrigDst == to && !e.Replied && e.ReplySrc.Addr() == n.Host(name).Addr4()
			return false
		})
	})
	if err == nil && !found {
		err = fmt.Errorf("no connection to %s waits for %s", to, name)
	}
	return err
}
