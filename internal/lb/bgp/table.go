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
	addresses map[netip.Addr]Attributes
	routes    map[netip.Prefix]*route
	wide      map[netip.Prefix]struct{} // routes of more than one address
}

// route is a prefix that has addresses.
type route struct {
	attributes Attributes // of the address that was announced last
	key        string     // of attributes
	addresses  int
}

func newTable() *table {
	return &table{addresses: map[netip.Addr]Attributes{}, routes: map[netip.Prefix]*route{}, wide: map[netip.Prefix]struct{}{}}
}

// announce adds or changes an address and returns the prefixes whose routes differ
// from before.
func (t *table) announce(a netip.Addr, attributes Attributes) []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	var changed []netip.Prefix
	p := attributes.prefix(a)
	old, known := t.addresses[a]
	if known && old.prefix(a) != p {
		changed = t.release(old.prefix(a), changed)
		known = false
	}
	t.addresses[a] = attributes
	r, key := t.routes[p], attributes.key()
	switch {
	case r == nil:
		r = &route{}
		t.routes[p] = r
		if !p.IsSingleIP() {
			t.wide[p] = struct{}{}
		}
		changed = append(changed, p)
	case r.key != key:
		changed = append(changed, p)
	}
	r.attributes, r.key = attributes, key
	if !known {
		r.addresses++
	}
	return changed
}

// withdraw removes an address and returns the prefixes whose routes are gone.
func (t *table) withdraw(a netip.Addr) []netip.Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	attributes, ok := t.addresses[a]
	if !ok {
		return nil
	}
	delete(t.addresses, a)
	return t.release(attributes.prefix(a), nil)
}

// release takes one address out of p's route and adds p to gone if it was the last.
func (t *table) release(p netip.Prefix, gone []netip.Prefix) []netip.Prefix {
	r := t.routes[p]
	if r.addresses--; r.addresses > 0 {
		return gone
	}
	delete(t.routes, p)
	delete(t.wide, p)
	return append(gone, p)
}

// get returns the attributes of a route, and their key.
func (t *table) get(p netip.Prefix) (attributes Attributes, key string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, ok := t.routes[p]
	if !ok {
		return Attributes{}, "", false
	}
	return r.attributes, r.key, true
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
	out := make([]netip.Prefix, 0, len(t.routes))
	for p := range t.routes {
		out = append(out, p)
	}
	return out
}
