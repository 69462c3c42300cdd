package table

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// candidate is an endpoint of a service port before policy is asked.
type candidate struct {
	addr  netip.AddrPort
	local bool
	// ready takes new connections. draining is not ready, but still serves
	// while it terminates: the second choice.
	ready, draining bool
	hints           *discoveryv1.EndpointHints
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

func addressType(f svc.Family) discoveryv1.AddressType {
	if f == svc.IPv6 {
		return discoveryv1.AddressTypeIPv6
	}
	return discoveryv1.AddressTypeIPv4
}

// portNumber returns the number behind the port of that name and protocol in a
// slice, 0 if it has none.
func portNumber(s *discoveryv1.EndpointSlice, name string, proto svc.Protocol) uint16 {
	for i := range s.Ports {
		p := &s.Ports[i]
		if deref(p.Name, "") != name || p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			continue
		}
		if got, err := svc.ParseProtocol(string(deref(p.Protocol, corev1.ProtocolTCP))); err == nil && got == proto {
			return uint16(*p.Port)
		}
	}
	return 0
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
		port := portNumber(slice, k.ID.Port, proto)
		if port == 0 || slice.AddressType != addressType(k.Family) || skipLabels(slice.Labels) {
			continue
		}
		out = slices.Grow(out, len(slice.Endpoints))
		for i := range slice.Endpoints {
			ep := &slice.Endpoints[i]
			a, bad := endpointAddr(ep)
			if bad == "" && svc.FamilyOf(a) != k.Family {
				bad = ep.Addresses[0] + " (not " + k.Family.String() + ")"
			}
			if bad != "" {
				c.gather(ReasonInvalidEndpoint, bad)
				continue
			}
			if owner := b.vips.owner(a); owner != nil {
				c.gather(ReasonEndpointIsServiceIP, ep.Addresses[0]+" (clusterIP of "+owner.name.String()+")")
				continue
			}
			ready := deref(ep.Conditions.Ready, true)
			out = append(out, candidate{
				addr:     netip.AddrPortFrom(a, port),
				local:    ep.NodeName != nil && *ep.NodeName == b.cfg.NodeName,
				ready:    ready,
				draining: !ready && deref(ep.Conditions.Serving, true) && deref(ep.Conditions.Terminating, false),
				hints:    ep.Hints,
			})
			s.hinted = s.hinted || ep.Hints != nil
		}
	}
	slices.SortStableFunc(out, compareCandidates)
	return slices.CompactFunc(out, func(a, b candidate) bool { return a.addr == b.addr })
}

func compareCandidates(a, b candidate) int {
	if c := a.addr.Compare(b.addr); c != 0 {
		return c
	}
	return cmp.Compare(b.quality(), a.quality())
}

func (c *candidate) quality() int {
	q := 0
	for i, good := range []bool{c.draining, c.ready, c.local} {
		if good {
			q |= 1 << i
		}
	}
	return q
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
			out = append(out, Endpoint{Addr: all[i].addr, Local: all[i].local})
		}
	}
	return out
}

// clusterEndpoints is what policy Cluster may use: ready endpoints, narrowed by
// topology; without any ready one, those that drain.
func clusterEndpoints(all []candidate, node, zone string) []Endpoint {
	hinted := byHints(all, node, zone)
	if eps := pick(all, func(c *candidate) bool { return c.ready && hinted(c) }); eps != nil {
		return eps
	}
	return pick(all, func(c *candidate) bool { return c.draining })
}

// localEndpoints is what policy Local may use: the ready endpoints of this
// node; without any, those of this node that drain (KEP-1669). Topology hints
// do not count here.
func localEndpoints(all []candidate) []Endpoint {
	if eps := pick(all, func(c *candidate) bool { return c.ready && c.local }); eps != nil {
		return eps
	}
	return pick(all, func(c *candidate) bool { return c.draining && c.local })
}

// byHints returns the test that topology puts to a ready endpoint. Hints count
// only if every ready endpoint has one of the kind and one of them names this
// node (or else its zone): missing hints mean that their writer is not done, so
// all traffic would go to the few that have them. So no ready endpoint is ever
// lost because all of them are elsewhere.
func byHints(all []candidate, node, zone string) func(*candidate) bool {
	ready, nodeHints, zoneHints, forNode, forZone := false, true, true, false, false
	for i := range all {
		if c := &all[i]; c.ready {
			ready = true
			nodeHints = nodeHints && c.hints != nil && len(c.hints.ForNodes) > 0
			zoneHints = zoneHints && c.hints != nil && len(c.hints.ForZones) > 0
			forNode = forNode || c.isForNode(node)
			forZone = forZone || c.isForZone(zone)
		}
	}
	switch {
	case ready && nodeHints && forNode:
		return func(c *candidate) bool { return c.isForNode(node) }
	case ready && zoneHints && forZone:
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
