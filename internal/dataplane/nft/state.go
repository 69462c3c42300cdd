package nft

import (
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// state is what is in the kernel for one family, as it was written or read, and
// which of it is in use by frontends that are planned.
type state struct {
	// settings are the settings that it was written for.
	settings dataplane.Settings
	fronts   map[dataplane.FrontKey]*front
	chains   map[string]*chainState
	// unused are chains made for frontends that the kernel rejected afterwards.
	unused map[string]bool
	// ids are the keys of map targets in use.
	ids map[uint32]bool
	// pairs are the addresses in set local-endpoints, clusterIPs the addresses in the
	// set of that name.
	pairs      map[netip.Addr]*counted
	clusterIPs map[netip.Addr]*counted

	plan *dataplane.Plan
}

func newState() *state {
	return &state{
		fronts: map[dataplane.FrontKey]*front{}, chains: map[string]*chainState{}, unused: map[string]bool{}, ids: map[uint32]bool{},
		pairs: map[netip.Addr]*counted{}, clusterIPs: map[netip.Addr]*counted{},
	}
}

// counted is something that several frontends share: it is there as long as
// one of them needs it.
type counted struct {
	count   int
	present bool
}

// chainState is a chain that is there on demand.
type chainState struct {
	counted
	id uint32 // its key in map targets
	// target reports whether map targets leads to it.
	target bool
	// stored are the hashes of its rules.
	stored []nftables.StoredRule
	// checked reports whether the rules were compared since they may have changed.
	checked bool
}

// change is one transaction in the making, and how to undo it in the state if the
// kernel rejects it.
type change struct {
	l     *layout
	s     *state
	b     *nftables.Batch
	undo  []func()
	empty map[string]bool // chains that may be unused now
	freed map[*counted]func()
	// unpaired are local endpoints that nothing needs any more. They leave
	// their set in a later transaction: a packet in flight that the rules of
	// before sent to its own sender must still find the pair in postrouting, or
	// its connection is lost.
	unpaired map[netip.Addr]bool
}

func newChange(l *layout, s *state) *change {
	return &change{l: l, s: s, b: nftables.NewBatch(), empty: map[string]bool{}, freed: map[*counted]func(){}, unpaired: map[netip.Addr]bool{}}
}

// revert puts the state back to where the change began.
func (c *change) revert() {
	for _, f := range slices.Backward(c.undo) {
		f()
	}
}

func (c *change) save(p *counted) {
	old := *p
	c.undo = append(c.undo, func() { *p = old })
}

// set brings frontend k to what is planned.
func (c *change) set(k dataplane.FrontKey) {
	old := c.s.fronts[k]
	var next *front
	if p, f := c.s.plan.Wanted(k); f != nil {
		next = c.l.frontFor(&c.s.settings, p, f, old)
	}
	if old == nil && next == nil {
		return
	}
	c.b.Tag(k)
	if next != nil {
		next.present = true
		next.id = c.retain(&next.spec)
		c.count(k, next, 1)
	}
	if old != nil && old.known {
		c.release(&old.spec)
		c.count(k, old, -1)
	}
	c.l.diff(c.b, k, old, next)
	if next == nil {
		delete(c.s.fronts, k)
	} else {
		c.s.fronts[k] = next
	}
	c.undo = append(c.undo, func() {
		if old == nil {
			delete(c.s.fronts, k)
		} else {
			c.s.fronts[k] = old
		}
	})
}

// prepare makes the chains that frontend k will need.
func (c *change) prepare(k dataplane.FrontKey) {
	p, f := c.s.plan.Wanted(k)
	if f == nil {
		return
	}
	c.b.Tag(k)
	s := c.l.specFor(&c.s.settings, p, f)
	_, specs := c.l.chains(&s, &c.s.settings)
	for i := range specs {
		c.ensure(&specs[i])
	}
}

// retain counts the use of the chains of a spec and returns the key under which
// map targets leads to them.
func (c *change) retain(s *spec) uint32 {
	entry, specs := c.l.chains(s, &c.s.settings)
	for i := range specs {
		ch := c.s.chains[specs[i].name]
		c.saveChain(ch)
		ch.count++
	}
	switch entry {
	case chainRefuse:
		return idRefuse
	case chainDrop:
		return idDrop
	}
	return c.s.chains[entry].id
}

func (c *change) saveChain(ch *chainState) {
	old := *ch
	c.undo = append(c.undo, func() { *ch = old })
}

// ensure sees to it that a chain is there, with its rules.
func (c *change) ensure(sp *chainSpec) {
	ch := c.s.chains[sp.name]
	if ch == nil {
		ch = &chainState{}
		c.s.chains[sp.name] = ch
		c.undo = append(c.undo, func() { delete(c.s.chains, sp.name) })
	}
	if ch.present && ch.target && ch.checked && !sp.own {
		return
	}
	c.saveChain(ch)
	if rules := sp.rules(); !ch.present || !sameRules(ch.stored, rules) {
		if ch.present {
			c.b.FlushChain(c.l.table, sp.name)
		} else {
			c.b.AddChain(c.l.table, nftables.Chain{Name: sp.name})
		}
		ch.stored = nil
		for _, r := range rules {
			c.b.AddRule(c.l.table, sp.name, r)
			ch.stored = append(ch.stored, nftables.StoredRule{Text: r.Text, Hash: r.Hash()})
		}
	}
	if !ch.target {
		if ch.id == 0 {
			ch.id = c.newID(sp.name)
		}
		c.b.AddElem(c.l.table, setTargets, &nftables.Elem{Key: nftables.Uint32(ch.id), Goto: sp.name})
	}
	ch.present, ch.target, ch.checked = true, true, true
}

// newID returns the key in map targets for a new chain. It follows from the name,
// so that every process gives a chain the same one, unless two names collide: then
// the next free one is taken, and kept by whoever finds it.
func (c *change) newID(name string) uint32 {
	id, ok := plainPick(name)
	if !ok {
		id = c.s.unusedID(hashID(name))
	}
	c.useID(id)
	return id
}

// unusedID returns the first key from id on that no chain has.
func (s *state) unusedID(id uint32) uint32 {
	for s.ids[id] {
		if id++; id > idLast {
			id = idFirstFree
		}
	}
	return id
}

// hashID is the preferred key in map targets of a chain that is not a plain pick.
func hashID(name string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return idFirstFree + h.Sum32()%(idLast-idFirstFree+1)
}

func (c *change) useID(id uint32) {
	c.s.ids[id] = true
	c.undo = append(c.undo, func() { delete(c.s.ids, id) })
}

func (c *change) freeID(id uint32) {
	delete(c.s.ids, id)
	c.undo = append(c.undo, func() { c.s.ids[id] = true })
}

func (c *change) release(s *spec) {
	_, specs := c.l.chains(s, &c.s.settings)
	for i := range specs {
		ch := c.s.chains[specs[i].name]
		c.saveChain(ch)
		ch.count--
		c.empty[specs[i].name] = true
	}
}

// count adds n times what a front needs of the shared sets.
func (c *change) count(k dataplane.FrontKey, f *front, n int) {
	if f.clusterIP {
		c.countAddr(c.s.clusterIPs, setClusterIPs, k.Addr, k.Addr.AsSlice(), n)
	}
	for _, list := range f.lists {
		for _, e := range list {
			if e.Local {
				a := e.Addr.Addr()
				c.countAddr(c.s.pairs, setLocalEndpoints, a, pairKey(a), n)
			}
		}
	}
}

func (c *change) countAddr(m map[netip.Addr]*counted, set string, a netip.Addr, key []byte, n int) {
	p := m[a]
	if p == nil {
		p = &counted{}
		m[a] = p
		c.undo = append(c.undo, func() { delete(m, a) })
	} else {
		c.save(p)
	}
	p.count += n
	if !p.present {
		c.b.AddElem(c.l.table, set, &nftables.Elem{Key: key})
		p.present = true
	}
	if n < 0 && set == setLocalEndpoints {
		c.unpaired[a] = true
	} else if n < 0 {
		c.freed[p] = func() {
			c.b.DelElem(c.l.table, set, key)
			delete(m, a)
			c.undo = append(c.undo, func() { m[a] = p })
		}
	}
}

// unpair removes the addresses of addrs that nothing needs from local-endpoints.
func (c *change) unpair(addrs map[netip.Addr]bool) {
	for a := range addrs {
		p := c.s.pairs[a]
		if p == nil || p.count > 0 {
			continue
		}
		if p.present {
			c.b.DelElem(c.l.table, setLocalEndpoints, pairKey(a))
		}
		delete(c.s.pairs, a)
		c.undo = append(c.undo, func() { c.s.pairs[a] = p })
	}
}

// sweep removes what nothing uses any more.
func (c *change) sweep() {
	for p, free := range c.freed {
		if p.count == 0 {
			free()
		}
	}
	var gone []string
	for name := range c.empty {
		if ch := c.s.chains[name]; ch != nil && ch.count == 0 {
			gone = append(gone, name)
		}
	}
	slices.Sort(gone)
	for _, name := range gone {
		ch := c.s.chains[name]
		if ch.target {
			c.b.DelElem(c.l.table, setTargets, nftables.Uint32(ch.id))
			c.freeID(ch.id)
		}
	}
	for _, name := range gone {
		if c.s.chains[name].present {
			c.b.FlushChain(c.l.table, name)
		}
	}
	for _, name := range gone {
		ch := c.s.chains[name]
		if ch.present {
			c.b.DelChain(c.l.table, name)
		}
		delete(c.s.chains, name)
		c.undo = append(c.undo, func() { c.s.chains[name] = ch })
	}
}
