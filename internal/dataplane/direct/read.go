package direct

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/table"
)

// found is what read found in the kernel.
type found struct {
	// there reports whether there is a table of the name, usable whether it is of our layout.
	there, usable bool
	sets          map[string]bool
	chains        map[string][]nftables.StoredRule
	fronts        map[dataplane.FrontKey]*front
	junk          []rawElem
}

// rawElem is an element that cannot be ours.
type rawElem struct{ set, key string }

// thoroughUpTo is how many slots are read with everything that may stand beside them. With more, only the slots that frontends
// lead to are looked up: what else there is leads nowhere.
const thoroughUpTo = 20000

// read reads our table.
func (t *Target) read(thorough bool) (*found, error) {
	l := t.layout
	r := &found{sets: map[string]bool{}, chains: map[string][]nftables.StoredRule{}, fronts: map[dataplane.FrontKey]*front{}}
	is, err := nftables.ReadTable(t.kernel, l.table)
	if err != nil || is == nil {
		return r, err
	}
	r.there = true
	if is.Comment != schema || !l.fits(is, r) {
		r.sets, r.chains = map[string]bool{}, map[string][]nftables.StoredRule{}
		return r, nil
	}
	r.usable = true
	if !r.sets[setFronts] || !r.sets[setSlots] || !r.sets[setHops] {
		return r, nil
	}
	err = t.elems(r, setFronts, 0, func(k dataplane.FrontKey, e *nftables.Elem) bool {
		if len(e.Data) != 4 {
			return false
		}
		f := r.at(k)
		f.class, f.owner = binary.NativeEndian.Uint32(e.Data), e.Comment
		return true
	})
	if err == nil {
		err = t.readSlots(r, thorough)
	}
	if err == nil {
		err = t.elems(r, setHops, int(l.Len), func(k dataplane.FrontKey, e *nftables.Elem) bool {
			a, ok := l.addressOf(e.Key[:l.Len])
			if ok {
				f := r.at(k)
				f.serving = append(f.serving, a)
			}
			return ok
		})
	}
	for _, f := range r.fronts {
		slices.SortFunc(f.serving, netip.Addr.Compare)
		f.serving = slices.Compact(f.serving)
	}
	return r, err
}

// elems calls take for each element of a set that has a frontend after so many bytes of its key. All others are junk, and so are
// elements for which take reports false. A set that changes during the read is read again: take is called again with the same.
func (t *Target) elems(r *found, set string, after int, take func(k dataplane.FrontKey, e *nftables.Elem) bool) error {
	before := len(r.junk)
	return t.kernel.Elems(t.layout.table, set, func() { r.junk = r.junk[:before] }, func(e nftables.Elem) {
		if k, ok := t.layout.frontOf(e.Key, after); !ok || !take(k, &e) {
			r.junk = append(r.junk, rawElem{set, string(e.Key)})
		}
	})
}

// frontOf reads the frontend after so many bytes of a key, which must end with it.
func (l *layout) frontOf(key []byte, after int) (dataplane.FrontKey, bool) {
	if len(key) < after {
		return dataplane.FrontKey{}, false
	}
	k, rest, ok := tables.ParseKey(key[after:], l.family, false)
	return k, ok && len(rest) == 0
}

func (r *found) at(k dataplane.FrontKey) *front {
	if r.fronts[k] == nil {
		r.fronts[k] = &front{}
	}
	return r.fronts[k]
}

// readSlots reads the slots of the frontends found.
func (t *Target) readSlots(r *found, thorough bool) error {
	var keys [][]byte
	for k, f := range r.fronts {
		for i := range int(f.class &^ affine) {
			keys = append(keys, slotKey(i, k))
		}
	}
	take := func(k dataplane.FrontKey, e *nftables.Elem) bool {
		if len(e.Data) < 4 {
			return false
		}
		a, ok := t.layout.addressOf(e.Data[4:])
		slot := int(binary.NativeEndian.Uint32(e.Key))
		if !ok || slot >= table.HopTables[len(table.HopTables)-1] {
			return false
		}
		r.at(k).setSlot(slot, a)
		return true
	}
	if thorough || len(keys) <= thoroughUpTo {
		return t.elems(r, setSlots, 4, take)
	}
	return t.kernel.Get(t.layout.table, setSlots, keys, func(e nftables.Elem) {
		if k, ok := t.layout.frontOf(e.Key, 4); ok {
			take(k, &e)
		}
	})
}

