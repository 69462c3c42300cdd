package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
)

// silence waits until nothing is heard of an address when it is asked for.
func (b *bed) silence(a netip.Addr) {
	b.Helper()
	testbed.Until(b, "silence about "+a.String(), func() error {
		for range 3 {
			if mac, ok := b.wire.Who(a); ok {
				return fmt.Errorf("%x answers", mac)
			}
		}
		return nil
	})
}

// The last node that may announce falls silent when it may no longer, and when the Service is deleted; not when it is cordoned.
func TestLastNodeFallsSilent(t *testing.T) {
	inParallel(t)
	b := newBed(t, 1)
	b.voters(1)
	only := b.nodes[0]
	a, deleted := b.service("web")[0], b.service("deleted")[0]
	b.owner(a, only)
	b.owner(deleted, only)

	// What the API server does not hear of goes on, and takes part again only when it is heard of.
	only.heard(corev1.ConditionUnknown)
	only.kill9()
	only.start()
	b.ineligible(only, "the API server does not hear of the node")
	b.silence(a)
	only.heard(corev1.ConditionTrue)
	b.owner(a, only)
	only.heard(corev1.ConditionUnknown)
	b.owner(b.service("unheard")[0], only)
	only.heard(corev1.ConditionTrue)

	only.label(corev1.LabelNodeExcludeBalancers, true)
	b.silence(a)
	b.must(b.client.CoreV1().Services("default").Delete(t.Context(), "deleted", metav1.DeleteOptions{}))
	testbed.Until(t, "the address to be given back", func() error {
		if _, err := b.client.NetworkingV1().IPAddresses().Get(t.Context(), deleted.String(), metav1.GetOptions{}); err == nil {
			return errors.New("its claim is still there")
		}
		return nil
	})
	only.label(corev1.LabelNodeExcludeBalancers, false)
	b.owner(a, only)
	b.silence(deleted)

	only.taint(corev1.TaintNodeOutOfService, corev1.TaintEffectNoExecute)
	b.silence(a)
	// A cordoned node gets no new Pods; its kernel forwards, and it announces what is new, too.
	only.taint(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule)
	b.owner(a, only)
	b.owner(b.service("later")[0], only)
}

// heard sets whether the API server hears of the node, as its controller shows that.
func (n *node) heard(ready corev1.ConditionStatus) {
	n.bed.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, ready)
	_, err := n.bed.client.CoreV1().Nodes().Patch(n.bed.Context(), n.name, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{}, "status")
	n.bed.must(err)
}

// ineligible waits until a node's speaker reports that it may not announce, and why.
func (b *bed) ineligible(n *node, why string) {
	b.Helper()
	testbed.Until(b, n.name+" not to be eligible", func() error {
		s, err := b.lb.Speakers.Get(b.Context(), n.name, metav1.GetOptions{})
		if err == nil && s.Status.Reason != why {
			err = fmt.Errorf("eligible %t: %q", s.Status.Eligible, s.Status.Reason)
		}
		return err
	})
}

