package table

import (
	"cmp"
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Candidate is an endpoint of a service port before a policy chooses.
type Candidate struct {
	Addr netip.AddrPort
	State
	// Weight is as Endpoint.Weight has it.
	Weight uint16
	// Near reports that the endpoint is preferred while it is ready, whatever topology hints say.
	Near bool
	// Unreached reports that this node does not reach the endpoint's node: it is the last choice.
	Unreached bool
	// Node is the node that the endpoint is on, if that is another one than this.
	Node nodeName
	// Origin is for the caller, who may number its endpoints by it.
	Origin int32
	Hints  *discoveryv1.EndpointHints
}

// State is the condition of an endpoint, the better one the greater.
type State uint8

// An endpoint that is ready takes new connections. One that is draining is not ready, but still serves while it
// terminates: the second choice. A serving one may keep the flows that it has; ready and draining ones are serving, too.
// A local one is on this node.
const (
	Serving State = 1 << iota
	Draining
	Ready
	Local
)

// Is reports whether s includes what.
func (s State) Is(what State) bool { return s&what != 0 }

// Idle returns the state of an endpoint of weight 0: it gets no new connection, and keeps its connections.
func (s State) Idle() State { return s &^ (Ready | Draining) }

// StateOf returns the state of an endpoint for a node.
func StateOf(ep *discoveryv1.Endpoint, nodeName string) State {
	var s State
	switch c := &ep.Conditions; {
	case deref(c.Ready, true):
		s = Ready | Serving
	case deref(c.Serving, true) && deref(c.Terminating, false):
		s = Draining | Serving
	case deref(c.Serving, false):
		s = Serving
	}
	if ep.NodeName != nil && *ep.NodeName == nodeName {
		s |= Local
	}
	return s
}

// EndpointAddr returns the address of an endpoint, the first one, or what is wrong with it (behaviour 24). The API keeps
// further addresses only for compatibility.
func EndpointAddr(ep *discoveryv1.Endpoint, family svc.Family) (a netip.Addr, bad string) {
	if len(ep.Addresses) == 0 {
		return netip.Addr{}, "no address"
	}
	text := ep.Addresses[0]
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, text + " (not an address)"
	}
	a = a.Unmap()
	if why := badEndpoint(a); why != "" {
		return netip.Addr{}, text + " (" + why + ")"
	}
	if svc.FamilyOf(a) != family {
		return netip.Addr{}, text + " (not " + family.String() + ")"
	}
	return a, ""
}

// Unique sorts candidates by address and keeps each address once. An endpoint in two slices (it may be moving from one
// to the other) counts with its best state.
func Unique(all []Candidate) []Candidate {
	slices.SortStableFunc(all, func(a, b Candidate) int {
		if c := a.Addr.Compare(b.Addr); c != 0 {
			return c
		}
		return cmp.Or(cmp.Compare(b.State, a.State), cmp.Compare(b.Weight, a.Weight))
	})
	return slices.CompactFunc(all, func(a, b Candidate) bool { return a.Addr == b.Addr })
}

// ForCluster returns the test for the endpoints of one port that policy Cluster sends new connections to: the ready ones,
// narrowed to the Near ones or else by topology hints; without a ready one the draining ones (behaviour 199). Unreached ones
// count only if there is no other one of either kind.
func ForCluster(all []Candidate, node, zone string) func(*Candidate) bool {
	counts := reached(all)
	hasReady, near := false, false
	for i := range all {
		if c := &all[i]; counts(c) && c.Is(Ready) {
			hasReady, near = true, near || c.Near
		}
	}
	if !hasReady {
		return func(c *Candidate) bool { return counts(c) && c.Is(Draining) }
	}
	if near {
		return func(c *Candidate) bool { return counts(c) && c.Is(Ready) && c.Near }
	}
	hinted := byHints(all, node, zone, counts)
	return func(c *Candidate) bool { return counts(c) && c.Is(Ready) && hinted(c) }
}

// reached returns the test for the endpoints on nodes that this one reaches; all pass if none of those takes new connections.
func reached(all []Candidate) func(*Candidate) bool {
	some, other := false, false
	for i := range all {
		c := &all[i]
		some = some || c.Unreached
		other = other || !c.Unreached && c.Is(Ready|Draining)
	}
	if !some || !other {
		return func(*Candidate) bool { return true }
	}
	return func(c *Candidate) bool { return !c.Unreached }
}

// ForLocal returns the test for the endpoints of one port that policy Local sends new connections to: the ready ones of
// this node; without one the draining ones of this node (KEP-1669). Topology hints do not count.
func ForLocal(all []Candidate) func(*Candidate) bool {
	want := Draining
	if slices.ContainsFunc(all, func(c Candidate) bool { return c.Is(Ready) && c.Is(Local) }) {
		want = Ready
	}
	return func(c *Candidate) bool { return c.Is(want) && c.Is(Local) }
}

// byHints returns the test that topology puts to a ready endpoint. Hints count only if every ready endpoint has one of
// the kind and one of them names this node (or else its zone): missing hints mean that their writer has not finished, so
// all traffic would go to the few endpoints with hints. So an endpoint is left out only if another ready one remains.
func byHints(all []Candidate, node, zone string, counts func(*Candidate) bool) func(*Candidate) bool {
	nodeHints, zoneHints, forNode, forZone := true, true, false, false
	for i := range all {
		if c := &all[i]; counts(c) && c.Is(Ready) {
			nodeHints = nodeHints && c.Hints != nil && len(c.Hints.ForNodes) > 0
			zoneHints = zoneHints && c.Hints != nil && len(c.Hints.ForZones) > 0
			forNode = forNode || c.isForNode(node)
			forZone = forZone || c.isForZone(zone)
		}
	}
	switch {
	case nodeHints && forNode:
		return func(c *Candidate) bool { return c.isForNode(node) }
	case zoneHints && forZone:
		return func(c *Candidate) bool { return c.isForZone(zone) }
	}
	return func(*Candidate) bool { return true }
}

func (c *Candidate) isForNode(node string) bool {
	return c.Hints != nil && slices.ContainsFunc(c.Hints.ForNodes, func(n discoveryv1.ForNode) bool { return n.Name == node })
}

func (c *Candidate) isForZone(zone string) bool {
	return c.Hints != nil && zone != "" && slices.ContainsFunc(c.Hints.ForZones, func(z discoveryv1.ForZone) bool { return z.Name == zone })
}
