package pool

import (
	"math"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
)

// Pool is a set of addresses as the Allocator needs it.
type Pool struct {
	Name   string
	Ranges []Range
	// AvoidBuggy leaves out IPv4 addresses that end with .0 or .255.
	AvoidBuggy bool
}

// Holder is a Service that has, or wants, addresses.
type Holder struct {
	Service svc.Name
	// Key lets Services of the same namespace with an equal one have the same address, if
	// they have no port in common and equal Backends. Without one an address is exclusive.
	Key string
	// Backend is empty if every node brings traffic to the Service, and names its endpoints if only
	// their nodes do (externalTrafficPolicy Local).
	Backend string
	Ports   []Port
}

// Port is a port of a Service as clients see it.
type Port struct {
	Protocol svc.Protocol
	Number   uint16
}

// fits reports whether h and o may have the same address.
func (h *Holder) fits(o *Holder) bool {
	if h.Key == "" || h.sharing() != o.sharing() || h.Backend != o.Backend {
		return false
	}
	return !slices.ContainsFunc(h.Ports, func(p Port) bool { return slices.Contains(o.Ports, p) })
}

// sharing is a sharing key. Each namespace has its own: whoever guesses a key of another
// one does not get onto its address.
type sharing struct{ namespace, key string }

func (h *Holder) sharing() sharing { return sharing{h.Service.Namespace, h.Key} }

// Allocator knows pools and who holds which address. Its methods cost the same
// however many addresses there are, but for SetPools. It is not safe for concurrent use.
type Allocator struct {
	pools map[string]*state
	spans []span // of all pools, disjoint, ascending
	// held has the holders of each address in the order in which they came.
	held    map[netip.Addr][]*Holder
	byKey   map[sharing][]netip.Addr // held, ascending
	holders map[svc.Name]*holding
	blocked map[netip.Addr]string // why
}

// span is a part of a pool.
type span struct {
	Range
	in *state
}

// holding is what one Service has.
type holding struct {
	Holder
	addrs []netip.Addr
}

// state is a pool, of which overlaps with earlier ones are left out.
type state struct {
	Pool
	four, six family
	overlaps  []string // with which earlier pools
}

// family are the addresses of one family of a pool.
type family struct {
	ranges []Range
	total  uint64 // math.MaxUint64 for that many or more
	// used and blocked count addresses that are held, and that are blocked and not held.
	used, blocked uint64
	// next is the first address that has not been given out or passed over since
	// SetPools, in ranges[at].
	at   int
	next netip.Addr
	// released were given out before, the oldest first; queued has the same.
	released []netip.Addr
	queued   map[netip.Addr]bool
}

func (s *state) of(f svc.Family) *family {
	if f == svc.IPv4 {
		return &s.four
	}
	return &s.six
}

// has reports whether a, which lies in a span of the pool, may be given out at all.
func (s *state) has(a netip.Addr) bool { return !s.AvoidBuggy || !isBuggy(a) }

// New returns an Allocator without pools.
func New() *Allocator {
	return &Allocator{
		pools: map[string]*state{}, held: map[netip.Addr][]*Holder{}, byKey: map[sharing][]netip.Addr{},
		holders: map[svc.Name]*holding{}, blocked: map[netip.Addr]string{},
	}
}

// SetPools replaces all pools. Of addresses that several have, the first of the list
// keeps them. Holders keep what they have. It costs time with the number of ranges and of
// addresses that are held.
func (a *Allocator) SetPools(pools []Pool) {
	a.pools, a.spans = make(map[string]*state, len(pools)), nil
	for _, p := range pools {
		s := &state{Pool: p}
		for _, r := range p.Ranges {
			var taken []Range
			for _, other := range a.spans {
				if r.Overlaps(other.Range) {
					taken = append(taken, other.Range)
					if other.in != s && !slices.Contains(s.overlaps, other.in.Name) {
						s.overlaps = append(s.overlaps, other.in.Name)
					}
				}
			}
			for _, part := range r.without(taken) {
				a.spans = append(a.spans, span{part, s})
			}
		}
		a.pools[p.Name] = s
	}
	slices.SortFunc(a.spans, func(x, y span) int { return x.First.Compare(y.First) })
	for _, sp := range a.spans {
		f := sp.in.of(svc.FamilyOf(sp.First))
		f.ranges = append(f.ranges, sp.Range)
		n := sp.size()
		if sp.in.AvoidBuggy {
			n -= sp.buggy()
		}
		f.total += n
		if f.total < n {
			f.total = math.MaxUint64
		}
		if len(f.ranges) == 1 {
			f.next = sp.First
		}
	}
	for addr := range a.held {
		a.count(addr, 1)
	}
	for addr := range a.blocked {
		a.countBlocked(addr, 1)
	}
}

