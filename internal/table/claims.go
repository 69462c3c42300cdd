package table

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// claimant is a service that wants a frontend.
type claimant struct {
	s *service
	// virtual says that it wants it as its cluster IP, which was allocated to
	// it and to nobody else: a stranger's external IP never takes that away.
	virtual bool
	created time.Time
}

// before orders claimants: the first one gets the frontend.
func (c claimant) before(o claimant) bool {
	if c.virtual != o.virtual {
		return c.virtual
	}
	if !c.created.Equal(o.created) {
		return c.created.Before(o.created)
	}
	return c.s.name.Compare(o.s.name) < 0
}

// claims says which service has which frontend. Nearly every frontend is
// wanted by one service only.
type claims map[svc.Frontend]claim

type claim struct {
	first claimant
	rest  []claimant
}

// owner returns the service that has f, nil if none wants it.
func (cs claims) owner(f svc.Frontend) *service { return cs[f].first.s }

// add lets c claim f and calls touch for everybody else who wants it.
func (cs claims) add(f svc.Frontend, c claimant, touch func(*service)) {
	cl, taken := cs[f]
	switch {
	case !taken:
		cl.first = c
	case c.before(cl.first):
		cl.rest = append(cl.rest, cl.first)
		cl.first = c
	default:
		cl.rest = append(cl.rest, c)
	}
	cs[f] = cl
	cl.others(c.s, touch)
}

// remove takes back the claim of s to f and calls touch for everybody else who
// wants it.
func (cs claims) remove(f svc.Frontend, s *service, touch func(*service)) {
	cl := cs[f]
	all := make([]claimant, 0, 1+len(cl.rest))
	for _, c := range append([]claimant{cl.first}, cl.rest...) {
		if c.s != nil && c.s != s {
			all = append(all, c)
		}
	}
	if len(all) == 0 {
		delete(cs, f)
		return
	}
	best := 0
	for i := range all {
		if all[i].before(all[best]) {
			best = i
		}
	}
	all[0], all[best] = all[best], all[0]
	cl = claim{first: all[0], rest: all[1:]}
	cs[f] = cl
	cl.others(s, touch)
}

func (cl claim) others(s *service, touch func(*service)) {
	if cl.first.s != s {
		touch(cl.first.s)
	}
	for _, c := range cl.rest {
		if c.s != s {
			touch(c.s)
		}
	}
}

// vips knows every cluster IP, and the endpoints near them, so that an endpoint
// that is a cluster IP is found in whichever order the two appear. To remember
// the services of every endpoint would cost as much memory as the endpoints;
// only those in the same block of addresses as some cluster IP are remembered,
// which in a sane cluster are none.
type vips struct {
	owners map[netip.Addr][]*service
	blocks map[netip.Prefix]int // how many cluster IPs lie in each
	near   map[netip.Addr]map[*service]struct{}
	// grown is set when a block appeared: every service must be asked again
	// for its endpoints near a cluster IP.
	grown bool
}

func newVIPs() *vips {
	return &vips{
		owners: map[netip.Addr][]*service{},
		blocks: map[netip.Prefix]int{},
		near:   map[netip.Addr]map[*service]struct{}{},
	}
}

// owner returns a service whose cluster IP a is: the first by name.
func (v *vips) owner(a netip.Addr) *service {
	var first *service
	for _, s := range v.owners[a] {
		if first == nil || s.name.Compare(first.name) < 0 {
			first = s
		}
	}
	return first
}

// block is the range in which a is near: service ranges are rarely smaller.
func block(a netip.Addr) netip.Prefix {
	bits := 16
	if a.Is6() {
		bits = 112
	}
	p, _ := a.Prefix(bits)
	return p
}

// add makes a a cluster IP of s and calls touch for the services that have an
// endpoint there.
func (v *vips) add(a netip.Addr, s *service, touch func(*service)) {
	v.owners[a] = append(v.owners[a], s)
	b := block(a)
	if v.blocks[b]++; v.blocks[b] == 1 {
		v.grown = true
	}
	for n := range v.near[a] {
		touch(n)
	}
}

// remove undoes add.
func (v *vips) remove(a netip.Addr, s *service, touch func(*service)) {
	var left []*service
	for _, o := range v.owners[a] {
		if o != s {
			left = append(left, o)
		}
	}
	if v.owners[a] = left; len(left) == 0 {
		delete(v.owners, a)
	}
	b := block(a)
	if v.blocks[b]--; v.blocks[b] == 0 {
		delete(v.blocks, b)
	}
	for n := range v.near[a] {
		touch(n)
	}
}

// index remembers which endpoints of s lie near a cluster IP.
func (v *vips) index(s *service) {
	for _, a := range s.near {
		if delete(v.near[a], s); len(v.near[a]) == 0 {
			delete(v.near, a)
		}
	}
	s.near = nil
	for _, slice := range s.slices {
		for _, ep := range slice.endpoints {
			a := ep.addr
			if v.blocks[block(a)] == 0 {
				continue
			}
			if v.near[a] == nil {
				v.near[a] = map[*service]struct{}{}
			}
			if _, known := v.near[a][s]; !known {
				v.near[a][s] = struct{}{}
				s.near = append(s.near, a)
			}
		}
	}
}
