package dataplane

import (
	"iter"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Claims knows the service ports that a mode has planned, and who of them wants
// which frontend. Two ports of a Table may want the same one only if the Table
// was not made by a Builder; the first by name has it.
type Claims struct {
	ports  map[table.Key]*table.ServicePort
	claims map[FrontKey]claim
	// left are frontends that could not be written for the sake of a port,
	// which may not know of them any more.
	left map[table.Key][]FrontKey
}

// claim is who wants a frontend, in the order of their names. Nearly every one
// is wanted by one port only.
type claim struct {
	first *table.ServicePort
	rest  []*table.ServicePort
}

// NewClaims returns Claims without any port.
func NewClaims() *Claims {
	return &Claims{ports: map[table.Key]*table.ServicePort{}, claims: map[FrontKey]claim{}, left: map[table.Key][]FrontKey{}}
}

// Set makes p the port planned for its key (nil: none) and calls touched for
// each frontend that may have to change.
func (c *Claims) Set(k table.Key, p *table.ServicePort, touched func(FrontKey)) {
	for _, fk := range c.left[k] {
		touched(fk)
	}
	delete(c.left, k)
	if old := c.ports[k]; old != nil {
		for i := range old.Frontends {
			fk := KeyOf(old.Protocol, &old.Frontends[i])
			c.remove(fk, old)
			touched(fk)
		}
		delete(c.ports, k)
	}
	if p == nil {
		return
	}
	c.ports[k] = p
	for i := range p.Frontends {
		fk := KeyOf(p.Protocol, &p.Frontends[i])
		c.add(fk, p)
		touched(fk)
	}
}

func (c *Claims) remove(fk FrontKey, p *table.ServicePort) {
	cl := c.claims[fk]
	if cl.first != p {
		cl.rest = slices.DeleteFunc(slices.Clone(cl.rest), func(q *table.ServicePort) bool { return q == p })
	} else if len(cl.rest) > 0 {
		cl.first, cl.rest = cl.rest[0], cl.rest[1:]
	} else {
		delete(c.claims, fk)
		return
	}
	c.claims[fk] = cl
}

func (c *Claims) add(fk FrontKey, p *table.ServicePort) {
	cl := c.claims[fk]
	switch {
	case cl.first == p || slices.Contains(cl.rest, p):
		return
	case cl.first == nil:
		cl.first = p
	case p.ID.Compare(cl.first.ID) < 0:
		cl.rest = slices.Concat([]*table.ServicePort{cl.first}, cl.rest)
		cl.first = p
	default:
		cl.rest = append(slices.Clip(cl.rest), p)
		slices.SortFunc(cl.rest, func(a, b *table.ServicePort) int { return a.ID.Compare(b.ID) })
	}
	c.claims[fk] = cl
}

// Wanted returns the port and the frontend of it that k is to serve, nil if
// none.
func (c *Claims) Wanted(k FrontKey) (*table.ServicePort, *table.Frontend) {
	p := c.claims[k].first
	if p == nil {
		return nil, nil
	}
	for i := range p.Frontends {
		if f := &p.Frontends[i]; KeyOf(p.Protocol, f) == k {
			return p, f
		}
	}
	return nil, nil
}

// Port returns the port planned for a key, nil if none.
func (c *Claims) Port(k table.Key) *table.ServicePort { return c.ports[k] }

// Keys yields the keys of all ports planned.
func (c *Claims) Keys() iter.Seq[table.Key] {
	return func(yield func(table.Key) bool) {
		for k := range c.ports {
			if !yield(k) {
				return
			}
		}
	}
}

// Touched are the frontends that an Apply may have to change, each with the key
// of the port for whose sake. The key is the zero value for frontends that were
// found in the kernel and belong to no port.
type Touched map[FrontKey]table.Key

// Take plans the ports of one family that keys names as t has them, or all of t
// if keys is nil, and returns the frontends to look at. A port that cannot be
// written goes to rejected and stays planned as it was before.
func (c *Claims) Take(t *table.Table, f svc.Family, keys []table.Key, mode string, rejected *Rejections) Touched {
	touched := Touched{}
	take := func(k table.Key, p *table.ServicePort) {
		if k.Family != f {
			return
		}
		if p != nil {
			if err := Validate(p, mode); err != nil {
				rejected.Add(k, err)
				return
			}
		}
		c.Set(k, p, func(fk FrontKey) { touched[fk] = k })
	}
	if keys == nil {
		for p := range t.All() {
			take(p.Key(), p)
		}
	}
	for _, k := range keys {
		take(k, t.Get(k))
	}
	return touched
}

// Refuse notes that a frontend could not be written, with the port for whose
// sake it was to change and the one that has it, and says whether there is any
// such port. Set touches the frontend again when the port comes next.
func (c *Claims) Refuse(fk FrontKey, touched Touched, err error, rejected *Rejections) bool {
	k, named := touched[fk]
	if named = named && k != (table.Key{}); named {
		rejected.Add(k, err)
		c.left[k] = append(c.left[k], fk)
	}
	if p := c.claims[fk].first; p != nil {
		rejected.Add(p.Key(), err)
		named = true
	}
	return named
}
