package flows

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

type portKey struct {
	id       svc.PortName
	protocol svc.Protocol
}

// pair is what a data plane has a count for.
type pair struct {
	protocol     svc.Protocol
	node         bool
	to, endpoint netip.AddrPort
}

// counted is what the last read found of a pair.
type counted struct {
	connections uint64
	// of is the port that had the frontend, zero if none had.
	of portKey
	// its reports that the endpoint was one of the port's, then or at an earlier read.
	its bool
}

// totals are the connections of ports and endpoints. What a data plane counts restarts after a day without connections, and
// belongs to a frontend, whoever has it: totals add up how much more each read finds, for the port that has the frontend then.
//
// An endpoint that was never among the port's is that of an earlier owner of the frontend: it is not counted. What it had
// counted until then is never the new owner's.
type totals struct {
	pairs map[pair]counted // of the last read
	// ports only grow, and end with the port.
	ports map[portKey]uint64
	// endpoints end with the last pair of the endpoint.
	endpoints map[portKey]map[netip.AddrPort]uint64
}

// add takes in a read.
func (t *totals) add(owners *dataplane.Owners, served []dataplane.ServedCount) {
	before, old := t.pairs, t.endpoints
	t.pairs = make(map[pair]counted, len(served))
	t.endpoints = make(map[portKey]map[netip.AddrPort]uint64, len(old))
	if t.ports == nil {
		t.ports = map[portKey]uint64{}
	}
	for i := range served {
		c := &served[i]
		k := pair{c.Protocol, c.NodePort, c.To, c.Endpoint}
		last, now := before[k], counted{connections: c.Connections}
		if id, owned := owners.Of(c.Protocol, c.To); owned {
			now.of = portKey{id, c.Protocol}
			now.its = last.its && last.of == now.of || owners.HasEndpoint(id, c.Endpoint)
		}
		t.pairs[k] = now
		if !now.its {
			continue
		}
		more := c.Connections
		if last.connections <= more {
			more -= last.connections
		}
		list := t.endpoints[now.of]
		if list == nil {
			list = map[netip.AddrPort]uint64{}
			t.endpoints[now.of] = list
		}
		if _, begun := list[c.Endpoint]; !begun {
			list[c.Endpoint] = old[now.of][c.Endpoint]
		}
		list[c.Endpoint] += more
		t.ports[now.of] += more
	}
	for k := range t.ports {
		if !owners.Has(k.id) {
			delete(t.ports, k)
		}
	}
}
