package table

import "net/netip"

// vips knows every cluster IP, and the endpoints near them, so that an endpoint
// that is a cluster IP is found in whichever order the two appear. To remember
// the services of every endpoint would cost as much memory as the endpoints;
// only endpoints in the same block of addresses as some cluster IP are remembered,
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
