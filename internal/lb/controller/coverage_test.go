package controller

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

func speakers(list ...v1.SpeakerStatus) map[string]*v1.Speaker {
	out := map[string]*v1.Speaker{}
	for i, s := range list {
		s.Endpoints = []string{"192.0.2.1:10262"}
		out[fmt.Sprintf("n%d", i)] = &v1.Speaker{Status: s}
	}
	return out
}

// arpSpeaker is a speaker that may announce at eth0, on some networks.
func arpSpeaker(networks ...string) v1.SpeakerStatus {
	return v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceARP, Networks: networks, Interfaces: []string{"eth0"}}
}

func TestCoverage(t *testing.T) {
	session := []v1.PeerStatus{{Name: "p", State: v1.PeerEstablished}}
	away := []v1.PeerStatus{{Name: "p", State: "Connect"}}
	for _, c := range []struct {
		what       string
		speakers   map[string]*v1.Speaker
		addresses  string
		interfaces []string
		gap        string
	}{
		{"no speaker", nil, "192.0.2.0/24", nil, ""},
		{"on its network", speakers(arpSpeaker("192.0.2.0/24")), "192.0.2.10-192.0.2.20", nil, ""},
		{"on another network", speakers(arpSpeaker("198.51.100.0/24")), "192.0.2.10-192.0.2.20", nil, "192.0.2.10-192.0.2.20"},
		{"of another family", speakers(arpSpeaker("192.0.2.0/24")), "2001:db8::/64", nil, "2001:db8::-2001:db8::ffff:ffff:ffff:ffff"},
		{"both families", speakers(arpSpeaker("192.0.2.0/24", "2001:db8::/64")), "2001:db8::1-2001:db8::9", nil, ""},
		{"two nodes together", speakers(arpSpeaker("192.0.2.0/25"), arpSpeaker("192.0.2.128/25")), "192.0.2.0/24", nil, ""},
		{"the middle is missing", speakers(arpSpeaker("192.0.2.0/26"), arpSpeaker("192.0.2.128/25")), "192.0.2.0/24", nil,
			"192.0.2.64-192.0.2.127"},
		{"the begin is missing", speakers(arpSpeaker("192.0.2.128/25")), "192.0.2.0/24", nil, "192.0.2.0-192.0.2.127"},
		{"the end is missing", speakers(arpSpeaker("192.0.2.0/25", "192.0.2.0/26")), "192.0.2.0/24", nil, "192.0.2.128-192.0.2.255"},
		{"not eligible", speakers(v1.SpeakerStatus{Networks: []string{"192.0.2.0/24"}, Interfaces: []string{"eth0"}}),
			"192.0.2.1-192.0.2.1", nil, "192.0.2.1"},
		{"an older build, which does not report what it can announce",
			speakers(v1.SpeakerStatus{Eligible: true, Networks: []string{"198.51.100.0/24"}}), "192.0.2.1-192.0.2.1", nil, ""},
		{"an older build among others", speakers(v1.SpeakerStatus{Eligible: true}, arpSpeaker("198.51.100.0/24")), "192.0.2.1-192.0.2.1",
			[]string{"eth1"}, ""},
		{"an older build that may not announce", speakers(v1.SpeakerStatus{}, arpSpeaker("198.51.100.0/24")), "192.0.2.1-192.0.2.1", nil,
			"192.0.2.1"},
		{"routed by other means", speakers(v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceNone}), "192.0.2.1-192.0.2.1", nil, ""},
		{"by BGP alone",
			speakers(v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceBGP, Networks: []string{"192.0.2.0/24"}}),
			"192.0.2.1-192.0.2.1", nil, "192.0.2.1"},
		{"with a session", speakers(v1.SpeakerStatus{Eligible: true, Peers: session}), "192.0.2.1-192.0.2.1", nil, ""},
		{"with a session that is away",
			speakers(v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceBGP, Peers: away}), "192.0.2.1-192.0.2.1", nil, "192.0.2.1"},
		{"at any network", speakers(v1.SpeakerStatus{Eligible: true, Interfaces: []string{"eth0"}, AnyNetwork: true}),
			"192.0.2.1-192.0.2.1", nil, ""},
		{"an interface that is there", speakers(arpSpeaker()), "192.0.2.1-192.0.2.1", []string{"eth1", "eth0"}, ""},
		{"an interface that is not", speakers(arpSpeaker("192.0.2.0/24")), "192.0.2.1-192.0.2.1", []string{"eth1"}, "192.0.2.1"},
	} {
		r, err := pool.Parse(c.addresses)
		if err != nil {
			t.Fatal(err)
		}
		cover := newCoverage(reporters{speakers: c.speakers}, "")
		gap, found := cover.gap(r, c.interfaces)
		if found != (c.gap != "") || found && gap.String() != c.gap {
			t.Errorf("%s: %v %v, want %q", c.what, gap, found, c.gap)
		}
	}
	silent := newCoverage(reporters{speakers: speakers(arpSpeaker("192.0.2.0/24")), silent: map[string]bool{"n0": true}}, "")
	if _, found := silent.gap(pool.FromPrefix(netip.MustParsePrefix("192.0.2.1/32")), nil); !found {
		t.Error("a node that nothing is heard of counts")
	}
}

