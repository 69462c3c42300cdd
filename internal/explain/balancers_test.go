package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// announcing are the Service default/web with address 203.0.113.1 of pool public, and two nodes: here answers ARP there, there does not.
type announcing struct {
	*bed
	b Balancers
}

func newAnnouncing() *announcing {
	out := &announcing{bed: newBed()}
	since := metav1.NewMicroTime(time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC))
	speaker := func(name string, addresses ...v1.AnnouncedAddress) v1.Speaker {
		return v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceARP,
			Interfaces: []string{"eth0"}, Networks: []string{"203.0.113.0/24"}, Addresses: addresses, AddressCount: int32(len(addresses))}}
	}
	out.b = Balancers{
		Claims: []claim.Claim{{Addr: netip.MustParseAddr("203.0.113.1"), Pool: "public",
			Services: []svc.Name{{Namespace: "default", Name: "web"}}}},
		Pools: []v1.IPAddressPool{{ObjectMeta: metav1.ObjectMeta{Name: "public"}}},
		Speakers: []v1.Speaker{speaker("here", v1.AnnouncedAddress{Address: "203.0.113.1", Via: "arp", Interface: "eth0", Since: since,
			Reason: "first owner"}), speaker("there")},
		Nodes: []*corev1.Node{out.node, {ObjectMeta: metav1.ObjectMeta{Name: "there"}}},
	}
	return out
}

// silence takes what a node announces, and changes its status.
func (a *announcing) silence(change func(here, there *v1.SpeakerStatus)) {
	here := &a.b.Speakers[0].Status
	here.Addresses, here.AddressCount = nil, 0
	if change != nil {
		change(here, &a.b.Speakers[1].Status)
	}
}

