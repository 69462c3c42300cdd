package dataplane

import (
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Owners finds the Service ports that destinations of packets belong to.
type Owners struct {
	fronts map[svc.Frontend]svc.PortName
	addrs  map[netip.Addr]svc.Name
}

// OwnersOf indexes a Table, all of it.
func OwnersOf(t *table.Table) *Owners {
	o := &Owners{fronts: map[svc.Frontend]svc.PortName{}, addrs: map[netip.Addr]svc.Name{}}
	for p := range t.All() {
		for i := range p.Frontends {
			f := &p.Frontends[i]
			o.fronts[svc.Frontend{Protocol: p.Protocol, Addr: f.Addr}] = p.ID
			for _, at := range t.Destinations(f) {
				o.fronts[svc.Frontend{Protocol: p.Protocol, Addr: at}] = p.ID
			}
			if f.Kind == table.ClusterIP {
				o.addrs[f.Addr.Addr()] = p.ID.Name
			}
		}
	}
	return o
}

// Of returns the port with a frontend, where a node port has an address of the node or the unspecified one; else the Service
// with that ClusterIP, without a port. known is false for what no Service has.
func (o *Owners) Of(p svc.Protocol, to netip.AddrPort) (id svc.PortName, known bool) {
	if id, ok := o.fronts[svc.Frontend{Protocol: p, Addr: to}]; ok {
		return id, true
	}
	name, ok := o.addrs[to.Addr()]
	return svc.PortName{Name: name}, ok
}
