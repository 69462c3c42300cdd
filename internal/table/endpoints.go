package table

import (
	"cmp"
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// candidate is an endpoint of a service port before policy is asked.
type candidate struct {
	addr netip.AddrPort
	endpointState
	weight uint16
	hints  *discoveryv1.EndpointHints
}

// endpointAddr reads the one address that counts of an endpoint; the API keeps
// further ones only for its own past.
func endpointAddr(ep *discoveryv1.Endpoint) (netip.Addr, string) {
	if len(ep.Addresses) == 0 {
		return netip.Addr{}, "no address"
	}
	a, err := netip.ParseAddr(ep.Addresses[0])
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, ep.Addresses[0] + " (not an address)"
	}
	a = a.Unmap()
	if why := badEndpoint(a); why != "" {
		return netip.Addr{}, ep.Addresses[0] + " (" + why + ")"
	}
	return a, ""
}

func deref[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// candidates returns the endpoints of one service port from the slices of its
// family, in address order and each once. An endpoint that stands in two slices
// (it may be moving from one to the other) counts with its best conditions.
func (b *Builder) candidates(s *service, k Key, proto svc.Protocol, c *complaints) []candidate {
	var out []candidate
	for _, slice := range s.slices {
		port := slice.portNumber(k.ID.Port, proto)
		if port == 0 || slice.family != k.Family {
			continue
		}
		for _, bad := range slice.bad {
			c.gather(ReasonInvalidEndpoint, bad)
		}
		out = slices.Grow(out, len(slice.endpoints))
		for i, ep := range slice.endpoints {
			if owner := b.vips.owner(ep.addr); owner != nil {
				c.gather(ReasonEndpointIsServiceIP, ep.addr.String()+" (clusterIP of "+owner.name.String()+")")
				continue
			}
			hints := slice.hint(i)
			at := netip.AddrPortFrom(ep.addr, port)
			out = append(out, candidate{addr: at, endpointState: b.stateNow(s, slice, i), weight: slice.weight, hints: hints})
			s.hinted = s.hinted || hints != nil
		}
	}
	slices.SortStableFunc(out, compareCandidates)
	return slices.CompactFunc(out, func(a, b candidate) bool { return a.addr == b.addr })
}

func compareCandidates(a, b candidate) int {
	if c := a.addr.Compare(b.addr); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(b.endpointState, a.endpointState), cmp.Compare(b.weight, a.weight))
}

// pick returns the candidates that keep accepts, nil if none.
func pick(all []candidate, keep func(*candidate) bool) []Endpoint {
	n := 0
	for i := range all {
		if keep(&all[i]) {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	out := make([]Endpoint, 0, n)
	for i := range all {
		if keep(&all[i]) {
			out = append(out, Endpoint{Addr: all[i].addr, Local: all[i].is(local), Weight: all[i].weight})
		}
	}
	return out
}

// clusterEndpoints is what policy Cluster may use: ready endpoints, narrowed by
// topology; without any ready one, those that drain.
func clusterEndpoints(all []candidate, node, zone string) []Endpoint {
	hinted := byHints(all, node, zone)
	if eps := pick(all, func(c *candidate) bool { return c.is(ready) && hinted(c) }); eps != nil {
		return eps
	}
	return pick(all, func(c *candidate) bool { return c.is(draining) })
}

// localEndpoints is what policy Local may use: the ready endpoints of this
// node; without any, those of this node that drain (KEP-1669). Topology hints
// do not count here.
func localEndpoints(all []candidate) []Endpoint {
	if eps := pick(all, func(c *candidate) bool { return c.is(ready) && c.is(local) }); eps != nil {
		return eps
	}
	return pick(all, func(c *candidate) bool { return c.is(draining) && c.is(local) })
}

// byHints returns the test that topology puts to a ready endpoint. Hints count
// only if every ready endpoint has one of the kind and one of them names this
// node (or else its zone): missing hints mean that their writer is not done, so
// all traffic would go to the few that have them. So no ready endpoint is ever
// lost because all of them are elsewhere.
func byHints(all []candidate, node, zone string) func(*candidate) bool {
	any, nodeHints, zoneHints, forNode, forZone := false, true, true, false, false
	for i := range all {
		if c := &all[i]; c.is(ready) {
			any = true
			nodeHints = nodeHints && c.hints != nil && len(c.hints.ForNodes) > 0
			zoneHints = zoneHints && c.hints != nil && len(c.hints.ForZones) > 0
			forNode = forNode || c.isForNode(node)
			forZone = forZone || c.isForZone(zone)
		}
	}
	switch {
	case any && nodeHints && forNode:
		return func(c *candidate) bool { return c.isForNode(node) }
	case any && zoneHints && forZone:
		return func(c *candidate) bool { return c.isForZone(zone) }
	}
	return func(*candidate) bool { return true }
}

func (c *candidate) isForNode(node string) bool {
	return c.hints != nil && slices.ContainsFunc(c.hints.ForNodes, func(n discoveryv1.ForNode) bool { return n.Name == node })
}

func (c *candidate) isForZone(zone string) bool {
	return c.hints != nil && zone != "" && slices.ContainsFunc(c.hints.ForZones, func(z discoveryv1.ForZone) bool { return z.Name == zone })
}