// Who announces an address is told with the way, the time and the source; where nobody does, each node's reason is.
func TestWhoAnnounces(t *testing.T) {
	peer := func(name, state string) v1.PeerStatus {
		return v1.PeerStatus{Name: name, Address: "192.0.2.1", State: state, Reason: "connection refused",
			Since: metav1.NewMicroTime(time.Date(2026, 1, 1, 11, 0, 0, 0, time.UTC))}
	}
	for name, c := range map[string]struct {
		change func(*announcing)
		by     []string // who announces
		nobody bool
		lines  []string // text  [source]
		not    string
	}{
		"ARP": {func(*announcing) {}, []string{"here"}, false, []string{
			"it is of pool public  [IPAddress 203.0.113.1 annotation fairlead.dev/lb-pool]",
			"node here announces it by arp on eth0 since 2026-01-01T12:00:00Z: first owner  [Speaker here status.addresses]"}, "there"},
		"BGP of one peer": {func(a *announcing) {
			s := &a.b.Speakers[0].Status
			s.Announce, s.Addresses[0].Via, s.Addresses[0].Interface = v1.AnnounceBGP, "bgp", ""
			s.Peers = []v1.PeerStatus{peer("r1", v1.PeerEstablished), peer("r2", "Active"), peer("r3", v1.PeerEstablished)}
			a.b.Pools[0].Spec.BGP = &v1.PoolBGP{PoolRoute: v1.PoolRoute{Peers: []string{"r1", "r2"}}}
		}, []string{"here"}, false, []string{
			"node here announces it by bgp since 2026-01-01T12:00:00Z: first owner  [Speaker here status.addresses]",
			"node here: BGP peer r1 (192.0.2.1) is Established since 2026-01-01T11:00:00Z  [Speaker here status.peers]",
			"node here: BGP peer r2 (192.0.2.1) is Active since 2026-01-01T11:00:00Z: connection refused  [Speaker here status.peers]"}, "r3"},
		"a dead node": {func(a *announcing) {
			a.b.Nodes[0].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		}, nil, true, []string{"node here has reported to announce it by arp on eth0 since 2026-01-01T12:00:00Z, and cannot have taken that back",
			"node here does not announce it: nothing is heard of it  [Node here condition Ready]",
			"node there does not announce it: it could: "}, ""},
		"not eligible": {func(a *announcing) {
			a.silence(func(here, there *v1.SpeakerStatus) {
				here.Eligible, here.Reason = false, "the node has the label x"
				there.ReturnBy = new(metav1.NewMicroTime(time.Now().Add(-time.Second)))
			})
		}, nil, true, []string{"node here does not announce it: the node has the label x  [Speaker here status.reason]",
			"node there does not announce it: its speaker ended to be restarted, and has not returned  [Speaker there status.returnBy]"}, ""},
		"routed by other means": {func(a *announcing) {
			a.silence(func(_, there *v1.SpeakerStatus) { there.Announce = v1.AnnounceNone })
		}, nil, false, []string{"node there does not announce it: --lb-announce none  [Speaker there status.announce]"}, ""},
		"another network, and no session": {func(a *announcing) {
			a.silence(func(here, there *v1.SpeakerStatus) {
				here.Networks = []string{"198.51.100.0/24"}
				there.Announce, there.Interfaces, there.Peers = v1.AnnounceBGP, nil, []v1.PeerStatus{peer("r1", "Idle")}
			})
		}, nil, true, []string{"node here does not announce it: its networks 198.51.100.0/24 do not have the address; it has no BGP peer  " +
			"[Speaker here status.announce, status.networks, status.peers]",
			"BGP peer r1 (192.0.2.1) is Idle since 2026-01-01T11:00:00Z: connection refused"}, ""},
		"what the pool leaves out": {func(a *announcing) {
			a.silence(nil)
			a.b.Nodes[1].Labels = map[string]string{"edge": "yes"}
			a.b.Pools[0].Spec = v1.IPAddressPoolSpec{Announce: []string{v1.AnnounceBGP},
				NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"edge": "yes"}}}
			a.b.Pools[0].Status.Conditions = []metav1.Condition{{Type: v1.PoolAnnounceable, Status: metav1.ConditionFalse, Message: "no way"}}
		}, nil, true, []string{"no way  [IPAddressPool public condition Announceable]",
			"node here does not announce it: the pool's nodeSelector edge=yes does not select it  [IPAddressPool public spec.nodeSelector]",
			"node there does not announce it: the pool is not for ARP and NDP; it has no BGP peer"}, ""},
		"policy Local": {func(a *announcing) {
			a.silence(nil)
			a.service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			a.slice.Endpoints = slices.DeleteFunc(a.slice.Endpoints, func(e discoveryv1.Endpoint) bool { return *e.NodeName == "there" })
		}, nil, true, []string{"node here does not announce it: it could: ",
			"node there does not announce it: policy Local, and it has no ready endpoint  [Service default/web spec.externalTrafficPolicy]"}, ""},
		"a status that does not list all": {func(a *announcing) {
			a.silence(func(_, there *v1.SpeakerStatus) { there.AddressCount = 2000 })
		}, nil, false, []string{"node there does not announce it: it announces 2000 addresses, and its status lists 0 of them"}, ""},
		"no speaker": {func(a *announcing) { a.b.Speakers = nil }, nil, false, []string{
			"no node has a speaker: the address must be routed to the nodes by other means  [Speakers]"}, ""},
		"not of fairlead": {func(a *announcing) { a.b.Claims, a.b.Speakers[0].Status.Addresses = nil, nil }, nil, false, []string{
			"fairlead has not given the address to it"}, "does not announce"},
		"no rights": {func(a *announcing) {
			a.b = Balancers{Blind: true, Unread: []Line{{"which node announces an address is not known: no", "Speakers"}, {"no", ClaimKind}}}
		}, nil, false, []string{"which node announces an address is not known: no  [Speakers]"}, "no node announces"},
		"the proxied way": {func(a *announcing) {
			a.service.Annotations = map[string]string{
				"service.beta.kubernetes.io/aws-load-balancer-ssl-cert":         "arn:aws:acm:us-east-1:123456789012:certificate/web-cert",
				"service.beta.kubernetes.io/aws-load-balancer-backend-protocol": "http"}
		}, []string{"here"}, false, []string{"it takes the proxied way, because of service.beta.kubernetes.io/aws-load-balancer-",
			"listener on port 80: https from clients, http to endpoints  [Service default/web spec.ports[0]]"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAnnouncing()
			c.change(a)
			o := &Objects{Services: []*corev1.Service{a.service}, Slices: []*discoveryv1.EndpointSlice{a.slice}}
			got := o.Balance(&a.b, a.service, netip.Addr{})
			if len(got.Addresses) != 1 {
				t.Fatalf("%+v", got)
			}
			var by []string
			var text strings.Builder
			for _, n := range got.Addresses[0].Announcers {
				by = append(by, n.Node)
			}
			for _, l := range slices.Concat(got.Lines, got.Addresses[0].Lines) {
				fmt.Fprintf(&text, "%s  [%s]\n", l.Text, l.Source)
			}
			if !slices.Equal(by, c.by) || got.Addresses[0].Nobody != c.nobody {
				t.Errorf("announced by %v, by nobody %t; want %v, %t", by, got.Addresses[0].Nobody, c.by, c.nobody)
			}
			for _, want := range c.lines {
				if !strings.Contains(text.String(), want) {
					t.Errorf("no %q in\n%s", want, text.String())
				}
			}
			if c.not != "" && strings.Contains(text.String(), c.not) {
				t.Errorf("%q in\n%s", c.not, text.String())
			}
		})
	}
	if (&Objects{}).Balance(&Balancers{}, &corev1.Service{}, netip.Addr{}) != nil {
		t.Error("a Service of type ClusterIP has a load balancer")
	}
}

