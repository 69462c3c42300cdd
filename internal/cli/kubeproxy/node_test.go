package kubeproxy

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func nodeWith(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// The Node of a machine is the one of its name, else the only one with one of its addresses.
func TestFindNode(t *testing.T) {
	client := fake.NewClientset(
		nodeWith("a", "192.0.2.1"), nodeWith("b.example", "192.0.2.2", "2001:db8::2"),
		nodeWith("twin1", "192.0.2.3"), nodeWith("twin2", "192.0.2.3"))
	for _, c := range []struct{ name, own, want string }{
		{"a", "192.0.2.2", "a"},
		{"b", "192.0.2.2", "b.example"},
		{"b", "2001:db8::2", "b.example"},
		{"c", "192.0.2.9", ""},
		{"c", "192.0.2.3", ""}, // two of them
	} {
		got, err := findNode(t.Context(), client, c.name, []netip.Addr{netip.MustParseAddr(c.own)})
		if err != nil || got != c.want {
			t.Errorf("%s at %s: %q, %v; want %q", c.name, c.own, got, err, c.want)
		}
	}
}
