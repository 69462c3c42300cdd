package iptables

import (
	"bytes"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/table"
)

// hasher hashes lines. Its seed is one process's: no hash ever leaves it.
type hasher struct{ seed maphash.Seed }

// digest tells chains apart by their rules: a hash of the lines, and in the
// countBits low bits how many there are.
type digest uint64

const countBits = 16

func (h hasher) sum(lines []byte) digest {
	const most = 1<<countBits - 1
	return digest(maphash.Bytes(h.seed, lines)&^most | uint64(min(bytes.Count(lines, []byte("\n")), most)))
}

// rules is how many rules the chain has.
func (d digest) rules() int { return int(d & (1<<countBits - 1)) }

func newHasher() hasher { return hasher{maphash.MakeSeed()} }

// chainKey is one of our chains.
type chainKey struct{ table, name string }

// stored is chains as they are in the kernel.
type stored map[chainKey]digest

// state is the desired state of the kernel for one family, and which of it was
// written.
type state struct {
	l        *layout
	settings dataplane.Settings

	// fronts are the frontends in the trees; vips and nodes find them.
	fronts map[dataplane.FrontKey]*front
	vips   *tree[*front]
	nodes  *tree[*front]
	// locals counts the frontends' local endpoints; hairpins has their
	// addresses.
	locals map[netip.Addr]int
	// leaving are addresses in hairpins that no frontend has any more.
	leaving  map[netip.Addr]bool
	hairpins *tree[*hairpin]
	// own are the chains of single frontends that may have changed.
	own map[string]dataplane.FrontKey

	plan *dataplane.Plan
}

func newState(l *layout, plan *dataplane.Plan) *state {
	return &state{
		l: l, settings: plan.Settings, plan: plan,
		fronts: map[dataplane.FrontKey]*front{}, locals: map[netip.Addr]int{},
		leaving: map[netip.Addr]bool{}, own: map[string]dataplane.FrontKey{},
		vips: newTree[*front](chainVIPs, l.vipSlot), nodes: newTree[*front](chainNodePorts, l.nodeSlot),
		hairpins: newTree[*hairpin](chainHairpin, l.hairpinSlot),
	}
}

// wanted returns the desired frontend of k, nil if none.
func (s *state) wanted(k dataplane.FrontKey) *front {
	p, f := s.plan.Wanted(k)
	if f == nil {
		return nil
	}
	return s.l.frontFor(&s.settings, p, f)
}

// set puts next in the place of the frontend k, nil to have none, and returns
// the earlier ones.
func (s *state) set(k dataplane.FrontKey, next *front) (old *front) {
	old = s.fronts[k]
	t := s.vips
	if k.Node {
		t = s.nodes
	}
	if old != nil {
		s.l.ownNames(old, func(name string) { s.own[name] = k })
		s.count(old, -1)
	}
	switch {
	case next != nil:
		s.fronts[k] = next
		s.l.ownNames(next, func(name string) { s.own[name] = k })
		s.count(next, 1)
		t.put(next)
	case old != nil:
		delete(s.fronts, k)
		t.remove(old)
	}
	return old
}

// count adds n times the local endpoints of a front.
func (s *state) count(fr *front, n int) {
	for _, list := range [][]table.Endpoint{fr.f.Endpoints, fr.f.LocalClients} {
		for _, e := range list {
			if !e.Local {
				continue
			}
			a := e.Addr.Addr()
			was := s.locals[a]
			s.locals[a] += n
			switch {
			case was == 0 && s.leaving[a]:
				delete(s.leaving, a)
			case was == 0:
				s.hairpins.put(s.hairpin(a))
			case was+n == 0:
				s.leaving[a] = true
				delete(s.locals, a)
			}
		}
	}
}

func (s *state) hairpin(a netip.Addr) *hairpin {
	return &hairpin{addr: a, order: s.l.orderOfAddr(a)}
}

// leave takes the addresses away that no frontend has any more. That comes
// after the frontends' rules: a packet may have met the earlier rules, and would
// not be masqueraded.
func (s *state) leave() bool {
	for a := range s.leaving {
		s.hairpins.remove(s.hairpin(a))
	}
	any := len(s.leaving) > 0
	clear(s.leaving)
	return any
}