// poolOf returns the pool that addr is of, nil if there is none.
func (a *Allocator) poolOf(addr netip.Addr) *state {
	i, found := slices.BinarySearchFunc(a.spans, addr, func(s span, addr netip.Addr) int { return s.First.Compare(addr) })
	if !found {
		i--
	}
	if i < 0 || !a.spans[i].Contains(addr) || !a.spans[i].in.has(addr) {
		return nil
	}
	return a.spans[i].in
}

// PoolOf returns the name of the pool that addr is of, "" if there is none.
func (a *Allocator) PoolOf(addr netip.Addr) string {
	if s := a.poolOf(addr); s != nil {
		return s.Name
	}
	return ""
}

// Overlaps returns the names of the earlier pools that a pool has addresses of.
func (a *Allocator) Overlaps(name string) []string {
	if s := a.pools[name]; s != nil {
		return s.overlaps
	}
	return nil
}

// Usage counts the addresses of one family of a pool. Total and Free are
// math.MaxUint64 if they are that or more.
type Usage struct {
	Total, Free, Used uint64
}

// Usage returns the counts of a pool; they are zero if it is unknown.
func (a *Allocator) Usage(name string, f svc.Family) Usage {
	s := a.pools[name]
	if s == nil {
		return Usage{}
	}
	c := s.of(f)
	return Usage{Total: c.total, Free: c.free(), Used: c.used}
}

func (f *family) free() uint64 {
	if f.total == math.MaxUint64 {
		return f.total
	}
	return f.total - f.used - f.blocked
}

// count adds n to the used addresses of the pool that addr is of.
func (a *Allocator) count(addr netip.Addr, n int) {
	if s := a.poolOf(addr); s != nil {
		s.of(svc.FamilyOf(addr)).used += uint64(n)
	}
}

func (a *Allocator) countBlocked(addr netip.Addr, n int) {
	if s := a.poolOf(addr); s != nil && len(a.held[addr]) == 0 {
		s.of(svc.FamilyOf(addr)).blocked += uint64(n)
	}
}

// Block keeps addr from being given out; why completes "192.0.2.1 is …". Who
// holds it already keeps it.
func (a *Allocator) Block(addr netip.Addr, why string) {
	if _, is := a.blocked[addr]; !is {
		a.countBlocked(addr, 1)
	}
	a.blocked[addr] = why
}

// Unblock undoes Block.
func (a *Allocator) Unblock(addr netip.Addr) {
	if _, is := a.blocked[addr]; !is {
		return
	}
	a.countBlocked(addr, -1)
	delete(a.blocked, addr)
	a.giveBack(addr)
}

// Blocked returns why addr is not given out, "" if it is.
func (a *Allocator) Blocked(addr netip.Addr) string { return a.blocked[addr] }

// Hold records that h has addr, whatever pools and other holders there are.
func (a *Allocator) Hold(addr netip.Addr, h Holder) {
	a.Update(h)
	x := a.holders[h.Service]
	if x == nil {
		x = &holding{Holder: h}
		a.holders[h.Service] = x
	}
	if slices.Contains(x.addrs, addr) {
		return
	}
	x.addrs = append(x.addrs, addr)
	if len(a.held[addr]) == 0 {
		if _, is := a.blocked[addr]; is {
			a.countBlocked(addr, -1)
		}
		a.count(addr, 1)
	}
	a.held[addr] = append(a.held[addr], &x.Holder)
	a.index(x.sharing(), addr)
}

// Update records what is new about a Service that may hold addresses.
func (a *Allocator) Update(h Holder) {
	x := a.holders[h.Service]
	if x == nil {
		return
	}
	if x.Key != h.Key {
		old := x.sharing()
		x.Key = h.Key
		for _, addr := range x.addrs {
			a.unindex(old, addr)
			a.index(x.sharing(), addr)
		}
	}
	x.Holder = h
}