// A pool counts only what its spec leaves of nodes, ways and peers, and the reason names that.
func TestCoverageOfPools(t *testing.T) {
	both := arpSpeaker("192.0.2.0/24")
	both.Peers = []v1.PeerStatus{{Name: "a", State: v1.PeerEstablished}, {Name: "b", State: "Idle"}}
	all := reporters{speakers: speakers(both, arpSpeaker("192.0.2.0/24")),
		labels: map[string]labels.Set{"n0": {"rack": "x"}, "n1": {"rack": "y"}}}
	rack := func(name string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"rack": name}}
	}
	to := func(peers ...string) *v1.PoolBGP { return &v1.PoolBGP{PoolRoute: v1.PoolRoute{Peers: peers}} }
	further := to("b")
	further.Advertisements = []v1.PoolRoute{{Peers: []string{"a"}}}
	const none = "no eligible node has a BGP session"
	for _, c := range []struct {
		what, addr string
		spec       v1.IPAddressPoolSpec
		want       string // a part of the reason, empty if it can be announced
	}{
		{"no limit", "198.51.100.1", v1.IPAddressPoolSpec{}, ""},
		{"ARP", "192.0.2.1", v1.IPAddressPoolSpec{Announce: []string{"arp"}}, ""},
		{"ARP, another network", "198.51.100.1", v1.IPAddressPoolSpec{Announce: []string{"arp"}}, "the pool has announce arp"},
		{"BGP", "198.51.100.1", v1.IPAddressPoolSpec{Announce: []string{"bgp"}}, ""},
		{"both", "198.51.100.1", v1.IPAddressPoolSpec{Announce: []string{"bgp", "arp"}}, ""},
		{"BGP of a node without a session", "192.0.2.1", v1.IPAddressPoolSpec{Announce: []string{"bgp"}, NodeSelector: rack("y")}, none},
		{"ARP of that node", "192.0.2.1", v1.IPAddressPoolSpec{NodeSelector: rack("y")}, ""},
		{"no such node", "192.0.2.1", v1.IPAddressPoolSpec{NodeSelector: rack("z")},
			"selects no node with a speaker; the pool has nodeSelector rack=z"},
		{"no such operator", "192.0.2.1", v1.IPAddressPoolSpec{NodeSelector: &metav1.LabelSelector{
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "rack", Operator: "Like"}}}}, "selects no node with a speaker"},
		{"a peer", "198.51.100.1", v1.IPAddressPoolSpec{BGP: to("a")}, ""},
		{"a peer without a session", "198.51.100.1", v1.IPAddressPoolSpec{BGP: to("b")}, "the peers b"},
		{"a peer of a further route", "198.51.100.1", v1.IPAddressPoolSpec{BGP: further}, ""},
	} {
		p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: c.spec}
		cover := newCoverage(all, "")
		for range 2 { // as it is remembered
			lacks := cover.lacks(netip.MustParseAddr(c.addr), p)
			if why := cover.of(p).why(c.addr, nil); lacks != (c.want != "") || lacks && !strings.Contains(why, c.want) {
				t.Errorf("%s: cannot be announced: %t, %s", c.what, lacks, why)
			}
		}
	}
	// Who decides about ARP does not matter for BGP.
	for way, want := range map[string]bool{"arp": true, "bgp": false} {
		p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.IPAddressPoolSpec{Announce: []string{way}}}
		if got := newCoverage(all, "nobody decides").lacks(netip.MustParseAddr("192.0.2.1"), p); got != want {
			t.Errorf("%s while no one decides: cannot be announced: %t", way, got)
		}
	}
}

