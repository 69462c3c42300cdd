package controller

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// served returns what a speaker reports that serves a version of shop/front at 192.0.2.1.
func served(version string, announced ...string) *speaking {
	return &speaking{eligible: true, gateways: &v1.ServedGateways{Served: []v1.ServedGateway{
		{Name: "a/other", Version: "x"},
		{Name: "shop/front", Version: version, Addresses: []string{"192.0.2.1"}, Announced: announced},
	}}}
}

// A Gateway is programmed once all nodes that may announce its addresses serve its listeners there.
func TestUnready(t *testing.T) {
	t.Parallel()
	type speakers = map[string]*speaking
	silent, old := served("1"), served("1")
	silent.eligible, old.gateways = false, nil
	elsewhere := served("2")
	elsewhere.gateways.Served[1].Addresses = []string{"192.0.2.9"}
	many := &speaking{eligible: true, gateways: &v1.ServedGateways{More: true}}
	two := map[string]bool{"n1": true, "n2": true}
	for _, c := range []struct {
		what      string
		nodes     map[string]bool
		speakers  speakers
		want      string // part of why, "" if the Gateway is served
		announced bool
	}{
		{"no node has a Speaker", two, nil, "", false},
		{"all serve it, one announces", two, speakers{"n1": served("2"), "n2": served("2", "192.0.2.1")}, "", true},
		{"none announces", two, speakers{"n1": served("2"), "n2": served("2")}, "", false},
		{"one serves an older version", two, speakers{"n1": served("2", "192.0.2.1"), "n2": served("1")}, "serve it: n2", true},
		{"one knows none", two, speakers{"n1": served("2"), "n2": {eligible: true, gateways: &v1.ServedGateways{}}}, "serve it: n2", false},
		{"one serves another address", two, speakers{"n1": served("2"), "n2": elsewhere}, "serve it: n2", false},
		{"one does not report", two, speakers{"n1": served("2"), "n2": old}, "", false},
		{"one may not announce", two, speakers{"n1": served("2"), "n2": silent}, "", false},
		{"one is not ready", map[string]bool{"n1": true, "n2": false}, speakers{"n1": served("2"), "n2": served("1")}, "", false},
		{"one has gone", map[string]bool{"n1": true}, speakers{"n1": served("2"), "n2": served("1")}, "", false},
		{"one has too many", two, speakers{"n1": served("2"), "n2": many}, "", true},
		{"none may announce", two, speakers{"n1": silent, "n2": silent}, "no node may announce", false},
		{"two lag", two, speakers{"n1": served("1"), "n2": served("1")}, "serve it: n1, n2", false},
	} {
		u := &unserved{followed: true, nodes: c.nodes, speakers: c.speakers}
		why, announced := u.unready(svc.Name{Namespace: "shop", Name: "front"}, "2", []string{"192.0.2.1"})
		if (why == "") != (c.want == "") || !strings.Contains(why, c.want) || announced != c.announced {
			t.Errorf("%s: %q, announced %t; want %q, %t", c.what, why, announced, c.want, c.announced)
		}
	}
	for _, u := range []*unserved{{}, {followed: true, unlisted: 1}} {
		if why, _ := u.unready(svc.Name{}, "", nil); why == "" {
			t.Errorf("%+v knows of all nodes", u)
		}
	}
}

// The status of a Gateway that is programmed stays for a moment while nodes take a change over; an address that no node announces is
// waited for no longer than announceWait; and a node that comes later is not waited for.
func TestPending(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n, addrs := svc.Name{Namespace: "shop", Name: "front"}, []string{"192.0.2.1"}
		u := &unserved{followed: true, nodes: map[string]bool{"n1": true, "n2": true}, speakers: map[string]*speaking{"n1": served("1")}}
		c := &controller{unserved: u, awaited: map[svc.Name]*awaited{}}
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Generation: 3}}
		timed := false // a Gateway that waits for time is looked at again
		check := func(what, version string, pending, hold bool) {
			t.Helper()
			c.postponed = false
			why, held := c.pending(n, g, version, addrs)
			if (why != "") != pending || held != hold || c.postponed != (hold || timed) {
				t.Errorf("%s: %q, hold %t, again %t; want pending %t, hold %t", what, why, held, c.postponed, pending, hold)
			}
		}
		timed = true
		check("none announces", "1", true, false)
		timed = false
		time.Sleep(announceWait)
		check("others may route the address", "1", false, false)
		u.speakers["n2"] = served("0")
		check("a node comes later", "1", false, false)
		check("a change", "2", true, false)
		g.Status.Conditions = []metav1.Condition{{Type: programmed, Status: metav1.ConditionTrue, ObservedGeneration: 2}}
		check("a change of what is programmed", "3", true, true)
		time.Sleep(holdPeriod)
		check("it takes long", "3", true, false)
		u.speakers = map[string]*speaking{"n1": served("3", "192.0.2.1"), "n2": served("3")}
		check("all serve it", "3", false, false)

		for _, again := range []struct {
			generation int64
			address    string
			pending    bool
		}{{3, "192.0.2.1", false}, {2, "192.0.2.1", true}, {3, "192.0.2.7", true}} { // a new term
			c.awaited, u.speakers = map[svc.Name]*awaited{}, map[string]*speaking{"n1": served("0")}
			g.Status.Conditions[0].ObservedGeneration = again.generation
			g.Status.Addresses = []gwv1.GatewayStatusAddress{{Value: again.address}}
			check("a new term", "3", again.pending, again.pending)
		}
	})
}
