package lb

import (
	"fmt"
	"net/netip"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
)

// nodeAS is the nodes' autonomous system.
const nodeAS = 64513

// A router's table follows what may announce an address: health and labels of nodes,
// ready endpoints under policy Local, the life of Services and of processes.
func TestBGP(t *testing.T) {
	inParallel(t)
	b := newBed(t, 0)
	var neighbors []string
	for _, name := range []string{"n1", "n2"} {
		n := b.addNode(name)
		n.args.Announce = v1.AnnounceBGP
		neighbors = append(neighbors, fmt.Sprintf("neighbor %s as %d;", n.host.Addr4(), nodeAS))
	}
	n1, n2 := b.nodes[0], b.nodes[1]
	router := bird.Start(t, b.net.Host("router"), neighbors...)
	_, err := b.lb.Peers.Create(t.Context(), &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "router"}, Spec: v1.BGPPeerSpec{
		Address: router.Addr4().String(), LocalASN: nodeAS, PeerASN: bird.AS, HoldTime: &metav1.Duration{Duration: 3e9},
	}}, metav1.CreateOptions{})
	b.must(err)
	for _, n := range b.nodes {
		n.start()
	}
	addr := b.service("web")[0]
	route := func(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }
	at1, at2 := n1.host.Addr4(), n2.host.Addr4()
	router.Routes(route(addr), at1, at2)

	client := b.net.Outside("client2")
	client.Route(netip.PrefixFrom(addr, addr.BitLen()), router.Addr4())
	for _, n := range b.nodes {
		n.host.AddAddr(addr)
		n.host.Serve(svc.TCP, 80)
	}
	by := map[string]int{}
	for range 64 { // 2 to the power of 63 to one against one node alone
		by[bird.Connect(t, client, netip.AddrPortFrom(addr, 80))]++
	}
	if len(by) != 2 {
		t.Errorf("answers by %v, want both nodes", by)
	}
	testbed.Until(t, "the status of n1", func() error {
		s, err := b.lb.Speakers.Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		st := s.Status
		if len(st.Peers) != 1 || st.Peers[0].State != "Established" || st.Peers[0].Prefixes != 1 || len(st.Addresses) != 1 ||
			st.Addresses[0].Via != "bgp" || st.Addresses[0].Address != addr.String() {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})

	b.must(os.WriteFile(n1.args.Unhealthy, nil, 0o600))
	router.Routes(route(addr), at2)
	b.must(os.Remove(n1.args.Unhealthy))
	router.Routes(route(addr), at1, at2)
	n2.label(corev1.LabelNodeExcludeBalancers, true)
	router.Routes(route(addr), at1)
	n2.label(corev1.LabelNodeExcludeBalancers, false)
	router.Routes(route(addr), at1, at2)

	local := b.service("local", func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	})[0]
	api := b.client.DiscoveryV1().EndpointSlices("default")
	slice, err := api.Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "local-1", Labels: map[string]string{discoveryv1.LabelServiceName: "local"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}, metav1.CreateOptions{})
	b.must(err)
	for _, step := range []struct{ ready, unready []*node }{
		{ready: []*node{n2}, unready: []*node{n1}}, {ready: []*node{n1, n2}}, {ready: []*node{n1}}, {unready: []*node{n1}},
	} {
		slice.Endpoints = nil
		var hops []netip.Addr
		for _, n := range step.ready {
			hops = append(hops, n.host.Addr4())
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244.9.9"}, NodeName: &n.name})
		}
		for _, n := range step.unready {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244.9.8"}, NodeName: &n.name,
				Conditions: discoveryv1.EndpointConditions{Ready: new(false)}})
		}
		slice, err = api.Update(t.Context(), slice, metav1.UpdateOptions{})
		b.must(err)
		router.Routes(route(local), hops...)
		if mac, ok := b.wire.Who(local); ok {
			t.Errorf("%x answers ARP requests", mac)
		}
	}
	n1.Stop()
	router.Routes(route(addr), at2)
	n1.start()
	router.Routes(route(addr), at1, at2)
	n2.kill9()
	router.Routes(route(addr), at1)
	b.must(b.client.CoreV1().Services("default").Delete(t.Context(), "web", metav1.DeleteOptions{}))
	router.Routes(route(addr))
}