// While the voters that the API server hears of are no majority, no address can be announced by ARP or NDP, and the reason
// names the others and the remedy. BGP asks no voters.
func TestUndecided(t *testing.T) {
	list := func(witness bool, names ...string) (l quorum.List) {
		for _, n := range names {
			l.Voters = append(l.Voters, quorum.Voter{Name: n})
		}
		l.Witness = witness
		return l
	}
	r := pool.FromPrefix(netip.MustParsePrefix("192.0.2.1/32"))
	session := []v1.PeerStatus{{Name: "p", State: v1.PeerEstablished}}
	for _, c := range []struct {
		what    string
		list    quorum.List
		silent  string
		speaker v1.SpeakerStatus
		want    string
	}{
		{"no list yet", quorum.List{}, "n1 n2", arpSpeaker("192.0.2.0/24"), ""},
		{"all well", list(false, "n0", "n1", "n2"), "", arpSpeaker("192.0.2.0/24"), ""},
		{"one of three", list(false, "n0", "n1", "n2"), "n1", arpSpeaker("192.0.2.0/24"), ""},
		{"two of three", list(false, "n0", "n1", "n2"), "n1 n2", arpSpeaker("192.0.2.0/24"),
			"kubectl taint node n1 n2 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"},
		{"one of two, with the witness", list(true, "n0", "n1"), "n1", arpSpeaker("192.0.2.0/24"), ""},
		{"the only one", list(false, "n1"), "n1", arpSpeaker("192.0.2.0/24"),
			"nothing is heard of 1 of the 1 nodes that decide who answers (n1)"},
		{"with a session", list(false, "n0", "n1", "n2"), "n1 n2", v1.SpeakerStatus{Eligible: true, Peers: session}, ""},
	} {
		silent := func(name string) bool { return slices.Contains(strings.Fields(c.silent), name) }
		cover := newCoverage(reporters{speakers: speakers(c.speaker), silent: map[string]bool{"n0": silent("n0")}}, undecided(c.list, silent))
		_, found := cover.gap(r, nil)
		if found != (c.want != "") || found && !strings.Contains(cover.why("192.0.2.1", nil), c.want) {
			t.Errorf("%s: found %t: %s", c.what, found, cover.why("192.0.2.1", nil))
		}
	}
}

// nodes creates Nodes. The controller must know those that report before: nothing is heard of one
// that it does not know, and an Event says so once.
func (r *rig) nodes(names ...string) {
	r.Helper()
	for _, name := range names {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := r.client.CoreV1().Nodes().Create(context.Background(), node, metav1.CreateOptions{})
		r.must(err)
	}
}

// report writes what a speaker would.
func (r *rig) report(name string, status v1.SpeakerStatus) {
	r.Helper()
	s, err := r.lb.Speakers.Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		s, err = r.lb.Speakers.Create(context.Background(), &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	}
	r.must(err)
	s.Status, s.Status.Endpoints = status, []string{"192.0.2.1:10262"}
	_, err = r.lb.Speakers.UpdateStatus(context.Background(), s, metav1.UpdateOptions{})
	r.must(err)
}

// An address that no node can announce has a Warning on its Service and on its pool, until a
// node can.
func TestAddressesThatNoNodeCanAnnounce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.nodes("n1", "n2")
	r.run(func(o *Options) { o.Pools, o.coverageDelay = r.flagPools("192.0.2.0/30"), time.Millisecond })
	condition := func(status metav1.ConditionStatus, reason, message string) func(*v1.IPAddressPool) bool {
		return func(p *v1.IPAddressPool) bool {
			return slices.ContainsFunc(p.Status.Conditions, func(c metav1.Condition) bool {
				return c.Type == v1.PoolAnnounceable && c.Status == status && c.Reason == reason && strings.Contains(c.Message, message)
			})
		}
	}
	r.service("one")
	r.wants("one", "192.0.2.0")
	r.wantPool("a", condition(metav1.ConditionUnknown, "NoSpeakers", "by other means"))

	r.report("n1", arpSpeaker("198.51.100.0/24"))
	r.wantPool("a", condition(metav1.ConditionFalse, "NotAnnounceable",
		"no node can announce 192.0.2.0-192.0.2.3: the eligible nodes are on other networks"))
	r.wantEvent("one", "NotAnnounceable",
		"no node can announce 192.0.2.0: the eligible nodes are on other networks, 198.51.100.0-198.51.100.255")
	r.wantEvent("a", "NotAnnounceable", "192.0.2.0-192.0.2.3")
	r.service("two") // an address that is given out later
	r.wantEvent("two", "NotAnnounceable", "no node can announce 192.0.2.1")

	r.report("n1", arpSpeaker("192.0.2.0/24"))
	r.wantPool("a", condition(metav1.ConditionTrue, "Announceable", ""))

	status := arpSpeaker("192.0.2.0/24")
	status.Eligible, status.Reason = false, "its proxy is away"
	r.report("n1", status)
	r.wantPool("a", condition(metav1.ConditionFalse, "NotAnnounceable", "node n1: its proxy is away"))
	r.wantEvent("one", "NotAnnounceable", "no node can announce 192.0.2.0: node n1: its proxy is away")

	r.report("n2", v1.SpeakerStatus{Eligible: true, Peers: []v1.PeerStatus{{Name: "p", Address: "192.0.2.254", State: v1.PeerEstablished,
		Since: metav1.NowMicro()}}})
	r.wantPool("a", condition(metav1.ConditionTrue, "Announceable", ""))
}
