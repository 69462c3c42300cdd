package table

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Hop is a node that packets to a frontend are passed on to.
type Hop struct {
	// Node is its name. The choice between hops goes by the names, so that all nodes choose alike.
	Node string
	// Via is where this node sends the packets, by its own routes. It is not valid for this node itself.
	Via netip.Addr
	// Endpoints is the node's share of new flows. A hop without one only keeps the flows that it has.
	Endpoints int
}

// String returns "node-2 via 192.0.2.2 x3".
func (h Hop) String() string {
	if !h.Via.IsValid() {
		return fmt.Sprintf("%s x%d", h.Node, h.Endpoints)
	}
	return fmt.Sprintf("%s via %s x%d", h.Node, h.Via, h.Endpoints)
}

// HopTables are the sizes of the tables that choose between hops, primes, ascending. They are the same in all versions: nodes must
// agree.
//
//nolint:gochecknoglobals // constant
var HopTables = [...]int{61, 509, 4093}

// maxHopSlots bounds the slots of a Service for one address: without direct return a port takes one element there. Who may write
// Services decides how many ports and endpoints one has.
const maxHopSlots = 8192

// HopSlots returns the size of the table that chooses between hops.
func HopSlots(hops []Hop) int {
	n := 0
	for _, h := range hops {
		n += h.Endpoints
	}
	switch {
	case n <= 8:
		return HopTables[0]
	case n <= 64:
		return HopTables[1]
	}
	return HopTables[2]
}

// NextHop is where this node sends packets for another one, by family; a family that it cannot has no valid address.
type NextHop struct{ IPv4, IPv6 netip.Addr }

func (n NextHop) of(f svc.Family) netip.Addr {
	if f == svc.IPv6 {
		return n.IPv6
	}
	return n.IPv4
}

// forwarding is what Builder knows of direct return.
type forwarding struct {
	// wanted are the Services that ask for it.
	wanted map[*service]bool
	// nextHops are the other nodes; nil is not known yet.
	nextHops map[nodeName]NextHop
	// changed is called for each of them when nextHops changes.
	changed func(*service)
}

// ForwardsDirectly reports whether a Service of the last Build asks for direct return, so that SetNextHops matters.
func (f *forwarding) ForwardsDirectly() bool { return len(f.wanted) > 0 }

// SetNextHops sets how this node passes packets on to others, by their names. Nil is not known yet: until then Services that ask for
// direct return are translated.
func (f *forwarding) SetNextHops(hops map[string]NextHop) {
	var next map[nodeName]NextHop
	if hops != nil {
		next = make(map[nodeName]NextHop, len(hops))
		for name, h := range hops {
			next[unique.Make(name)] = h
		}
	}
	if (next == nil) == (f.nextHops == nil) && maps.Equal(next, f.nextHops) {
		return
	}
	f.nextHops = next
	for s := range f.wanted {
		f.changed(s)
	}
}

// wants reports whether s asks for direct return, by Config.Forwarding, and remembers that.
func (f *forwarding) wants(read func(map[string]string) (bool, error), s *service, c *complaints) bool {
	delete(f.wanted, s)
	if read == nil || s.obj == nil || !hasOutside(s.obj) {
		return false
	}
	direct, err := read(s.obj.Annotations)
	if err != nil {
		c.add(ReasonForwardingIgnored, "%v", err)
	}
	if direct {
		f.wanted[s] = true
	}
	return direct
}

// hasOutside reports whether a Service has addresses that direct return is for.
func hasOutside(s *corev1.Service) bool {
	return len(s.Spec.ExternalIPs) > 0 || len(s.Status.LoadBalancer.Ingress) > 0
}

// hops returns the nodes of the endpoints that policy Cluster chooses, by name. It returns none, with a Problem, if this node cannot
// pass packets on to one of them, or if the Service has too many ports. Nodes whose endpoints only serve keep flows of protocols that
// have none but ours.
func (f *forwarding) hops(
	all []Candidate, chosen func(*Candidate) bool, k Key, proto svc.Protocol, self string, ports int, c *complaints,
) []Hop {
	if f.nextHops == nil {
		return nil
	}
	found := map[string]*Hop{}
	for i := range all {
		e := &all[i]
		share := chosen(e)
		if !share && (proto == svc.TCP || !e.Is(Serving)) {
			continue
		}
		name, via := self, netip.Addr{}
		if !e.Is(Local) {
			name, via = f.wayTo(e, k.Family)
		}
		if !e.Is(Local) && !via.IsValid() {
			if share {
				c.add(ReasonForwardingIgnored, "annotation %s: %s; packets to port %q over %s are translated", svc.ForwardingAnnotation,
					noWay(e, name), k.ID.Port, k.Family)
				return nil
			}
			continue
		}
		if found[name] == nil {
			found[name] = &Hop{Node: name, Via: via}
		}
		if share {
			found[name].Endpoints++
		}
	}
	out := make([]Hop, 0, len(found))
	for _, h := range found {
		out = append(out, *h)
	}
	slices.SortFunc(out, func(a, b Hop) int { return cmp.Compare(a.Node, b.Node) })
	if !slices.ContainsFunc(out, func(h Hop) bool { return h.Endpoints > 0 }) {
		return nil
	}
	if n := HopSlots(out); n*ports > maxHopSlots {
		c.add(ReasonForwardingIgnored, "annotation %s: with this number of endpoints a Service may have %d ports, and it has %d; its packets "+
			"are translated", svc.ForwardingAnnotation, maxHopSlots/n, ports)
		return nil
	}
	return out
}

// wayTo returns the node of an endpoint, "" if it has none, and how packets get there.
func (f *forwarding) wayTo(e *Candidate, family svc.Family) (name string, via netip.Addr) {
	if e.Node == (nodeName{}) {
		return "", via
	}
	return e.Node.Value(), f.nextHops[e.Node].of(family)
}

// noWay is why packets cannot be passed on to the node of an endpoint.
func noWay(e *Candidate, node string) string {
	if node == "" {
		return fmt.Sprintf("endpoint %s is on no node", e.Addr)
	}
	return fmt.Sprintf("node %q is behind a router, and no VXLAN leads to it", node)
}
