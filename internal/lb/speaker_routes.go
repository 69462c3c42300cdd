package lb

import (
	"context"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// How a speaker announces addresses, beside by BGP to the BGPPeers of its node.
const (
	AnnounceARP  = "arp"  // by ARP and NDP
	AnnounceBGP  = "bgp"  // in no other way
	AnnounceNone = "none" // not at all, and not by BGP either
)

// routing is what a speaker announces by BGP. Every node that may announces every
// address: there are no votes. The loop alone uses it.
type routing struct {
	routes *routes // nil with AnnounceNone
	began  time.Time
	begun  bool
	may    bool // whether the node did, when it was last looked at
	// since is when each address was announced first, and unprogrammed are those that
	// wait for the proxy.
	since        map[netip.Addr]time.Time
	unprogrammed map[netip.Addr]struct{}
	peers        []v1.PeerStatus // as they were last reported
}

// beginAnyway is after how long the sessions begin although the node may not announce
// yet. Until then a router with graceful restart keeps the routes of this node's
// earlier process, over which its kernel still forwards.
const beginAnyway = 10 * time.Second

// closeTimeout bounds how long Run waits for routers to take the withdrawals.
const closeTimeout = 2 * time.Second

func newRouting(s *Speaker) routing {
	r := routing{began: time.Now(), since: map[netip.Addr]time.Time{}, unprogrammed: map[netip.Addr]struct{}{}}
	if s.o.Announce != AnnounceNone {
		r.routes = newRoutes(routesOptions{
			Client: s.client, LB: s.lb, Node: s.o.NodeName, Peers: s.o.BGPPeers, Log: s.log, Events: s.events, Changed: s.known.poke,
		})
		s.metrics.registry.MustRegister(r.routes)
	}
	return r
}

// route announces and withdraws what the changed addresses ask for. reason is why the
// node may not announce, if it may not.
func (s *Speaker) route(node *corev1.Node, reason string, changed []address) {
	r := &s.routing
	if r.routes == nil {
		return
	}
	r.routes.SetNode(node)
	if may := reason == ""; may != r.may {
		r.may = may
		changed = s.known.every()
	}
	for i := range changed {
		s.routeOne(&changed[i])
	}
	for a := range r.unprogrammed {
		known := s.known.one(a)
		s.routeOne(&known)
	}
	ready := r.may && len(r.unprogrammed) == 0 || time.Since(r.began) > beginAnyway
	if !r.begun && ready && s.known.listed() {
		r.begun = true
		r.routes.Begin()
	}
	if now := r.routes.Status(); !slices.Equal(now, r.peers) {
		r.peers = now
		s.status.poke()
	}
}

func (s *Speaker) routeOne(a *address) {
	r := &s.routing
	wanted := r.may && len(a.services) > 0 && (!a.local || slices.Contains(a.nodes, s.o.NodeName))
	delete(r.unprogrammed, a.addr)
	switch _, announced := r.since[a.addr]; {
	case !wanted && announced:
		r.routes.Withdraw(a.addr)
		delete(r.since, a.addr)
		s.log.Info("withdrawing a route", "address", a.addr)
		s.status.poke()
	case wanted && !announced && !s.programmed(a):
		r.unprogrammed[a.addr] = struct{}{}
	case wanted:
		r.routes.Announce(a.addr, a.ways.object) // with the attributes that its pool has now
		if !announced {
			r.since[a.addr] = time.Now()
			s.log.Info("announcing a route", "address", a.addr, "service", names(a.services))
			s.status.poke()
		}
	}
}

// statusOf adds what is announced by BGP to a status.
func (r *routing) statusOf(status *v1.SpeakerStatus) {
	status.Peers = r.peers
	if len(r.peers) == 0 {
		return
	}
	for a, since := range r.since {
		status.Addresses = append(status.Addresses, v1.AnnouncedAddress{Address: a.String(), Via: "bgp", Since: metav1.NewMicroTime(since)})
	}
}

// close withdraws all routes and returns when the routers have taken that.
func (r *routing) close(ctx context.Context) {
	if r.routes == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	r.routes.Close(ctx)
	clear(r.since)
	r.peers = nil
}