// ownNames calls name for each chain of a frontend's own.
func (l *layout) ownNames(fr *front, name func(string)) {
	if !fr.own {
		return
	}
	name(l.ownName('F', fr.fk))
	if fr.f.LocalClients != nil {
		name(l.ownName('I', fr.fk))
	}
	if fr.f.SourceRanges != nil {
		name(l.ownName('A', fr.fk))
	}
}

// chain is a chain that may have changed, with its desired lines; gone
// reports that it is not to be.
type chain struct {
	chainKey
	lines []byte
	gone  bool
}

// dirty returns the chains that may have changed since the last call.
func (s *state) dirty() []chain {
	var out []chain
	w := writer{}
	for _, t := range []*tree[*front]{s.vips, s.nodes} {
		for name := range t.dirty {
			w.chain, w.b = name, nil
			there := s.render(t, &w)
			out = append(out, chain{chainKey{tableNAT, name}, w.b, !there})
		}
		clear(t.dirty)
	}
	for name := range s.hairpins.dirty {
		out = append(out, s.local(name, tableNAT))
		if s.l.cfg.DropInvalid {
			out = append(out, s.local(name, tableFilter))
		}
	}
	clear(s.hairpins.dirty)
	for name, fk := range s.own {
		c := chain{chainKey{tableNAT, name}, nil, true}
		if fr := s.fronts[fk]; fr != nil {
			s.l.chains(&s.settings, fr, func(n string, lines []byte) {
				if n == name {
					c.lines, c.gone = lines, false
				}
			})
		}
		out = append(out, c)
	}
	clear(s.own)
	slices.SortFunc(out, func(a, b chain) int { return a.compare(b.chainKey) })
	return out
}

func (k chainKey) compare(o chainKey) int {
	if k.table != o.table {
		// filter first: what a packet's mark says must be understood.
		if k.table == tableFilter {
			return -1
		}
		return 1
	}
	return strings.Compare(k.name, o.name)
}

// render writes a chain of a tree of frontends and reports whether it must exist.
func (s *state) render(t *tree[*front], w *writer) bool {
	n, slots, items, ok := t.chain(w.chain)
	if !ok {
		return false
	}
	match := s.l.vipMatch
	if t == s.nodes {
		match = s.l.nodeMatch
	}
	for _, br := range slots {
		w.rule(match(br.slot.slot, br.slot.slotBits), "-g "+br.to)
	}
	guarded := false
	for i, it := range items {
		s.l.leaf(w, it, !sameProtocol(items, i, i-1) && !sameProtocol(items, i, i+1))
		guarded = guarded || it.guarded()
		if last := i+1 == len(items) || items[i+1].fk.Addr != it.fk.Addr; last {
			if guarded {
				w.rule(destination(it.fk.Addr), "-g "+chainRefuse)
			}
			guarded = false
		}
	}
	if n.inner && n.guarded > 0 && n.at >= s.l.addrBits() && t == s.vips {
		w.rule(destination(s.l.addrOf(&n.slotOfKids().slot)), "-g "+chainRefuse)
	}
	return true
}

// sameProtocol reports whether two items have one address and protocol.
func sameProtocol(items []*front, i, j int) bool {
	return j >= 0 && j < len(items) && items[i].fk.Addr == items[j].fk.Addr && items[i].fk.Proto == items[j].fk.Proto
}

// local makes a chain of the tree of local endpoints: in table nat it
// masquerades what they send to themselves, in table filter it drops what they
// send.
func (s *state) local(name, table string) chain {
	w := writer{chain: name}
	if name == chainHairpin && table == tableFilter {
		w.chain = chainInvalid
	}
	_, slots, items, ok := s.hairpins.chain(name)
	for _, br := range slots {
		w.rule(source(netip.PrefixFrom(s.l.addrOf(&br.slot.slot), br.slot.slotBits-s.l.pad)), "-g "+br.to)
	}
	for _, h := range items {
		from := source(netip.PrefixFrom(h.addr, h.addr.BitLen()))
		if table == tableFilter {
			w.rule(from, "-j DROP")
		} else {
			// On lo a connection to itself is no hairpin but two sockets of this
			// node.
			w.rule(from+destination(h.addr)+"! -o lo ", "-j MASQUERADE --random-fully")
		}
	}
	return chain{chainKey{table, w.chain}, w.b, !ok}
}
