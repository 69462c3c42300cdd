package speaker

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/routes"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// An address is announced by BGP since the oldest session with a peer that gets it, not earlier, and not at all without one.
func TestAnnouncedSinceTheFirstSession(t *testing.T) {
	a, begin := netip.MustParseAddr("198.51.100.7"), time.Now()
	at := func(seconds int) metav1.MicroTime {
		return metav1.NewMicroTime(begin.Add(time.Duration(seconds) * time.Second))
	}
	for _, c := range []struct {
		peers []v1.PeerStatus
		want  int // seconds, 0 for not at all
		only  []string
	}{
		{nil, 0, nil},
		{[]v1.PeerStatus{{Name: "a", State: "Idle", Since: at(1)}}, 0, nil},
		{[]v1.PeerStatus{{Name: "a", State: "Established", Since: at(9)}, {Name: "b", State: "Established", Since: at(5)}}, 5, nil},
		{[]v1.PeerStatus{{Name: "a", State: "Idle", Since: at(1)}, {Name: "b", State: "Established", Since: at(7)}}, 7, nil},
		{[]v1.PeerStatus{{Name: "a", State: "Established", Since: at(1)}}, 3, nil},
		{[]v1.PeerStatus{{Name: "a", State: "Established", Since: at(9)}, {Name: "b", State: "Established", Since: at(5)}}, 9, []string{"a"}},
		{[]v1.PeerStatus{{Name: "a", State: "Idle", Since: at(9)}, {Name: "b", State: "Established", Since: at(5)}}, 0, []string{"a", "c"}},
	} {
		r := routing{peers: c.peers, since: map[netip.Addr]time.Time{a: at(3).Time}, only: map[netip.Addr][]string{a: c.only}}
		var s v1.SpeakerStatus
		r.statusOf(&s)
		switch {
		case c.want == 0 && len(s.Addresses) > 0:
			t.Errorf("%+v: announced since %s without a session", c.peers, s.Addresses[0].Since)
		case c.want > 0 && (len(s.Addresses) != 1 || !s.Addresses[0].Since.Time.Equal(at(c.want).Time)):
			t.Errorf("%+v: %+v, want it announced since second %d", c.peers, s.Addresses, c.want)
		}
	}
}

// Sessions begin when all is announced, or at last without that, but routers with graceful restart then keep the routes of the
// earlier process for longer.
func TestSessionsBegin(t *testing.T) {
	waits := map[netip.Addr]struct{}{netip.MustParseAddr("198.51.100.7"): {}}
	for _, c := range []struct {
		name            string
		may             bool
		unlisted        int
		unprogrammed    map[netip.Addr]struct{}
		after           time.Duration
		begun, complete bool
		rebooted        bool
	}{
		{"all is announced", true, 0, nil, 0, true, true, false},
		{"nothing is known yet", true, 1, nil, time.Hour, false, false, false},
		{"the node may not announce", false, 0, nil, 9 * time.Second, false, false, false},
		{"an address is not programmed", true, 0, waits, 9 * time.Second, false, false, false},
		{"for long", true, 0, waits, 11 * time.Second, true, false, false},
		{"the node may not announce, for long", false, 0, nil, 59 * time.Second, true, false, false},
		{"for too long", true, 0, waits, 61 * time.Second, true, true, false},
		{"for long, after the machine has started", true, 0, waits, 11 * time.Second, true, true, true},
	} {
		r := routing{known: NewKnown("n", nil), may: c.may, rebooted: c.rebooted, unprogrammed: c.unprogrammed,
			routes: routes.New(routes.Options{Log: slog.New(slog.DiscardHandler), Node: "n"})}
		r.known.unlisted = c.unlisted
		r.begin(c.after)
		if r.begun != c.begun || r.complete != c.complete {
			t.Errorf("%s: begun is %t, complete %t", c.name, r.begun, r.complete)
		}
	}
}

// A node that is drained, or reports that it is not ready, is left for good; others are expected back.
func TestDepartingNodes(t *testing.T) {
	ready := func(s corev1.ConditionStatus) *corev1.Node {
		return &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: s}}}}
	}
	for name, c := range map[string]struct {
		node *corev1.Node
		want bool
	}{
		"cordoned":      {&corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true}}, true},
		"not ready":     {ready(corev1.ConditionFalse), true},
		"ready":         {ready(corev1.ConditionTrue), false},
		"not heard of":  {ready(corev1.ConditionUnknown), false},
		"no conditions": {&corev1.Node{}, false},
	} {
		if got := departs(c.node); got != c.want {
			t.Errorf("%s: departs is %t", name, got)
		}
	}
}
