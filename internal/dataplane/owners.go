package dataplane

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Owners finds the Service ports that destinations of packets belong to.
type Owners struct {
	table  *table.Table
	fronts map[svc.Frontend]svc.PortName
	addrs  map[netip.Addr]svc.Name
}

// OwnersOf indexes a Table, all of it.
func OwnersOf(t *table.Table) *Owners {
	o := &Owners{table: t, fronts: map[svc.Frontend]svc.PortName{}, addrs: map[netip.Addr]svc.Name{}}
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

// Has reports whether there is a port, in one family at least.
func (o *Owners) Has(id svc.PortName) bool {
	return o.table.Get(table.Key{ID: id, Family: svc.IPv4}) != nil || o.table.Get(table.Key{ID: id, Family: svc.IPv6}) != nil
}

// HasEndpoint reports whether new connections to a port may be sent to an endpoint.
func (o *Owners) HasEndpoint(id svc.PortName, endpoint netip.AddrPort) bool {
	p := o.table.Get(table.Key{ID: id, Family: svc.FamilyOf(endpoint.Addr())})
	if p == nil {
		return false
	}
	in := func(list []table.Endpoint) bool {
		_, found := slices.BinarySearchFunc(list, endpoint, func(e table.Endpoint, at netip.AddrPort) int { return e.Addr.Compare(at) })
		return found
	}
	return slices.ContainsFunc(p.Frontends, func(f table.Frontend) bool { return in(f.Endpoints) || in(f.LocalClients) })
}

// OwnerIndex has the Owners of the Table that is programmed. It indexes a Table once, when it is asked for it first, and is
// safe for concurrent use.
type OwnerIndex struct {
	table func() *table.Table

	mu     sync.Mutex
	owners *Owners
}

// NewOwnerIndex returns an index of what programmed returns, nil before there is a Table.
func NewOwnerIndex(programmed func() *table.Table) *OwnerIndex { return &OwnerIndex{table: programmed} }

// Owners returns the Owners of the Table that is programmed now; nil before there is one.
func (x *OwnerIndex) Owners() *Owners {
	t := x.table()
	if t == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.owners == nil || x.owners.table != t {
		x.owners = OwnersOf(t)
	}
	return x.owners
}
