package controller

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// A node, or who has stolen its certificate, cannot keep Services from a pool: of the addresses that it lists only one
// of each family counts, unless an administrator confirms more.
func TestNodeListsThePool(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx := context.Background()
	_, err := r.client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "evil"}}, metav1.CreateOptions{})
	r.must(err)
	list := func(first string) {
		t.Helper()
		r.eventually("the node lists the pool", func() error {
			n, err := r.client.CoreV1().Nodes().Get(ctx, "evil", metav1.GetOptions{})
			if err != nil {
				return err
			}
			n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: first}}
			for a := netip.MustParseAddr("192.0.2.0"); a.Compare(netip.MustParseAddr("192.0.2.7")) <= 0; a = a.Next() {
				n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: a.String()})
				if a.String() != first { // the API rejects duplicates
					n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
				}
			}
			_, err = r.client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
			return err
		})
	}
	list("192.0.2.0")
	r.withPools("192.0.2.0/29")
	r.wantPool("a", func(p *v1.IPAddressPool) bool { return p.Status.Free == 7 })
	r.wantEvent("a", "HasNodeAddresses", "1 addresses belong to nodes and are not given out: 192.0.2.0 of Node evil")
	r.wantEvent("a", "NodeAddressesIgnored", "although these Nodes list them: evil.")
	names := []string{"one", "two", "three", "four", "five", "six", "seven"}
	for i, name := range names {
		r.service(name)
		r.wants(name, netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}).String())
	}
	// An address that a Service has is the Service's, and the Event names the Node.
	list("192.0.2.3")
	r.wantEvent("three", "AddressOutsidePools", "192.0.2.3 is an address of Node evil; the Service keeps it")
	r.service("eight")
	r.wants("eight", "192.0.2.0") // which the node has no more
	r.wants("three", "192.0.2.3")
	// What an administrator confirms counts.
	r.delete("one")
	r.delete("two")
	r.wantPool("a", func(p *v1.IPAddressPool) bool { return p.Status.Free == 2 })
	r.eventually("confirm addresses", func() error {
		n, err := r.client.CoreV1().Nodes().Get(ctx, "evil", metav1.GetOptions{})
		if err == nil {
			n.Annotations = map[string]string{svc.NodeAddressesAnnotation: "192.0.2.1, 192.0.2.2"}
			_, err = r.client.CoreV1().Nodes().Update(ctx, n, metav1.UpdateOptions{})
		}
		return err
	})
	r.wantPool("a", func(p *v1.IPAddressPool) bool { return p.Status.Free == 0 })
	r.service("nine", annotate(dialect.LBAddresses, "192.0.2.2"))
	r.wantEvent("nine", "AddressTaken", "192.0.2.2 is an address of Node evil")
}

func TestAddressesOfNodes(t *testing.T) {
	t.Parallel()
	const internal, external = corev1.NodeInternalIP, corev1.NodeExternalIP
	for _, test := range []struct {
		name, confirmed string
		listed          []corev1.NodeAddress
		counted, others string
	}{
		{"both families", "", []corev1.NodeAddress{{Type: internal, Address: "192.0.2.1"}, {Type: internal, Address: "2001:db8::1"},
			{Type: corev1.NodeHostName, Address: "192.0.2.9"}}, "192.0.2.1 2001:db8::1", ""},
		{"more than one", "", []corev1.NodeAddress{{Type: external, Address: "192.0.2.3"}, {Type: internal, Address: "192.0.2.1"},
			{Type: internal, Address: "192.0.2.2"}, {Type: internal, Address: "192.0.2.2"}, {Type: internal, Address: "::ffff:192.0.2.1"},
			{Type: internal, Address: "x"}}, "192.0.2.1", "192.0.2.2 192.0.2.3"},
		{"only an external one", "", []corev1.NodeAddress{{Type: external, Address: "192.0.2.3"}}, "192.0.2.3", ""},
		{"confirmed ones", "192.0.2.7,x, 2001:db8::7,192.0.2.7", []corev1.NodeAddress{{Type: internal, Address: "192.0.2.1"},
			{Type: internal, Address: "192.0.2.7"}}, "192.0.2.7 2001:db8::7", "192.0.2.1"},
		{"confirmed to have none", " ", []corev1.NodeAddress{{Type: internal, Address: "192.0.2.1"}}, "", "192.0.2.1"},
	} {
		n := &corev1.Node{Status: corev1.NodeStatus{Addresses: test.listed}}
		if test.confirmed != "" {
			n.Annotations = map[string]string{svc.NodeAddressesAnnotation: test.confirmed}
		}
		text := func(list []netip.Addr) string {
			var out []string
			for _, a := range list {
				out = append(out, a.String())
			}
			return strings.Join(out, " ")
		}
		counted, others := addresses(n)
		if text(counted) != test.counted || text(others) != test.others {
			t.Errorf("%s: %s count, %s do not", test.name, counted, others)
		}
	}
	// However long the lists are, they are bounded.
	n := &corev1.Node{}
	var all []string
	for a := netip.MustParseAddr("10.0.0.1"); len(all) < 1000; a = a.Next() {
		all = append(all, a.String())
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: internal, Address: a.String()})
	}
	if counted, others := addresses(n); len(counted) != 1 || len(others) != maxOthers {
		t.Errorf("%d count, %d do not", len(counted), len(others))
	}
	n.Annotations = map[string]string{svc.NodeAddressesAnnotation: strings.Join(all, ",")}
	if counted, _ := addresses(n); len(counted) != maxConfirmed {
		t.Errorf("%d are confirmed", len(counted))
	}
}

// An address that two Nodes list is given out when neither does.
func TestAddressOfTwoNodes(t *testing.T) {
	t.Parallel()
	a, n := netip.MustParseAddr("192.0.2.1"), newNodes()
	lists := nodeFacts{exists: true, addrs: []netip.Addr{a}}
	n.set("b", lists)
	n.set("a", lists)
	n.set("a", lists)
	if !n.has(a) || n.whose(a) != "an address of Node a" || !slices.Equal(n.addrs[a], []string{"a", "b"}) {
		t.Errorf("%v", n.addrs)
	}
	n.set("a", nodeFacts{})
	if !n.has(a) || n.whose(a) != "an address of Node b" {
		t.Errorf("%v", n.addrs)
	}
	if n.set("b", nodeFacts{}); n.has(a) || len(n.addrs) > 0 {
		t.Errorf("%v", n.addrs)
	}
}