// Release records that a Service has addr no more.
func (a *Allocator) Release(addr netip.Addr, service svc.Name) {
	x := a.holders[service]
	if x == nil || !slices.Contains(x.addrs, addr) {
		return
	}
	x.addrs = slices.DeleteFunc(x.addrs, func(o netip.Addr) bool { return o == addr })
	if len(x.addrs) == 0 {
		delete(a.holders, service)
	}
	left := slices.DeleteFunc(a.held[addr], func(h *Holder) bool { return h == &x.Holder })
	a.held[addr] = left
	a.unindex(x.sharing(), addr)
	if len(left) > 0 {
		return
	}
	delete(a.held, addr)
	a.count(addr, -1)
	if _, is := a.blocked[addr]; is {
		a.countBlocked(addr, 1)
	}
	a.giveBack(addr)
}

// Of returns the addresses that a Service holds, ascending.
func (a *Allocator) Of(service svc.Name) []netip.Addr {
	x := a.holders[service]
	if x == nil {
		return nil
	}
	out := slices.Clone(x.addrs)
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// Holders returns the Services that hold addr, in the order in which they came.
func (a *Allocator) Holders(addr netip.Addr) []svc.Name {
	var out []svc.Name
	for _, h := range a.held[addr] {
		out = append(out, h.Service)
	}
	return out
}

// Displaced returns the Services that hold addr and cannot share it with the holders among claimed.
func (a *Allocator) Displaced(addr netip.Addr, claimed []svc.Name) (out []svc.Name) {
	for _, h := range a.held[addr] {
		if slices.Contains(claimed, h.Service) {
			continue
		}
		if slices.ContainsFunc(a.held[addr], func(o *Holder) bool { return slices.Contains(claimed, o.Service) && !h.fits(o) }) {
			out = append(out, h.Service)
		}
	}
	return out
}

// Len returns how many addresses are held.
func (a *Allocator) Len() int { return len(a.held) }

func (a *Allocator) index(key sharing, addr netip.Addr) {
	if key.key == "" {
		return
	}
	list := a.byKey[key]
	if i, found := slices.BinarySearchFunc(list, addr, netip.Addr.Compare); !found {
		a.byKey[key] = slices.Insert(list, i, addr)
	}
}

// unindex forgets addr under key unless another holder of addr has it.
func (a *Allocator) unindex(key sharing, addr netip.Addr) {
	if key.key == "" || slices.ContainsFunc(a.held[addr], func(h *Holder) bool { return h.sharing() == key }) {
		return
	}
	list := slices.DeleteFunc(a.byKey[key], func(o netip.Addr) bool { return o == addr })
	if a.byKey[key] = list; len(list) == 0 {
		delete(a.byKey, key)
	}
}

// giveBack lets addr be given out again, after addresses that were never given out.
func (a *Allocator) giveBack(addr netip.Addr) {
	s := a.poolOf(addr)
	if s == nil {
		return
	}
	f := s.of(svc.FamilyOf(addr))
	if f.queued[addr] {
		return
	}
	if f.queued == nil {
		f.queued = map[netip.Addr]bool{}
	}
	f.queued[addr] = true
	f.released = append(f.released, addr)
}

// isFree reports whether addr, of a span of s, may be given to a Service that does not share it.
func (a *Allocator) isFree(s *state, addr netip.Addr) bool {
	_, blocked := a.blocked[addr]
	return !blocked && len(a.held[addr]) == 0 && s.has(addr)
}

// take returns a free address of a pool. Those that were never given out come first,
// so that an address that was released rests for as long as possible: clients and
// routers may still remember whose it was.
func (a *Allocator) take(s *state, which svc.Family) (netip.Addr, bool) {
	f := s.of(which)
	for f.at < len(f.ranges) {
		addr := f.next
		if addr == f.ranges[f.at].Last {
			if f.at++; f.at < len(f.ranges) {
				f.next = f.ranges[f.at].First
			}
		} else {
			f.next = addr.Next()
		}
		if a.isFree(s, addr) {
			return addr, true
		}
	}
	for len(f.released) > 0 {
		addr := f.released[0]
		f.released = f.released[1:]
		delete(f.queued, addr)
		if a.isFree(s, addr) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}
