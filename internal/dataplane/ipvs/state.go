package ipvs

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/table"
)

// stored is our state in the kernel.
type stored struct {
	servers  map[ipvs.Key]*virtual
	elements map[element]bool
}

// state is the desired state of the kernel for one family.
type state struct {
	planner
	fronts map[dataplane.FrontKey]*front
	// counts has how many frontends want an element.
	counts map[element]int
	// claims has which frontend a virtual server belongs to: the address of a node
	// can be an external IP, too, and that goes before node ports, as in all modes.
	claims table.Claims[ipvs.Key, dataplane.FrontKey]
	marks  marks
	// leaving are virtual servers without an owner that have open connections,
	// with the elements counted for them.
	leaving map[ipvs.Key][]element
}

// newState returns the state of an empty kernel; elsewhere reports whether an
// address is on another interface, and marked are the marks that are in use.
func newState(l *layout, plan *dataplane.Plan, elsewhere func(netip.Addr) bool, marked map[ipset.Element]uint32) *state {
	s := &state{
		fronts: map[dataplane.FrontKey]*front{}, counts: map[element]int{},
		claims: table.NewClaims[ipvs.Key](func(a, b dataplane.FrontKey) bool { return a.Compare(b) < 0 }),
		marks:  newMarks(marked), leaving: map[ipvs.Key][]element{},
	}
	s.planner = planner{
		layout: l, settings: &plan.Settings, elsewhere: elsewhere,
		mark: func(k dataplane.FrontKey) uint32 { return s.marks.of(k, s.addressesOf(k)) },
	}
	for _, e := range podElements(&plan.Settings) {
		s.counts[e]++
	}
	return s
}

// edit collects what an Apply may have to change.
type edit struct {
	elements map[element]bool
	// wanted are the desired virtual servers, gone the ones to remove.
	wanted map[ipvs.Key]*server
	gone   map[ipvs.Key]dataplane.FrontKey
}

func newEdit() *edit {
	return &edit{map[element]bool{}, map[ipvs.Key]*server{}, map[ipvs.Key]dataplane.FrontKey{}}
}

// put puts next in the place of the frontend k, nil to have none.
func (s *state) put(k dataplane.FrontKey, next *front, e *edit) {
	if old := s.fronts[k]; old != nil {
		for _, el := range old.elements {
			s.uncount(el, e)
		}
		for i := range old.servers {
			s.release(old.servers[i].Key, k, e)
		}
		delete(s.fronts, k)
	}
	if next == nil {
		s.marks.free(k)
		return
	}
	s.fronts[k] = next
	for _, el := range next.elements {
		s.counts[el]++
		e.elements[el] = true
	}
	inside := false
	for i := range next.servers {
		key := next.servers[i].Key
		inside = inside || key.Mark != 0
		s.claim(key, k, e)
	}
	if !inside {
		s.marks.free(k)
	}
}

// claim lets the frontend k claim the virtual server of this key.
func (s *state) claim(key ipvs.Key, k dataplane.FrontKey, e *edit) {
	s.claims.Add(key, k)
	if owner, _ := s.claims.Owner(key); owner == k {
		s.own(key, k, e)
	}
}

func (s *state) own(key ipvs.Key, k dataplane.FrontKey, e *edit) {
	servers := s.fronts[k].servers
	i := slices.IndexFunc(servers, func(v server) bool { return v.Key == key })
	s.stay(key, e)
	delete(e.gone, key)
	e.wanted[key] = &servers[i]
}

// release undoes claim.
func (s *state) release(key ipvs.Key, k dataplane.FrontKey, e *edit) {
	before, _ := s.claims.Owner(key)
	s.claims.Remove(key, k)
	switch owner, owned := s.claims.Owner(key); {
	case !owned:
		delete(e.wanted, key)
		e.gone[key] = k
	case owner != before:
		s.own(key, owner, e)
	}
}

// uncount takes back that one frontend wants an element.
func (s *state) uncount(el element, e *edit) {
	if s.counts[el]--; s.counts[el] == 0 {
		delete(s.counts, el)
	}
	e.elements[el] = true
}

// marks gives numbers to frontends that treat clients inside in their own way,
// the ones that they had in the kernel if they are known.
type marks struct {
	byFront map[dataplane.FrontKey]uint32
	used    map[uint32]bool
	// found are the numbers in the kernel, by frontend, and foundUsed all of them.
	found     map[ipset.Element]uint32
	foundUsed map[uint32]bool
	next      uint32
}

func newMarks(found map[ipset.Element]uint32) marks {
	m := marks{byFront: map[dataplane.FrontKey]uint32{}, used: map[uint32]bool{}, found: found, foundUsed: map[uint32]bool{}}
	for _, v := range found {
		m.foundUsed[v] = true
	}
	return m
}

// of returns the mark of a frontend with the given addresses, 0 if there is none
// left.
func (m *marks) of(k dataplane.FrontKey, addrs []netip.Addr) uint32 {
	if v := m.byFront[k]; v != 0 {
		return v
	}
	for _, a := range addrs {
		if v := m.found[ipset.Element{IP: a, Proto: k.Proto, Port: k.Port}]; v != 0 && !m.used[v] {
			return m.take(k, v)
		}
	}
	for range maxInside {
		m.next = m.next%maxInside + 1
		if v := markPrefix | m.next; !m.used[v] && !m.foundUsed[v] {
			return m.take(k, v)
		}
	}
	return 0
}

func (m *marks) take(k dataplane.FrontKey, v uint32) uint32 {
	m.byFront[k], m.used[v] = v, true
	return v
}

// forgetFound ends the time in which frontends may take the marks that they had in
// the kernel.
func (m *marks) forgetFound() { m.found, m.foundUsed = nil, nil }

func (m *marks) free(k dataplane.FrontKey) {
	delete(m.used, m.byFront[k])
	delete(m.byFront, k)
}

// marked are the elements of set inside, without their marks, as they were
// found.
func marked(elements map[element]bool) map[ipset.Element]uint32 {
	out := map[ipset.Element]uint32{}
	for e := range elements {
		if e.set == setInside && e.Mark&markMask == markPrefix {
			out[unmarked(e.Element)] = e.Mark
		}
	}
	return out
}

func unmarked(e ipset.Element) ipset.Element {
	e.Mark = 0
	return e
}

// ours reports whether a virtual server of the kernel is ours: set front lists
// those at addresses, before they are made and until they are gone.
func ours(k ipvs.Key, elements map[element]bool) bool {
	if k.Mark != 0 {
		return k.Mark&markMask == markPrefix
	}
	return elements[frontElement(setFront, k.Proto, k.Addr)]
}
