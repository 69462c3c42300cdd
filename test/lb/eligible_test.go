package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb"
	"github.com/fairlead/fairlead/internal/testbed"
)

// silence waits until nothing is heard of an address when it is asked for.
func (b *bed) silence(a netip.Addr) {
	b.Helper()
	testbed.Until(b, "silence about "+a.String(), func() error {
		for range 3 {
			if mac, ok := b.wire.who(a); ok {
				return fmt.Errorf("%x answers", mac)
			}
		}
		return nil
	})
}

// The last node that may announce falls silent when it may no longer, and when the Service is deleted.
func TestLastNodeFallsSilent(t *testing.T) {
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
}

// A node that announces by BGP alone gets no address that is answered for by ARP.
func TestMixedAnnouncers(t *testing.T) {
	b := newBed(t, 1)
	routed := b.addNode("n2")
	routed.args.Announce = lb.AnnounceBGP
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