// A client outside of all nodes does not reach an address that no node announces; nodes and their Pods do.
func TestNobodyAnnounces(t *testing.T) {
	for name, c := range map[string]struct {
		client Client
		answer Answer
		cause  Cause
	}{
		"outside":  {Client{Text: "x", Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.9")}}, Dropped, NoRoute},
		"the node": {Client{Text: "here", Addrs: []netip.Addr{netip.MustParseAddr("192.168.70.11")}, Node: "here", Host: true}, Answers, ""},
		"any":      {Client{}, Answers, ""},
	} {
		b := newBed()
		b.q.Client = c.client
		b.unannounced = map[string]Line{"203.0.113.1": {"no node announces 203.0.113.1", "Speakers"}}
		v := b.explain()
		if v.Answer != c.answer || v.Cause != c.cause {
			t.Errorf("%s: %s, %s; want %s, %s", name, v.Answer, v.Cause, c.answer, c.cause)
		}
	}
}

// An address is served, has a problem, is of another controller, or is not known: only what fairlead must announce and no node does is a
// problem.
func TestStandings(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*announcing)
		want   Standing
		reason string
	}{
		"announced": {func(*announcing) {}, Served, ""},
		"by nobody": {func(a *announcing) { a.silence(nil) }, HasProblem, "no node announces it"},
		"of another class": {func(a *announcing) {
			a.silence(nil)
			a.service.Spec.LoadBalancerClass = new("x.example/lb")
		}, Foreign, "x.example/lb"},
		"of fairlead's":    {func(a *announcing) { a.service.Spec.LoadBalancerClass = new(svc.LoadBalancerClass) }, Served, ""},
		"not given":        {func(a *announcing) { a.b.Claims = nil; a.silence(nil) }, Foreign, "another controller or a user"},
		"given to another": {func(a *announcing) { a.b.Claims[0].Services[0].Name = "api" }, HasProblem, "the address is of default/api"},
		"no speaker":       {func(a *announcing) { a.b.Speakers = nil }, NotKnown, "routed to the nodes by other means"},
		"--lb-announce none": {func(a *announcing) {
			a.silence(func(here, _ *v1.SpeakerStatus) { here.Announce = v1.AnnounceNone })
		}, NotKnown, "other means"},
		"not in the list": {func(a *announcing) {
			a.silence(func(here, _ *v1.SpeakerStatus) { here.AddressCount = 1001 })
		}, NotKnown, "other means"},
		"no right to Speakers": {func(a *announcing) {
			a.b.Speakers, a.b.Blind, a.b.Unread = nil, true, []Line{{"which node is not known: no", "Speakers"}}
		}, NotKnown, "which node is not known"},
		"no right to claims": {func(a *announcing) {
			a.silence(nil)
			a.b.Claims, a.b.Unread = nil, []Line{{"of which pool is not known: no", ClaimKind}}
		}, NotKnown, "of which pool"},
		"no right to claims, and announced": {func(a *announcing) { a.b.Claims, a.b.Unread = nil, []Line{{"no", ClaimKind}} }, Served, ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAnnouncing()
			c.change(a)
			got := (&Objects{}).Balance(&a.b, a.service, netip.Addr{}).Addresses[0]
			if got.Status != c.want || !strings.Contains(got.Reason, c.reason) || (got.Reason == "") != (c.want == Served) {
				t.Errorf("%s, %q; want %s, %q", got.Status, got.Reason, c.want, c.reason)
			}
			if got.Nobody != (name == "by nobody") {
				t.Errorf("announced by nobody is %t", got.Nobody)
			}
			given := len(a.b.Claims) > 0 && name != "given to another"
			if pool := a.b.PoolOf(a.service, netip.MustParseAddr(got.Address)); (pool != "") != given {
				t.Errorf("the pool is %q", pool)
			}
			if j := a.b.Judge(a.service, netip.Addr{}); c.want != Foreign && j.Status != Foreign {
				t.Errorf("a hostname is %s", j.Status)
			}
		})
	}
	s := &corev1.Service{}
	if j := Pending(s); j.Status != HasProblem {
		t.Errorf("without an address: %+v", j)
	}
	s.Spec.LoadBalancerClass = new("x.example/lb")
	if j := Pending(s); j.Status != Foreign {
		t.Errorf("without an address, and of another class: %+v", j)
	}
}
