package bgp

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
)

// table is what is announced: the addresses, and the routes that they make.
type table struct {
	mu        sync.Mutex
	addresses map[netip.Addr][]Attributes
	routes    map[netip.Prefix]route
	wide      map[netip.Prefix]struct{} // routes of more than one address
}

// route is what the addresses of a prefix want of it, each of it once.
type route []shared

// shared are attributes that some addresses of a route have.
type shared struct {
	attributes Attributes
	identity   string // of attributes
	addresses  int
}

func newTable() *table {
	return &table{addresses: map[netip.Addr][]Attributes{}, routes: map[netip.Prefix]route{}, wide: map[netip.Prefix]struct{}{}}
}

// announce adds an address with a route for each of some attributes, or changes it, and returns the prefixes whose routes differ
// from before.
func (t *table) announce(a netip.Addr, all []Attributes) []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.addresses[a]
	t.addresses[a] = distinct(all)
	return t.replace(a, before, t.addresses[a])
}

// withdraw removes an address and returns the prefixes whose routes differ from before.
func (t *table) withdraw(a netip.Addr) []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.addresses[a]
	delete(t.addresses, a)
	return t.replace(a, before, nil)
}

// distinct returns each of some attributes once.
func distinct(all []Attributes) (out []Attributes) {
	for _, x := range all {
		if !slices.ContainsFunc(out, func(y Attributes) bool { return x.identity() == y.identity() }) {
			out = append(out, x)
		}
	}
	return out
}

// replace replaces what an address wants, and returns the prefixes whose routes differ from before. The caller holds mu.
func (t *table) replace(a netip.Addr, before, after []Attributes) (changed []netip.Prefix) {
	count := func(x Attributes, by int) {
		p, id := x.prefix(a), x.identity()
		r := t.routes[p]
		i := slices.IndexFunc(r, func(s shared) bool { return s.identity == id })
		if i < 0 {
			i = len(r)
			r = append(r, shared{attributes: x, identity: id})
			changed = append(changed, p)
		}
		if r[i].addresses += by; r[i].addresses == 0 {
			r = slices.Delete(r, i, i+1)
			changed = append(changed, p)
		}
		t.put(p, r)
	}
	for _, x := range after { // first, so that what stays is never gone
		count(x, 1)
	}
	for _, x := range before {
		count(x, -1)
	}
	return changed
}

// put replaces a route. The caller holds mu.
func (t *table) put(p netip.Prefix, r route) {
	if len(r) == 0 {
		delete(t.routes, p)
		delete(t.wide, p)
		return
	}
	t.routes[p] = r
	if !p.IsSingleIP() {
		t.wide[p] = struct{}{}
	}
}

// get returns the attributes of a peer's route to a prefix, and their key. ok is false if it has none.
func (t *table) get(p netip.Prefix, peer string) (attributes Attributes, key string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.routes[p] {
		switch {
		case !s.attributes.isFor(peer):
		case !ok:
			attributes, ok = s.attributes, true
		default:
			attributes = attributes.with(s.attributes)
		}
	}
	return attributes, attributes.key(), ok
}

// networks returns the routes of more than one address.
func (t *table) networks() []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.wide))
}

// prefixes returns all routes.
func (t *table) prefixes() []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.routes))
}
