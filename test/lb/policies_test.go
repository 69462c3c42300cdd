package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// sticky is a change of a Service.
func sticky(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP }

// local is a change of a Service.
func local(s *corev1.Service) {
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

// noNodePorts is a change of a Service.
func noNodePorts(s *corev1.Service) { s.Spec.AllocateLoadBalancerNodePorts = new(false) }

// forwarded is a change of a Service.
func forwarded(s *corev1.Service) {
	s.Annotations = map[string]string{svc.ForwardingAnnotation: svc.ForwardingDirect}
}

// checkForwarded fails the test unless all Pods answer the machine in the end, or only one, and all of them see it.
func (c *cluster) checkForwarded(from *testbed.Host, vip netip.Addr, sticky bool, pods int) {
	c.Helper()
	testbed.Until(c, fmt.Sprintf("answers of %d Pods, sticky %v", pods, sticky), func() error {
		by := map[string]bool{}
		for range 40 {
			a := c.ask(from, vip)
			by[a.Name] = true
			if a.Client.Addr() != from.Addr4() {
				return fmt.Errorf("%s sees %s", a.Name, a.Client)
			}
		}
		if sticky && len(by) != 1 || !sticky && len(by) != pods {
			return fmt.Errorf("answers of %v", by)
		}
		return nil
	})
}

// change changes a Service.
func (c *cluster) change(name string, change func(*corev1.Service)) {
	c.Helper()
	s, err := c.client.CoreV1().Services("default").Get(c.Context(), name, metav1.GetOptions{})
	c.must(err)
	change(s)
	_, err = c.client.CoreV1().Services("default").Update(c.Context(), s, metav1.UpdateOptions{})
	c.must(err)
}

// serve makes a Service with some Pods behind it, and returns its address.
func (c *cluster) serve(name string, pods []*testbed.Host, change ...func(*corev1.Service)) netip.Addr {
	c.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for _, p := range pods {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{p.Addr4().String()}, NodeName: new(p.Node().Name())})
	}
	_, err := c.client.DiscoveryV1().EndpointSlices("default").Create(c.Context(), slice, metav1.CreateOptions{})
	c.must(err)
	return c.service(name, change...)[0]
}

// unready makes some of a Service's Pods unready, by their index.
func (c *cluster) unready(name string, pods ...int) {
	c.Helper()
	api := c.client.DiscoveryV1().EndpointSlices("default")
	slice, err := api.Get(c.Context(), name+"-1", metav1.GetOptions{})
	c.must(err)
	for _, i := range pods {
		slice.Endpoints[i].Conditions.Ready = new(false)
	}
	_, err = api.Update(c.Context(), slice, metav1.UpdateOptions{})
	c.must(err)
}

// ask asks a Service from a machine until it answers.
func (c *cluster) ask(from *testbed.Host, vip netip.Addr) (a testbed.Answer) {
	c.Helper()
	testbed.Until(c, fmt.Sprintf("an answer of %s to %s", vip, from.Name()), func() (err error) {
		ctx, cancel := context.WithTimeout(c.Context(), 5*time.Second)
		defer cancel()
		a, err = from.Ask(ctx, svc.TCP, netip.AddrPortFrom(vip, 80))
		return err
	})
	return a
}

// checkSticky fails the test unless all connections of the client go to one Pod.
func (c *cluster) checkSticky(vip netip.Addr) {
	c.Helper()
	first := c.ask(c.wire.Host(), vip).Name
	for range 15 {
		if a := c.ask(c.wire.Host(), vip); a.Name != first {
			c.Errorf("%s answers after %s", a.Name, first)
		}
	}
}

