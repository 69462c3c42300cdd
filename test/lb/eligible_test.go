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

// taint makes a taint the only one of the node's object, as 'kubectl cordon' leaves it.
func (n *node) taint(key string, effect corev1.TaintEffect) {
	n.bed.Helper()
	patch := fmt.Sprintf(`{"spec":{"unschedulable":true,"taints":[{"key":%q,"effect":%q}]}}`, key, effect)
	_, err := n.bed.client.CoreV1().Nodes().Patch(n.bed.Context(), n.name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	n.bed.must(err)
}

// A node that announces by BGP alone gets no address that is answered for by ARP.
func TestMixedAnnouncers(t *testing.T) {
	inParallel(t)
	b := newBed(t, 1)
	routed := b.addNode("n2")
	routed.args.Announce = v1.AnnounceBGP
	routed.start()
	b.voters(3)
	for i := range 6 {
		b.owner(b.service(fmt.Sprint("web", i))[0], b.nodes[0])
	}
	s, err := b.lb.Speakers.Get(t.Context(), routed.name, metav1.GetOptions{})
	b.must(err)
	if !s.Status.Eligible {
		t.Errorf("the node that announces by BGP is not eligible: %s", s.Status.Reason)
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
