package table

import (
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

func deref[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// byEndpoint is what is looked up by the endpoints of Services: virtual IPs, Pods of this node, and other nodes.
type byEndpoint struct {
	own  ownPods
	vips *vips
	// unreached are the nodes that this one does not reach.
	unreached map[nodeName]bool
}

// index brings it in line with the slices of s.
func (b *byEndpoint) index(s *service) {
	s.reindex = false
	b.vips.index(s)
	b.own.index(s)
}

// candidates returns the endpoints of one service port from the slices of its family, as Unique does.
func (b *byEndpoint) candidates(s *service, k Key, proto svc.Protocol, c *complaints) []Candidate {
	var out []Candidate
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
			out = append(out, Candidate{
				Addr: at, State: b.own.stateNow(s, slice, i), Weight: slice.weight, Hints: hints,
				Node: ep.node, Unreached: len(b.unreached) > 0 && b.unreached[ep.node],
			})
			s.hinted = s.hinted || hints != nil
		}
	}
	return Unique(out)
}

// localReady counts the addresses of a family that are ready on this node, over
// all ports of the Service: the health check port belongs to the Service.
func (b *byEndpoint) localReady(s *service, f svc.Family) int {
	seen := map[netip.Addr]bool{}
	for _, slice := range s.slices {
		if slice.family != f || len(slice.ports) == 0 {
			continue
		}
		for i, ep := range slice.endpoints {
			if state := b.own.stateNow(s, slice, i); state.Is(Local) && state.Is(Ready) && b.vips.owner(ep.addr) == nil {
				seen[ep.addr] = true
			}
		}
	}
	return len(seen)
}

// pick returns the candidates that keep accepts, nil if none.
func pick(all []Candidate, keep func(*Candidate) bool) []Endpoint {
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
			out = append(out, Endpoint{Addr: all[i].Addr, Local: all[i].Is(Local), Weight: all[i].Weight})
		}
	}
	return out
}

// AppendCandidates appends the endpoints of a slice that serve a port of a Service on the node of that name: none if the
// slice is for another proxy or family, or does not have the port. A headless Service has some, too: routes lead to it.
// Endpoints with an invalid address are left out. Each candidate has the index of its endpoint in the slice as Origin, and
// no weight.
func AppendCandidates(to []Candidate, obj *discoveryv1.EndpointSlice, k Key, proto svc.Protocol, nodeName string) []Candidate {
	if _, other := obj.Labels[labelProxyName]; other {
		return to
	}
	number := uint16(0)
	for _, p := range readPorts(obj) {
		if p.name == k.ID.Port && p.proto == proto {
			number = p.number
			break
		}
	}
	if number == 0 {
		return to
	}
	for i := range obj.Endpoints {
		ep := &obj.Endpoints[i]
		if a, bad := EndpointAddr(ep, k.Family); bad == "" {
			to = append(to, Candidate{
				Addr: netip.AddrPortFrom(a, number), State: StateOf(ep, nodeName), Origin: int32(i), Hints: ep.Hints, //nolint:gosec // at most 1,000
			})
		}
	}
	return to
}
