package dataplane

import (
	"iter"
	"maps"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Plan is the desired state of one address family: the service ports last planned,
// and which of them each frontend belongs to.
//
// In a Table that a Builder made a frontend belongs to only one port. Two ports
// planned can still want the same one, since a port that is rejected stays
// as it was planned before: if its next version, which is not planned, has given
// an address up, and another Service has it now, both do. The one that is as the
// Table has it then goes before the one that is not, whatever they are called;
// between equals, as in Tables made by hand, the first by name has it.
type Plan struct {
	// Settings are the settings of the Table last planned.
	Settings Settings

	mode     string
	family   svc.Family
	ports    map[table.Key]*table.ServicePort
	outdated map[*table.ServicePort]bool
	claims   table.Claims[FrontKey, *table.ServicePort]
	// pending are frontends that could not be written for the sake of a port,
	// whose next version may not have them any more.
	pending map[table.Key][]FrontKey
}

// NewPlan returns the Plan of an empty Table for a family. mode is the name of
// the mode, for errors.
func NewPlan(mode string, f svc.Family) *Plan {
	p := &Plan{
		mode: mode, family: f, ports: map[table.Key]*table.ServicePort{},
		outdated: map[*table.ServicePort]bool{}, pending: map[table.Key][]FrontKey{},
	}
	p.claims = table.NewClaims[FrontKey](func(a, b *table.ServicePort) bool {
		if p.outdated[a] != p.outdated[b] {
			return p.outdated[b]
		}
		return a.ID.Compare(b.ID) < 0
	})
	return p
}

// Port returns the port planned for a key, nil if none.
func (p *Plan) Port(k table.Key) *table.ServicePort { return p.ports[k] }

// Ports yields all ports planned.
func (p *Plan) Ports() iter.Seq[*table.ServicePort] { return maps.Values(p.ports) }

// Wanted returns the desired frontend of k and the port it belongs to, nil if
// there must be none.
func (p *Plan) Wanted(k FrontKey) (*table.ServicePort, *table.Frontend) {
	port, ok := p.claims.Owner(k)
	if !ok {
		return nil, nil
	}
	for i := range port.Frontends {
		if f := &port.Frontends[i]; KeyOf(port.Protocol, f) == k {
			return port, f
		}
	}
	return nil, nil
}

// Set plans port (nil: none) for a key, and marks in dirty the frontends that may
// have to change.
func (p *Plan) Set(k table.Key, port *table.ServicePort, dirty Dirty) {
	for _, fk := range p.pending[k] {
		dirty[fk] = k
	}
	delete(p.pending, k)
	if old := p.ports[k]; old != nil {
		p.eachFrontend(old, func(fk FrontKey) {
			p.claims.Remove(fk, old)
			dirty[fk] = k
		})
		delete(p.outdated, old)
		delete(p.ports, k)
	}
	if port == nil {
		return
	}
	p.ports[k] = port
	p.eachFrontend(port, func(fk FrontKey) {
		p.claims.Add(fk, port)
		dirty[fk] = k
	})
}

// keep leaves the port of a key as it is planned, although the Table has another
// one.
func (p *Plan) keep(k table.Key, dirty Dirty) {
	if port := p.ports[k]; port != nil {
		p.Set(k, nil, dirty)
		p.outdated[port] = true
		p.Set(k, port, dirty)
	}
}

func (p *Plan) eachFrontend(port *table.ServicePort, f func(FrontKey)) {
	for i := range port.Frontends {
		f(KeyOf(port.Protocol, &port.Frontends[i]))
	}
}

// update plans the ports of the family that keys names as t has them, or all of
// t if keys is nil. A port that no mode could write is added to rejected and stays
// as it was planned before. It returns the keys that it has looked at.
func (p *Plan) update(t *table.Table, keys []table.Key, dirty Dirty, rejected *Rejections) []table.Key {
	if keys == nil {
		keys = slices.Collect(p.keysOf(t))
	}
	seen := make(map[table.Key]bool, len(keys))
	for _, k := range keys {
		if k.Family != p.family || seen[k] {
			continue
		}
		seen[k] = true
		port := t.Get(k)
		if port != nil {
			if err := Validate(port, p.mode); err != nil {
				rejected.Add(k, err)
				p.keep(k, dirty)
				continue
			}
		}
		p.Set(k, port, dirty)
	}
	return slices.Collect(maps.Keys(seen))
}

// keysOf yields the keys of all ports of t, and of those planned that t has not.
func (p *Plan) keysOf(t *table.Table) iter.Seq[table.Key] {
	return func(yield func(table.Key) bool) {
		for port := range t.All() {
			if port.Family == p.family && !yield(port.Key()) {
				return
			}
		}
		for k := range p.ports {
			if t.Get(k) == nil && !yield(k) {
				return
			}
		}
	}
}

// differing yields the frontends of keysOf whose port is not the one planned.
func (p *Plan) differing(t *table.Table) iter.Seq[table.Key] {
	return func(yield func(table.Key) bool) {
		for k := range p.keysOf(t) {
			if p.ports[k] != t.Get(k) && !yield(k) {
				return
			}
		}
	}
}
