package controller

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// announceWait is how long a Gateway that all nodes serve waits for a node that announces its addresses. Others may route them to the
	// nodes, of which nothing is known here.
	announceWait = time.Second
	// holdPeriod is how long the status of a Gateway that is programmed stays while nodes take a change over.
	holdPeriod = time.Second
)

// awaited is what nodes have to serve of a Gateway.
type awaited struct {
	version string // of watch.State.Versions
	addrs   []string
	since   time.Time
	served  time.Time // by all nodes; zero before
	done    bool      // it was programmed
}

// pending returns what a Gateway that has its addresses still waits for before it is programmed, "" if nothing. What has been programmed
// once stays so, whichever nodes come later. hold is true while the status that the Gateway has may stay.
func (c *controller) pending(n svc.Name, g *gwv1.Gateway, version string, addrs []string) (why string, hold bool) {
	now := time.Now()
	a := c.awaited[n]
	if a == nil || a.version != version || !slices.Equal(a.addrs, addrs) {
		first := a == nil // of this term
		a = &awaited{version: version, addrs: addrs, since: now, done: first && wasProgrammed(g, addrs)}
		c.awaited[n] = a
	}
	if a.done {
		return "", false
	}
	why, announced := c.unserved.unready(n, version, addrs)
	if why == "" && a.served.IsZero() {
		a.served = now
	}
	unannounced := why == "" && !announced && now.Sub(a.served) < announceWait
	if unannounced {
		why = "no node announces its addresses yet"
	}
	a.done = why == ""
	hold = !a.done && now.Sub(a.since) < holdPeriod && meta.IsStatusConditionTrue(g.Status.Conditions, programmed)
	// Time ends these two; what nodes lack ends with a change of their Speakers.
	c.postponed = c.postponed || hold || unannounced
	return why, hold
}

const programmed = string(gwv1.GatewayConditionProgrammed)

// wasProgrammed reports whether a Gateway was programmed as it is now, by its status.
func wasProgrammed(g *gwv1.Gateway, addrs []string) bool {
	k := meta.FindStatusCondition(g.Status.Conditions, programmed)
	return k != nil && k.Status == metav1.ConditionTrue && k.ObservedGeneration == g.Generation &&
		slices.EqualFunc(g.Status.Addresses, addrs, func(have gwv1.GatewayStatusAddress, want string) bool { return have.Value == want })
}

// unready returns why a version of a Gateway is not served at its addresses by all nodes yet, "" if it is, and whether these are
// announced. A node is asked if it is ready, may announce addresses, and reports what it serves.
func (u *unserved) unready(n svc.Name, version string, addrs []string) (why string, announced bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.followed || u.unlisted > 0 {
		return "it is not known yet which nodes serve it", false
	}
	missing := map[netip.Addr]bool{}
	for _, a := range addrs {
		missing[addrOf(a)] = true
	}
	var lagging []string
	asked, idle := false, false
	for name, s := range u.speakers {
		ready, exists := u.nodes[name]
		if !exists || s.gateways == nil {
			continue
		}
		if !ready || !s.eligible {
			idle = true
			continue
		}
		asked = true
		i, has := slices.BinarySearchFunc(s.gateways.Served, n.String(), func(g v1.ServedGateway, name string) int {
			return strings.Compare(g.Name, name)
		})
		switch {
		case !has && s.gateways.More: // it may be one of those
			clear(missing)
		case !has || s.gateways.Served[i].Version != version || !servesAt(&s.gateways.Served[i], addrs):
			lagging = append(lagging, name)
		default:
			for _, a := range s.gateways.Served[i].Announced {
				delete(missing, addrOf(a))
			}
		}
	}
	switch {
	case len(lagging) > 0:
		why = "waiting for nodes to serve it: " + list(lagging, ", ")
	case idle && !asked:
		why = "no node may announce addresses now: fairlead lb status has the reasons"
	}
	return why, len(missing) == 0
}

// servesAt reports whether a node serves a Gateway at all of some addresses.
func servesAt(g *v1.ServedGateway, addrs []string) bool {
	return !slices.ContainsFunc(addrs, func(a string) bool {
		return !slices.ContainsFunc(g.Addresses, func(b string) bool { return addrOf(a) == addrOf(b) })
	})
}

// addrOf returns the address of a status, which the API server has validated.
func addrOf(text string) netip.Addr {
	a, _ := netip.ParseAddr(text)
	return a
}

// asPending gives a status that is not programmed since nodes do not serve it yet the reason for that.
func asPending(s gwv1.GatewayStatus) gwv1.GatewayStatus {
	if k := meta.FindStatusCondition(s.Conditions, programmed); k != nil {
		k.Reason = string(gwv1.GatewayReasonPending)
	}
	return s
}
