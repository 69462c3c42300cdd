package speaker

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Who announces an address, and how, is what its pool leaves of nodes and ways: also as labels, pools and endpoints change, and nothing
// before the pools are known.
func TestPoolsDecideWhoAnnounces(t *testing.T) {
	a, web := netip.MustParseAddr("192.0.2.7"), svc.Name{Namespace: "default", Name: "web"}
	k := NewKnown("n1", noFront{})
	k.claims[a] = claimed{Claim: claim.Claim{Pool: "p", Services: []svc.Name{web}}}
	k.services[web] = &announced{addrs: []netip.Addr{a}}
	l := newLinks(slog.New(slog.DiscardHandler))
	node := func(name, rack string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"rack": rack}}}
	}
	check := func(what string, arp, bgp []string) {
		t.Helper()
		one := k.one(a)
		for way, want := range map[string][]string{v1.AnnounceARP: arp, v1.AnnounceBGP: bgp} {
			var got []string
			for _, name := range []string{"n1", "n2", "n3"} {
				member := quorum.Member{Name: name, Attrs: `[{"n":"eth0","p":["192.0.2.0/24"]}]`}
				if way == v1.AnnounceARP && l.mayAnnounce(&one, &member) ||
					way == v1.AnnounceBGP && one.ways.takes(way) && one.permits(name) {
					got = append(got, name)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %s by %v, want %v", what, way, got, want)
			}
		}
	}
	pool := func(change func(*v1.IPAddressPoolSpec)) {
		o := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
		change(&o.Spec)
		k.change(func() { k.setPool(o) })
	}
	racks := func(names ...string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "rack", Operator: metav1.LabelSelectorOpIn, Values: names}}}
	}
	all := []string{"n1", "n2", "n3"}
	check("before the pools are known", nil, nil)
	k.pooled = true
	check("a pool that is deleted", all, all)
	pool(func(*v1.IPAddressPoolSpec) {})
	check("no limit", all, all)
	pool(func(s *v1.IPAddressPoolSpec) { s.Announce = []string{v1.AnnounceARP} })
	check("ARP", all, nil)
	pool(func(s *v1.IPAddressPoolSpec) { s.Announce = []string{v1.AnnounceBGP} })
	check("BGP", nil, all)

	k.change(func() { k.setNode(node("n1", "x")) })
	pool(func(s *v1.IPAddressPoolSpec) { s.NodeSelector = racks("x", "y") })
	check("this node only is known", []string{"n1"}, []string{"n1"})
	if k.Listed() {
		t.Error("the nodes count as listed before they are")
	}
	k.change(func() { k.setLabels(node("n3", "y")); k.setLabels(node("n2", "z")) })
	check("two of three nodes", []string{"n1", "n3"}, []string{"n1", "n3"})
	k.take(true)
	k.change(func() { k.setLabels(node("n2", "x")); k.setLabels(node("n3", "z")) })
	check("other labels", []string{"n1", "n2"}, []string{"n1", "n2"})
	if changed := k.take(false); len(changed) != 1 {
		t.Errorf("%d addresses are looked at again, want 1", len(changed))
	}
	k.change(func() { k.setLabels(node("n2", "x")) })
	if changed := k.take(false); len(changed) != 0 {
		t.Errorf("the same labels again: %d addresses are looked at", len(changed))
	}

	k.services[web].local = true
	k.bySvc[web] = map[svc.Name]struct{}{web: {}}
	k.slices[web] = sliceNodes{service: web, nodes: []string{"n2", "n3"}}
	check("of these the ones with endpoints", []string{"n2"}, []string{"n2"})
	k.change(func() { k.dropLabels(svc.Name{Name: "n2"}) })
	check("a node that is deleted", nil, nil)
	pool(func(s *v1.IPAddressPoolSpec) {
		s.NodeSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "rack", Operator: "Like"}}}
	})
	check("a selector that cannot be read", nil, nil)
}
