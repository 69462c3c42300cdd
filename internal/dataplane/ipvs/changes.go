package ipvs

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// verb is what a change of virtual servers does.
type verb uint8

const (
	addServer verb = iota
	setServer
	delServer
	addDest
	setDest
	delDest
)

// change is one change of virtual servers; which fields count depends on verb.
type change struct {
	verb    verb
	owner   dataplane.FrontKey
	service ipvs.Service
	dest    ipvs.Dest
}

// changes are made in their order.
type changes struct{ list []change }

func (c *changes) add(v verb, owner dataplane.FrontKey, s ipvs.Service, d ipvs.Dest) {
	c.list = append(c.list, change{v, owner, s, d})
}

func (c *change) encode(b *ipvs.Batch[dataplane.FrontKey]) {
	switch c.verb {
	case addServer:
		b.AddService(c.owner, c.service)
	case setServer:
		b.SetService(c.owner, c.service)
	case delServer:
		b.DelService(c.owner, c.service.Key)
	case addDest:
		b.AddDest(c.owner, c.service.Key, c.dest)
	case setDest:
		b.SetDest(c.owner, c.service.Key, c.dest)
	case delDest:
		b.DelDest(c.owner, c.service.Key, c.dest)
	}
}

// weight is that of an endpoint that takes new connections.
func weight(e table.Endpoint) uint32 { return max(1, uint32(e.Weight)) }

// virtual is a virtual server in the kernel, with the weights of its endpoints.
type virtual struct {
	ipvs.Service
	// proto is that of its packets, which the key of a mark does not tell.
	proto svc.Protocol
	dests map[netip.AddrPort]uint32
}

// bring appends what makes the virtual server v, nil if it is not there, what
// want says, and returns what it then is. An endpoint that is gone is left
// without new connections where it may drain.
func (c *changes) bring(owner dataplane.FrontKey, v *virtual, want *server) *virtual {
	out := &virtual{Service: want.Service, proto: want.proto, dests: make(map[netip.AddrPort]uint32, len(want.dests))}
	switch {
	case v == nil:
		c.add(addServer, owner, want.Service, ipvs.Dest{})
		v = &virtual{}
	case v.Service != want.Service:
		c.add(setServer, owner, want.Service, ipvs.Dest{})
	}
	for i := range want.dests {
		d := ipvs.Dest{Addr: want.dests[i].Addr, Weight: weight(want.dests[i])}
		was, there := v.dests[d.Addr]
		switch {
		case !there:
			c.add(addDest, owner, want.Service, d)
		case was != d.Weight:
			c.add(setDest, owner, want.Service, d)
		}
		out.dests[d.Addr] = d.Weight
	}
	for a, was := range v.dests {
		if _, wanted := out.dests[a]; wanted {
			continue
		}
		d := ipvs.Dest{Addr: a}
		switch {
		case !want.keeps(a):
			c.add(delDest, owner, want.Service, d)
			continue
		case was != 0:
			c.add(setDest, owner, want.Service, d)
		}
		out.dests[a] = 0
	}
	return out
}
