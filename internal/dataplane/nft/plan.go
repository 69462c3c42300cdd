package nft

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/table"
)

// front is the content of the kernel's maps, present or desired, for one frontend.
type front struct {
	// owner is the Service port, in the element's comment.
	owner string
	// present reports whether the frontend's own element, by which packets find
	// it, is there; id is its value.
	present bool
	// size is how many endpoints there are, the second list's in the upper
	// half.
	id, size uint32
	// lists are the endpoints by slot, of both lists of a spec. An endpoint
	// without address is a hole, which only another program leaves.
	lists [2][]table.Endpoint
	// sticky reports whether the endpoints are in the maps and sets for affinity.
	sticky bool
	// stored are the elements found in these sets, which need not be in order.
	stored *[2]map[netip.AddrPort]bool
	// clusterIP reports whether other ports of the address must be refused.
	clusterIP bool
	// spec is what the chains are made from. It is not known of a front that
	// was found in the kernel.
	spec  spec
	known bool
}

// frontFor plans a frontend. The slots of its endpoints follow old, so that as
// few elements as possible change.
func (l *layout) frontFor(set *dataplane.Settings, p *table.ServicePort, f *table.Frontend, old *front) *front {
	fr := &front{
		owner: p.ID.String(), clusterIP: f.Kind == table.ClusterIP, sticky: p.Affinity != 0,
		spec: l.specFor(set, p, f), known: true,
	}
	for i, list := range [][]table.Endpoint{f.Endpoints, f.LocalClients} {
		var before []table.Endpoint
		if old != nil {
			before = old.lists[i]
		}
		fr.lists[i] = dataplane.Reslot(before, dataplane.Unique(list))
	}
	fr.size = uint32(fr.spec.n[0] | fr.spec.n[1]<<16)
	return fr
}

// specFor returns the chains that a frontend needs.
func (l *layout) specFor(set *dataplane.Settings, p *table.ServicePort, f *table.Frontend) spec {
	k := dataplane.KeyOf(p.Protocol, f)
	s := spec{
		node: k.Node, split: f.LocalClients != nil, drop: f.Drop,
		n:        [2]int{len(dataplane.Unique(f.Endpoints)), len(dataplane.Unique(f.LocalClients))},
		affinity: dataplane.AffinitySeconds(p), masq: dataplane.MasqueradingOf(set, f),
		limited: f.SourceRanges != nil,
	}
	s.inTurn = l.cfg.Balance == dataplane.RoundRobin && s.affinity == 0
	if s.limited {
		s.allow, s.vip = f.SourceRanges, k.Addr
	}
	if s.limited || s.inTurn {
		s.own = tables.OwnName(k)
	}
	return s
}

// What follows a frontend in the keys of elements, as tables.AppendKey writes
// them; marks are in the machine's order.

func appendEndpoint(b []byte, a netip.AddrPort) []byte {
	b = append(b, a.Addr().AsSlice()...)
	return append(b, byte(a.Port()>>8), byte(a.Port()), 0, 0)
}

func appendMark(b []byte, v uint32) []byte { return binary.NativeEndian.AppendUint32(b, v) }

func (l *layout) parseEndpoint(b []byte) (netip.AddrPort, bool) {
	if len(b) != int(l.Len)+4 {
		return netip.AddrPort{}, false
	}
	a, _ := netip.AddrFromSlice(b[:l.Len])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[l.Len:])), true
}

// elementSink takes the changes of elements: deletions first for any one key.
type elementSink interface {
	DelElem(t nftables.Table, set string, key []byte)
	AddElem(t nftables.Table, set string, e *nftables.Elem)
}

// sets are the names of the maps and sets that hold frontends and their
// endpoints.
type sets struct {
	vips string
	// endpoints holds slots of frontends without affinity, sticky the slots of the
	// others; serving the endpoints of the latter, by list.
	endpoints, sticky string
	serving           [2]string
}

func setsOf(node bool) sets {
	if node {
		return sets{setNodePorts, setNodeEndpoints, setNodeStickyEndp, [2]string{setNodeServing, setNodeLocServing}}
	}
	return sets{setVIPs, setEndpoints, setStickyEndpoints, [2]string{setServing, setLocalServing}}
}

// diff writes the changes that turn the elements of a frontend into next's instead
// of old; nil is none.
func (l *layout) diff(b elementSink, k dataplane.FrontKey, old, next *front) {
	in := setsOf(k.Node)
	none := front{}
	if old == nil {
		old = &none
	}
	if next == nil {
		next = &none
	}
	base := tables.AppendKey(make([]byte, 0, 64), k)
	if old.present != next.present || old.id != next.id || old.size != next.size || old.owner != next.owner {
		if old.present {
			b.DelElem(l.table, in.vips, base)
		}
		if next.present {
			b.AddElem(l.table, in.vips, &nftables.Elem{Key: base, Data: appendMark(nftables.Uint32(next.size), next.id), Comment: next.owner})
		}
	}
	for list := range next.lists {
		for slot := range max(len(old.lists[list]), len(next.lists[list])) {
			a, z := old.slot(list, slot), next.slot(list, slot)
			if a == z && old.sticky == next.sticky {
				continue
			}
			key := appendMark(base, uint32(list*localList+slot))
			if a.IsValid() {
				b.DelElem(l.table, in.slots(old.sticky), key)
			}
			if z.IsValid() {
				b.AddElem(l.table, in.slots(next.sticky), &nftables.Elem{Key: key, Data: slotData(z, next.sticky)})
			}
		}
		was, is := old.serving(list), next.serving(list)
		for a := range was {
			if !is[a] {
				b.DelElem(l.table, in.serving[list], append(appendEndpoint(nil, a), base...))
			}
		}
		for a := range is {
			if !was[a] {
				b.AddElem(l.table, in.serving[list], &nftables.Elem{Key: append(appendEndpoint(nil, a), base...)})
			}
		}
	}
}

func (s *sets) slots(sticky bool) string {
	if sticky {
		return s.sticky
	}
	return s.endpoints
}

func slotData(a netip.AddrPort, sticky bool) []byte {
	b := make([]byte, 0, 24)
	if sticky {
		b = appendMark(b, 0)
	}
	return appendEndpoint(b, a)
}

// slot is the address in a slot, not valid if there is none.
func (f *front) slot(list, slot int) netip.AddrPort {
	if slot < len(f.lists[list]) {
		return f.lists[list][slot].Addr
	}
	return netip.AddrPort{}
}

// serving are the endpoints of a list in the set of serving endpoints.
func (f *front) serving(list int) map[netip.AddrPort]bool {
	if f.stored != nil {
		return f.stored[list]
	}
	if !f.sticky {
		return nil
	}
	m := make(map[netip.AddrPort]bool, len(f.lists[list]))
	for _, e := range f.lists[list] {
		m[e.Addr] = true
	}
	return m
}

func sameRules(a []nftables.StoredRule, b []nftables.Rule) bool {
	return slices.EqualFunc(a, b, func(x nftables.StoredRule, y nftables.Rule) bool { return x.Hash == y.Hash() })
}

// pairKey is the key of an address in set local-endpoints: what has it for both
// source and destination is found there.
func pairKey(a netip.Addr) []byte { return bytes.Repeat(a.AsSlice(), 2) }