// taint makes a taint the only one of the node's object, as 'kubectl cordon' leaves it.
func (n *node) taint(key string, effect corev1.TaintEffect) {
	n.bed.Helper()
	patch := fmt.Sprintf(`{"spec":{"unschedulable":true,"taints":[{"key":%q,"effect":%q}]}}`, key, effect)
	_, err := n.bed.client.CoreV1().Nodes().Patch(n.bed.Context(), n.name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	n.bed.must(err)
}

// A node that announces by BGP alone gets no address that is answered for by ARP. A pool decides about ways, nodes and peers.
func TestMixedAnnouncers(t *testing.T) {
	inParallel(t)
	b := newBed(t, 1)
	routed := b.addNode("n2")
	routed.args.Announce = v1.AnnounceBGP
	routed.start()
	b.voters(3)
	b.poolsDecide()
	for i := range 6 {
		b.owner(b.service(fmt.Sprint("web", i))[0], b.nodes[0])
	}
	s, err := b.lb.Speakers.Get(t.Context(), routed.name, metav1.GetOptions{})
	b.must(err)
	if !s.Status.Eligible {
		t.Errorf("the node that announces by BGP is not eligible: %s", s.Status.Reason)
	}
}

// poolsDecide changes how a pool is announced by a node that answers ARP, and has a session with a router, and one that only has the
// session.
func (b *bed) poolsDecide() {
	b.Helper()
	n1, n2 := b.nodes[0], b.nodes[1]
	var neighbors []string
	for _, n := range b.nodes {
		neighbors = append(neighbors, fmt.Sprintf("neighbor %s as %d;", n.host.Addr4(), nodeAS))
	}
	router := bird.Start(b.TB, b.net.Host("router"), neighbors...)
	_, err := b.lb.Peers.Create(b.Context(), &v1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "router"},
		Spec: v1.BGPPeerSpec{Address: router.Addr4().String(), LocalASN: nodeAS, PeerASN: bird.AS}}, metav1.CreateOptions{})
	b.must(err)
	a := netip.MustParseAddr("192.168.77.217")
	const one, wide = "192.168.77.217/32", "192.168.77.208/28"
	_, err = b.lb.Pools.Create(b.Context(), &v1.IPAddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "picky"}, Spec: v1.IPAddressPoolSpec{Addresses: []string{wide}, AutoAssign: new(false)},
	}, metav1.CreateOptions{})
	b.must(err)
	b.service("picky", func(s *corev1.Service) { s.Spec.LoadBalancerIP = a.String() })
	n2.label("rack", true)
	at1, at2 := n1.host.Addr4(), n2.host.Addr4()
	to := func(peers ...string) v1.PoolRoute { return v1.PoolRoute{Peers: peers} }
	further := to("router")
	further.AggregationLengthV4 = new(int32(28))
	selected := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
		{Key: "rack", Operator: metav1.LabelSelectorOpExists}}}
	for _, c := range []struct {
		spec      v1.IPAddressPoolSpec
		answered  bool // by n1
		one, wide []netip.Addr
	}{
		{v1.IPAddressPoolSpec{}, true, []netip.Addr{at1, at2}, nil},
		{v1.IPAddressPoolSpec{Announce: []string{v1.AnnounceARP}}, true, nil, nil},
		{v1.IPAddressPoolSpec{Announce: []string{v1.AnnounceBGP}}, false, []netip.Addr{at1, at2}, nil},
		{v1.IPAddressPoolSpec{NodeSelector: selected}, false, []netip.Addr{at2}, nil},
		{v1.IPAddressPoolSpec{BGP: &v1.PoolBGP{PoolRoute: to("elsewhere")}}, true, nil, nil},
		{v1.IPAddressPoolSpec{BGP: &v1.PoolBGP{PoolRoute: to("elsewhere"), Advertisements: []v1.PoolRoute{further}}}, true,
			nil, []netip.Addr{at1, at2}},
		{v1.IPAddressPoolSpec{BGP: &v1.PoolBGP{Advertisements: []v1.PoolRoute{further}}, NodeSelector: selected}, false,
			[]netip.Addr{at2}, []netip.Addr{at2}},
	} {
		testbed.Until(b, "the pool to be changed", func() error {
			p, err := b.lb.Pools.Get(b.Context(), "picky", metav1.GetOptions{})
			b.must(err)
			p.Spec.Announce, p.Spec.NodeSelector, p.Spec.BGP = c.spec.Announce, c.spec.NodeSelector, c.spec.BGP
			_, err = b.lb.Pools.Update(b.Context(), p, metav1.UpdateOptions{})
			return err
		})
		router.Routes(one, c.one...)
		router.Routes(wide, c.wide...)
		if c.answered {
			b.owner(a, n1)
		} else {
			b.silence(a)
		}
	}
}

// An address follows its pool to other interfaces of the node that announces it.
func TestPoolChangesInterfaces(t *testing.T) {
	inParallel(t)
	b := newBed(t, 1)
	only := b.nodes[0]
	only.run("ip", "link", "add", "side", "type", "bridge")
	only.run("ip", "link", "add", "port0", "type", "veth", "peer", "name", "port1")
	for _, name := range []string{"side", "port0", "port1"} {
		only.run("ip", "link", "set", name, "up")
	}
	only.run("ip", "link", "set", "port0", "master", "side")
	a := netip.MustParseAddr("192.168.77.210")
	_, err := b.lb.Pools.Create(t.Context(), &v1.IPAddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "moving"}, Spec: v1.IPAddressPoolSpec{Addresses: []string{a.String() + "/32"}},
	}, metav1.CreateOptions{})
	b.must(err)
	b.service("web", func(s *corev1.Service) { s.Spec.LoadBalancerIP = a.String() })
	b.owner(a, only)
	for _, name := range []string{"side", "eth0"} {
		testbed.Until(t, "the pool to be changed", func() error {
			p, err := b.lb.Pools.Get(t.Context(), "moving", metav1.GetOptions{})
			b.must(err)
			p.Spec.Interfaces = []string{name}
			_, err = b.lb.Pools.Update(t.Context(), p, metav1.UpdateOptions{})
			return err
		})
		testbed.Until(t, "the address to be announced at "+name, func() error {
			s, err := b.lb.Speakers.Get(t.Context(), only.name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, x := range s.Status.Addresses {
				if x.Address == a.String() && x.Interface == name {
					return nil
				}
			}
			return fmt.Errorf("%+v", s.Status.Addresses)
		})
	}
	b.owner(a, only)
}
