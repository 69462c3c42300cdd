package direct

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/table"
)

// front is the content of the sets for one frontend, as read from the kernel or as planned.
type front struct {
	owner string // the Service port, in the element's comment
	class uint32 // as classOf has it; 0 if packets do not find the frontend
	// slots are numbers of hops, less 1: 0 is a slot that is not there.
	slots []uint16
	hops  []netip.Addr
	// serving are the next hops in set hops, sorted.
	serving []netip.Addr
}

// passedOn reports whether packets to a frontend are passed on.
func passedOn(p *table.ServicePort, f *table.Frontend) bool {
	return p != nil && f != nil && f.Hops != nil
}

// frontFor plans a frontend, nil if packets to it are not passed on.
func (l *layout) frontFor(p *table.ServicePort, f *table.Frontend) *front {
	if !passedOn(p, f) {
		return nil
	}
	size := table.HopSlots(f.Hops)
	out := &front{owner: p.ID.String(), class: classOf(size, p.Affinity != 0), slots: spread(f.Hops, size)}
	for i := range out.slots {
		out.slots[i]++
	}
	here, _ := netip.AddrFromSlice(make([]byte, l.Len))
	for _, h := range f.Hops {
		if h.Via.IsValid() {
			out.hops, out.serving = append(out.hops, h.Via), append(out.serving, h.Via)
		} else {
			out.hops = append(out.hops, here)
		}
	}
	slices.SortFunc(out.serving, netip.Addr.Compare)
	out.serving = slices.Compact(out.serving)
	return out
}

// slot is the next hop in a slot, not valid if there is none.
func (f *front) slot(i int) netip.Addr {
	if i >= len(f.slots) || f.slots[i] == 0 {
		return netip.Addr{}
	}
	return f.hops[f.slots[i]-1]
}

// setSlot takes down a slot that was found.
func (f *front) setSlot(i int, a netip.Addr) {
	n := slices.Index(f.hops, a)
	if n < 0 {
		n, f.hops = len(f.hops), append(f.hops, a)
	}
	if grow := i + 1 - len(f.slots); grow > 0 {
		f.slots = append(f.slots, make([]uint16, grow)...)
	}
	f.slots[i] = uint16(n + 1) //nolint:gosec // at most one for each of 4,093 slots
}

func (f *front) same(o *front) bool {
	if f.owner != o.owner || f.class != o.class || len(f.slots) != len(o.slots) || !slices.Equal(f.serving, o.serving) {
		return false
	}
	for i := range f.slots {
		if f.slot(i) != o.slot(i) {
			return false
		}
	}
	return true
}

// diff writes the changes that turn the elements of a frontend into next's instead of old's; nil is none.
func (l *layout) diff(b *nftables.Batch, k dataplane.FrontKey, old, next *front) {
	none := &front{}
	if old == nil {
		old = none
	}
	if next == nil {
		next = none
	}
	base := tables.AppendKey(make([]byte, 0, 64), k)
	if old.class != next.class || old.owner != next.owner {
		if old.class != 0 {
			b.DelElem(l.table, setFronts, base)
		}
		if next.class != 0 {
			b.AddElem(l.table, setFronts, &nftables.Elem{Key: base, Data: nftables.Uint32(next.class), Comment: next.owner})
		}
	}
	for i := range max(len(old.slots), len(next.slots)) {
		was, is := old.slot(i), next.slot(i)
		if was == is {
			continue
		}
		key := slotKey(i, k)
		if was.IsValid() {
			b.DelElem(l.table, setSlots, key)
		}
		if is.IsValid() {
			b.AddElem(l.table, setSlots, &nftables.Elem{Key: key, Data: append(nftables.Uint32(0), is.AsSlice()...)})
		}
	}
	for _, a := range old.serving {
		if _, stays := slices.BinarySearchFunc(next.serving, a, netip.Addr.Compare); !stays {
			b.DelElem(l.table, setHops, append(a.AsSlice(), base...))
		}
	}
	for _, a := range next.serving {
		if _, was := slices.BinarySearchFunc(old.serving, a, netip.Addr.Compare); !was {
			b.AddElem(l.table, setHops, &nftables.Elem{Key: append(a.AsSlice(), base...)})
		}
	}
}

// slotKey is the key of a frontend's slot in map slots.
func slotKey(slot int, k dataplane.FrontKey) []byte {
	return tables.AppendKey(nftables.Uint32(uint32(slot)), k) //nolint:gosec // below 4,093
}