// fits reports whether the sets and chains there are of this layout, and takes them down. A foreign one does not fit.
func (l *layout) fits(is *nftables.StoredTable, r *found) bool {
	ours, hooks := map[string]nftables.Set{}, map[string]*nftables.Hook{}
	for _, s := range l.sets() {
		ours[s.Name] = s
	}
	for _, c := range l.chains(&dataplane.Settings{}) {
		hooks[c.name] = c.hook
	}
	for _, st := range is.Sets {
		if s, known := ours[st.Name]; !known || !st.Is(s) {
			return false
		}
		r.sets[st.Name] = true
	}
	for _, c := range is.Chains {
		if want, known := hooks[c.Name]; !known || !want.Is(c.Hook) {
			return false
		}
		r.chains[c.Name] = is.Rules[c.Name]
	}
	return true
}

// reportDrift reports how the kernel differs from what t left.
func (r *found) reportDrift(c *dataplane.Change, t *Target) {
	drift := func(format string, args ...any) { c.Drift(t.layout.table.String()+": "+format, args...) }
	switch {
	case !t.settings.Direct && r.there:
		drift("a foreign table was there")
		return
	case !t.settings.Direct:
		return
	case !r.there:
		drift("the table was missing")
		return
	case !r.usable:
		drift("the table was of another layout")
		return
	}
	for _, s := range t.layout.sets() {
		if !r.sets[s.Name] {
			drift("set %s was missing", s.Name)
		}
	}
	for _, ch := range t.layout.chains(&t.settings) {
		if stored, there := r.chains[ch.name]; !there || !sameRules(stored, ch.rules) {
			drift("chain %s was changed", ch.name)
		}
	}
	for k, was := range t.fronts {
		switch is := r.fronts[k]; {
		case is == nil:
			drift("%s of %s was missing", k, was.owner)
		case !is.same(was):
			drift("%s of %s was changed", k, was.owner)
		}
	}
	for k := range r.fronts {
		if t.fronts[k] == nil {
			drift("a foreign %s was there", k)
		}
	}
	if len(r.junk) > 0 {
		drift("%d foreign elements were there", len(r.junk))
	}
}

// Dump appends the contents of the kernel now, sorted, without slots: they follow from the hops. It appends nothing if there is no
// table.
func (t *Target) Dump(b *strings.Builder) error {
	r, err := t.read(true)
	if err != nil || !r.there {
		return err
	}
	if !r.usable {
		fmt.Fprintf(b, "table %s: of another layout\n", t.layout.table)
		return nil
	}
	fmt.Fprintf(b, "table %s\n", t.layout.table)
	for _, k := range slices.SortedFunc(maps.Keys(r.fronts), dataplane.FrontKey.Compare) {
		f := r.fronts[k]
		how := "client and port"
		if f.class&affine != 0 {
			how = "client"
		}
		fmt.Fprintf(b, "  %s %s, by %s\n", k, f.owner, how)
		for _, a := range slices.SortedFunc(slices.Values(f.hops), netip.Addr.Compare) {
			n := 0
			for i := range f.slots {
				if f.slot(i) == a {
					n++
				}
			}
			if a.IsUnspecified() {
				fmt.Fprintf(b, "    here: %d of %d\n", n, f.class&^affine)
			} else {
				fmt.Fprintf(b, "    %s: %d of %d\n", a, n, f.class&^affine)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.chains)) {
		fmt.Fprintf(b, "  chain %s\n", name)
		for _, rule := range r.chains[name] {
			text := rule.Text
			if rule.Hash == 0 {
				text = "a rule of another program"
			}
			fmt.Fprintf(b, "    %s\n", text)
		}
	}
	return nil
}