// checkReset fails the test unless a connection is reset when the address moves while it is open: the next node does
// not know it, and takes its next packet to be the first of another one (nf_conntrack_tcp_loose), which no Pod has.
// A client so learns at once that it has to connect again.
func (c *cluster) checkReset(vip netip.Addr, from, to *node) {
	c.Helper()
	open, err := c.wire.Host().Dial(c.Context(), svc.TCP, netip.AddrPortFrom(vip, 80))
	c.must(err)
	defer open.Close()
	_, err = testbed.AskOn(open)
	c.must(err)
	to.label(corev1.LabelNodeExcludeBalancers, false)
	from.label(corev1.LabelNodeExcludeBalancers, true)
	c.owner(vip, to)
	testbed.Until(c, "the open connection to end", func() error {
		if _, err = open.Write([]byte("?")); err == nil {
			_, err = open.Read(make([]byte, 1))
		}
		if err == nil {
			return errors.New("it is answered")
		}
		return nil
	})
	if !errors.Is(err, syscall.ECONNRESET) {
		c.Errorf("the open connection ended with %v, want a reset", err)
	}
}

// What externalTrafficPolicy does for a load balancer (behaviour 181), whether the nodes or the Pods
// stand behind it.
func TestPoliciesOfLoadBalancers(t *testing.T) {
	inParallel(t)
	c := newCluster(t, clusterOptions{}, "n1", "n2")
	n1, n2 := c.nodes[0], c.nodes[1]
	client := c.wire.Host()
	a1, a2, b1 := n1.host.Pod("a1"), n1.host.Pod("a2"), n2.host.Pod("b1")
	for _, p := range []*testbed.Host{a1, a2, b1} {
		p.Serve(svc.TCP, 8080)
	}
	inside := []*testbed.Host{n1.host, n2.host, n1.host.Pod("c1"), n2.host.Pod("c2")}

	// Flannel, Local (behaviour 182): nodes with endpoints alone stand behind it, the client's
	// address is kept, sessions are sticky. The nodes and Pods of all nodes reach it, since
	// their connections need no node between.
	t.Run("nodes behind it, policy Local", func(t *testing.T) {
		vip := c.serve("local", []*testbed.Host{a1, a2}, local, sticky)
		c.owner(vip, n1)
		if a := c.ask(client, vip); a.Client.Addr() != client.Addr4() || a.Name == "b1" {
			t.Errorf("%s sees the client as %s", a.Name, a.Client)
		}
		c.checkSticky(vip)
		for _, from := range inside {
			c.ask(from, vip)
		}
		n1.label(corev1.LabelNodeExcludeBalancers, true)
		c.silence(vip) // n2 has no endpoint
		n1.label(corev1.LabelNodeExcludeBalancers, false)
		c.owner(vip, n1)
	})

	// With a Pod on each node, as a DaemonSet has them, every node may be the one that stands
	// behind it (behaviour 104).
	t.Run("policy Local with Pods everywhere", func(t *testing.T) {
		vip := c.serve("everywhere", []*testbed.Host{a1, b1}, local)
		for _, n := range c.nodes {
			other := c.others(n)[0]
			other.label(corev1.LabelNodeExcludeBalancers, true)
			c.owner(vip, n)
			if a, want := c.ask(client, vip), map[*node]string{n1: "a1", n2: "b1"}[n]; a.Name != want || a.Client.Addr() != client.Addr4() {
				t.Errorf("%s answers through %s and sees %s, want %s", a.Name, n.name, a.Client, want)
			}
			other.label(corev1.LabelNodeExcludeBalancers, false)
		}
	})

	// Flannel, Cluster (behaviour 183): all nodes stand behind it, those without an endpoint too,
	// and each spreads over all Pods; the client's address is hidden; nodes and Pods reach
	// it. Sessions are sticky where the Service wants that. Connections are spread over the Pods
	// (behaviours 98, 178).
	t.Run("nodes behind it, policy Cluster", func(t *testing.T) {
		vip := c.serve("cluster", []*testbed.Host{a1, b1})
		single := c.serve("single", []*testbed.Host{b1})
		stuck := c.serve("stuck", []*testbed.Host{a1, a2, b1}, sticky)
		for _, n := range c.nodes {
			other := c.others(n)[0]
			other.label(corev1.LabelNodeExcludeBalancers, true)
			c.owner(vip, n)
			c.owner(single, n)
			c.owner(stuck, n)
			by := map[string]bool{}
			for range 64 { // 2 to the power of 63 to one against one Pod alone
				a := c.ask(client, vip)
				by[a.Name] = true
				if a.Client.Addr() == client.Addr4() {
					t.Errorf("%s by %s sees the client's address", a.Name, n.name)
				}
			}
			if len(by) != 2 {
				t.Errorf("answers by %v through %s", by, n.name)
			}
			if a := c.ask(client, single); a.Name != "b1" {
				t.Errorf("%s answers through %s", a.Name, n.name)
			}
			c.checkSticky(stuck)
			c.checkReset(vip, n, other)
			n.label(corev1.LabelNodeExcludeBalancers, false)
		}
		for _, from := range inside {
			c.ask(from, vip)
		}
	})

	// Direct return: one node announces, and the Pods of all nodes answer and see the client, whatever the policy. Session affinity
	// is switched on and off, as in upstream's "should be able to switch session affinity for LoadBalancer service with Local
	// traffic policy". An open connection outlasts a move of the address.
	t.Run("nodes behind it, direct return", func(t *testing.T) {
		pods := []*testbed.Host{a1, a2, b1}
		for name, change := range map[string][]func(*corev1.Service){"forwarded": {forwarded}, "forwarded-local": {forwarded, local}} {
			vip := c.serve(name, pods, change...)
			c.checkForwarded(client, vip, false, len(pods))
			c.change(name, sticky)
			c.checkForwarded(client, vip, true, len(pods))
			c.change(name, func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityNone })
			c.checkForwarded(client, vip, false, len(pods))
			from := c.owner(vip, c.nodes...)
			open, err := client.Dial(c.Context(), svc.TCP, netip.AddrPortFrom(vip, 80))
			c.must(err)
			_, err = testbed.AskOn(open)
			c.must(err)
			from.label(corev1.LabelNodeExcludeBalancers, true)
			c.owner(vip, c.others(from)[0])
			_, err = open.Write([]byte("?"))
			c.must(err)
			_ = open.SetDeadline(time.Now().Add(testbed.Patience))
			if _, err = open.Read(make([]byte, 1)); err != nil {
				t.Errorf("%s: the open connection ended when the address moved: %v", name, err)
			}
			_ = open.Close()
			from.label(corev1.LabelNodeExcludeBalancers, false)
			for _, from := range inside {
				c.ask(from, vip)
			}
		}
	})

	// Terway with ENI (behaviour 184): Pods stand behind it themselves, no node port is between,
	// with either policy (behaviour 179 has one in its way). The client's address is kept with Local; with Cluster another node
	// may have the Pod, and the answer has to come back through the one that was asked.
	t.Run("Pods behind it", func(t *testing.T) {
		for name, change := range map[string][]func(*corev1.Service){
			"direct": {noNodePorts, sticky}, "direct-local": {noNodePorts, sticky, local},
		} {
			vip := c.serve(name, []*testbed.Host{a1, a2, b1}, change...)
			kept := c.ask(client, vip).Client.Addr() == client.Addr4()
			if want := len(change) == 3; kept != want {
				t.Errorf("%s: the client's address is kept: %t, want %t", name, kept, want)
			}
			c.checkSticky(vip)
			for _, from := range inside {
				c.ask(from, vip)
			}
			// What is not healthy gets no connections (behaviour 180).
			c.unready(name, 0, 1)
			testbed.Until(c, "the third Pod to be the only one", func() error {
				if a := c.ask(client, vip); a.Name != "b1" {
					return fmt.Errorf("%s answers", a.Name)
				}
				return nil
			})
			s, err := c.client.CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
			c.must(err)
			if s.Spec.Ports[0].NodePort != 0 {
				t.Errorf("%s has the node port %d", name, s.Spec.Ports[0].NodePort)
			}
		}
	})
}
