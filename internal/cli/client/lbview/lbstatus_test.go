package lbview

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/lb/owners"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// What a node reported before it died is stale; several announce by BGP at once.
func TestStaleOwners(t *testing.T) {
	speaker := func(name, address, via string, since int64) v1.Speaker {
		return v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.SpeakerStatus{Addresses: []v1.AnnouncedAddress{
			{Address: address, Via: via, Since: metav1.NewMicroTime(time.Unix(since, 0))}}}}
	}
	returns := func(s v1.Speaker, within time.Duration) v1.Speaker {
		s.Status.ReturnBy = new(metav1.NewMicroTime(time.Now().Add(within)))
		return s
	}
	all := owners.Of([]v1.Speaker{
		speaker("dead", "192.0.2.1", "arp", 1), speaker("alive", "192.0.2.1", "arp", 2),
		speaker("r1", "192.0.2.2", "bgp", 1), speaker("r2", "192.0.2.2", "bgp", 2), speaker("silent", "192.0.2.2", "bgp", 3),
		speaker("silent", "2001:db8::1", "ndp", 1), returns(speaker("restarts", "192.0.2.3", "arp", 1), time.Hour),
		returns(speaker("gone", "192.0.2.4", "arp", 1), -time.Second), returns(speaker("gone", "192.0.2.2", "bgp", 1), -time.Second),
	}, map[string]bool{"silent": true})
	want := map[string]bool{"restarts": false, "gone": true, "dead": true, "alive": false, "r1": false, "r2": false, "silent": true}
	seen := 0
	for _, list := range all {
		for _, o := range list {
			seen++
			if o.Stale != want[o.Node] {
				t.Errorf("%s by %s: stale is %t", o.Node, o.Via, o.Stale)
			}
		}
	}
	if seen != 9 {
		t.Errorf("%d owners, want 9", seen)
	}
}

// A node with --lb-announce none is shown, and so is one that may not announce; one that does, or died, is not.
func TestNodesThatAnnounceNothing(t *testing.T) {
	speaker := func(name string, status v1.SpeakerStatus) v1.Speaker {
		return v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: status}
	}
	r := &Report{Services: []lbService{{Namespace: "shop", Name: "web", Pending: true, Way: "direct"}}}
	r.NotAnnouncing = idleNodes([]v1.Speaker{
		speaker("announces", v1.SpeakerStatus{Eligible: true, Announce: "arp"}), speaker("dead", v1.SpeakerStatus{}),
		speaker("excluded", v1.SpeakerStatus{Announce: "arp", Reason: "it is cordoned"}),
		speaker("leaves", v1.SpeakerStatus{Announce: "arp", Addresses: []v1.AnnouncedAddress{{Address: "192.0.2.1"}}}),
		speaker("missing", v1.SpeakerStatus{Announce: "arp", Addresses: []v1.AnnouncedAddress{{Address: "192.0.2.2"}},
			ReturnBy: new(metav1.NewMicroTime(time.Now().Add(-time.Second)))}),
	}, map[string]bool{"announces": false, "dead": true, "excluded": false, "gone": true, "none": false})
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	_, got, _ := strings.Cut(out.String(), "node ")
	want := "excluded announces nothing: it is cordoned\n" +
		"node missing announces nothing: its speaker ended to be restarted, and has not returned\n" +
		"node none announces nothing: it has no speaker, or one with --lb-announce none\n"
	if got != want {
		t.Errorf("%s", out.String())
	}
}

// Tags are shown after the table, without anything that a terminal would take for its own (behaviour 130).
func TestTagsOfLoadBalancers(t *testing.T) {
	r := &Report{Services: []lbService{{Namespace: "shop", Name: "web", Pending: true, Way: "direct",
		Tags: map[string]string{"owner": "devops", "env": "a\x1b[2J"}}}}
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	_, got, _ := strings.Cut(out.String(), "tag of")
	if !strings.HasPrefix(got, " shop/web: env=a") || !strings.HasSuffix(got, "\ntag of shop/web: owner=devops\n") ||
		strings.Contains(got, "\x1b") {
		t.Errorf("%q", out.String())
	}
}

// An address whose owners all died is said to be announced by no node, with the reason that the controller has recorded.
func TestNobodyAnnounces(t *testing.T) {
	stale, lives := lbOwner{Node: "dead", Via: "arp", Stale: true}, lbOwner{Node: "lives", Via: "arp"}
	r := &Report{Services: []lbService{
		{Namespace: "shop", Name: "web", Way: "direct", Reason: "NotAnnounceable: nothing is heard of dead",
			Addresses: []lbAddress{{Address: "192.0.2.1", Owners: []lbOwner{stale},
				Judgement: explain.Judgement{Status: explain.HasProblem}}}},
		{Namespace: "shop", Name: "moved", Way: "direct", Addresses: []lbAddress{{Address: "192.0.2.2", Owners: []lbOwner{stale, lives}}}},
	}}
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	_, got, _ := strings.Cut(out.String(), "no node announces")
	if got != " 192.0.2.1 of shop/web: NotAnnounceable: nothing is heard of dead\n" {
		t.Errorf("%s", out.String())
	}
}

// Endpoints that get no new clients are shown with the node, the reason and since when; what a dead node reported is not.
func TestAbsentEndpoints(t *testing.T) {
	since := time.Date(2026, 11, 24, 10, 0, 0, 0, time.Local)
	speaker := func(name, endpoint, pod string) v1.Speaker {
		return v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.SpeakerStatus{Absent: []v1.AbsentEndpoint{
			{Service: "shop/web", Endpoint: endpoint, Pod: pod, Since: metav1.NewTime(since), Reason: "health check: status 500\x1b[31m"}}}}
	}
	absent := absentOf([]v1.Speaker{
		speaker("n2", "10.0.0.2:80", ""), speaker("n1", "10.0.0.1:80", "web-1"), speaker("dead", "10.0.0.3:80", ""),
	}, map[string]bool{"dead": true})
	r := &Report{Services: []lbService{{Namespace: "shop", Name: "web", Way: "proxied", Absent: absent["shop/web"]}}}
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	_, got, _ := strings.Cut(out.String(), "\n")
	want := "endpoint 10.0.0.1:80 (Pod web-1) of shop/web gets no new clients from node n1 since 2026-11-24 10:00:00: health check: status 500"
	if !strings.HasPrefix(got, want) || strings.Count(got, "\n") != 2 || strings.Contains(got, "\x1b") || strings.Contains(got, "10.0.0.3") {
		t.Errorf("%q, want %q and one of n2", got, want)
	}
}

// Without an Event, the reason and the remedy are what the pool's condition has.
func TestReasonOfThePool(t *testing.T) {
	pool := func(name string, status metav1.ConditionStatus) v1.IPAddressPool {
		return v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.IPAddressPoolStatus{Conditions: []metav1.Condition{
			{Type: v1.PoolAnnounceable, Status: status, Reason: "NotAnnounceable", Message: "do this"}}}}
	}
	reasons := poolReasons([]v1.IPAddressPool{pool("good", metav1.ConditionTrue), pool("bad", metav1.ConditionFalse)})
	for name, want := range map[string]string{"good": "", "bad": "NotAnnounceable: do this", "": ""} {
		s := lbService{Addresses: []lbAddress{{Address: "192.0.2.1", Pool: name, Judgement: explain.Judgement{Status: explain.HasProblem}}}}
		if got := s.poolReason(reasons); got != want {
			t.Errorf("pool %q: %q, want %q", name, got, want)
		}
	}
}
