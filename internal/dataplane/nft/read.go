package nft

import (
	"encoding/binary"
	"iter"
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
	// state has the fronts and chains, none of them in use by a Table yet.
	*state
	// usable reports whether the table is there and of our layout, replace whether
	// it is there and is not.
	usable, replace bool
	sets            map[string]bool // of the layout
	foreignSets     []string
	// oldClusterIPs reports whether a table to replace has set cluster-ips.
	oldClusterIPs bool
	// closed reports whether chain unserved, which was not there, has its rules.
	closed bool
	// base are the chains that are not made on demand, also foreign ones.
	base         map[string][]nftables.StoredRule
	refuse, drop bool // elements of map targets
	nodeAddrs    map[netip.Addr]bool
	junk         map[rawElem]bool
}

// rawElem is an element that cannot be ours.
type rawElem struct {
	set, key string
}

func (f *found) discard(set string, key []byte) { f.junk[rawElem{set, string(key)}] = true }

// thoroughUpTo is how many endpoints are read with everything that may stand
// beside them. With more, only the ones that frontends refer to are looked up: what
// else there is leads nowhere.
const thoroughUpTo = 20000

// read reads our table in the kernel. ports are the planned ones: their
// frontends are looked up where a dump does not show them, since a dump can
// miss elements while the kernel grows a set.
func (t *target) read(thorough bool, ports iter.Seq[*table.ServicePort]) (*found, error) {
	l, k := t.layout, t.kernel
	r := &found{state: newState(), junk: map[rawElem]bool{}, sets: map[string]bool{}, base: map[string][]nftables.StoredRule{},
		nodeAddrs: map[netip.Addr]bool{}}
	is, err := nftables.ReadTable(k, l.table)
	if err != nil || is == nil {
		return r, err
	}
	if is.Comment != schema || !l.fits(is, r) {
		r.replace = true
		r.oldClusterIPs = slices.ContainsFunc(is.Sets, func(s nftables.StoredSet) bool { return s.Name == setClusterIPs })
		r.sets, r.foreignSets = map[string]bool{}, nil
		return r, nil
	}
	r.usable = true
	if err := t.readTargets(r); err != nil {
		return r, err
	}
	l.sortChains(r, is)
	for _, node := range []bool{false, true} {
		if err := t.readFronts(r, node, thorough, ports); err != nil {
			return r, err
		}
	}
	return r, t.readAddresses(r, ports)
}

// missed are the keys of frontends of ports that are not in seen.
func (t *target) missed(ports iter.Seq[*table.ServicePort], seen func(dataplane.FrontKey) bool,
	key func(dataplane.FrontKey) []byte) [][]byte {
	var keys [][]byte
	for p := range ports {
		for i := range p.Frontends {
			if k := dataplane.KeyOf(p.Protocol, &p.Frontends[i]); p.Family == t.layout.family && !seen(k) {
				keys = append(keys, key(k))
			}
		}
	}
	return keys
}

// everything are the Settings with which all base chains are there.
var everything = dataplane.Settings{Localhost: true}

// fits reports whether the sets and base chains there are of this layout, and
// takes the sets down.
func (l *layout) fits(is *nftables.StoredTable, r *found) bool {
	ours := map[string]nftables.Set{}
	for _, s := range l.sets() {
		ours[s.Name] = s
	}
	for _, st := range is.Sets {
		s, known := ours[st.Name]
		switch {
		case !known:
			r.foreignSets = append(r.foreignSets, st.Name)
		case !st.Is(s):
			return false
		default:
			r.sets[st.Name] = true
		}
	}
	hooks := map[string]*nftables.Hook{}
	for _, c := range l.base(&everything) {
		hooks[c.name] = c.hook
	}
	for _, c := range is.Chains {
		if want, known := hooks[c.Name]; known && !want.Is(c.Hook) {
			return false
		}
	}
	return true
}

// readTargets reads the map from keys to chains.
func (t *target) readTargets(r *found) error {
	if !r.sets[setTargets] {
		return nil
	}
	begin := func() {
		r.chains, r.refuse, r.drop, r.ids, r.junk = map[string]*chainState{}, false, false, map[uint32]bool{}, map[rawElem]bool{}
	}
	return t.kernel.Elems(t.layout.table, setTargets, begin, func(e nftables.Elem) {
		id := binary.NativeEndian.Uint32(e.Key)
		r.ids[id] = true
		n, plain := plainPick(e.Goto)
		switch {
		case id == idRefuse && e.Goto == chainRefuse:
			r.refuse = true
		case id == idDrop && e.Goto == chainDrop:
			r.drop = true
		case e.Goto == "" || id == idRefuse || id == idDrop || r.chains[e.Goto] != nil || plain != (id < idFirstFree) || plain && n != id:
			r.discard(setTargets, e.Key)
		default:
			r.chains[e.Goto] = &chainState{id: id, target: true}
		}
	})
}

// sortChains takes down which chains are there with which rules. Those that are not
// always there were made on demand, or look as if.
func (l *layout) sortChains(r *found, is *nftables.StoredTable) {
	always := map[string]bool{}
	for _, c := range l.base(&everything) {
		always[c.name] = true
	}
	for _, c := range is.Chains {
		if always[c.Name] || c.Hook != nil {
			r.base[c.Name] = is.Rules[c.Name]
			continue
		}
		if r.chains[c.Name] == nil {
			r.chains[c.Name] = &chainState{}
		}
		r.chains[c.Name].present, r.chains[c.Name].stored = true, is.Rules[c.Name]
	}
}

// readFronts reads what there is of frontends: virtual IPs, or node ports.
func (t *target) readFronts(r *found, node, thorough bool, ports iter.Seq[*table.ServicePort]) error {
	l, k := t.layout, t.kernel
	in := setsOf(node)
	fronts := frontMap{}
	at := func(k dataplane.FrontKey) *front { return fronts.at(k) }
	each := func(set string, begin func(), take func(e *nftables.Elem) bool) error {
		if !r.sets[set] {
			return nil
		}
		return k.Elems(l.table, set, begin, func(e nftables.Elem) {
			if !take(&e) {
				r.discard(set, e.Key)
			}
		})
	}
	take := func(e *nftables.Elem) bool {
		k, _, ok := tables.ParseKey(e.Key, l.family, node)
		if !ok || len(e.Data) != 8 {
			return false
		}
		fr := at(k)
		fr.present, fr.owner = true, e.Comment
		fr.size, fr.id = binary.NativeEndian.Uint32(e.Data), binary.NativeEndian.Uint32(e.Data[4:])
		return true
	}
	err := each(in.vips, func() { clear(fronts) }, take)
	if err == nil && r.sets[in.vips] {
		keys := t.missed(ports, func(k dataplane.FrontKey) bool { return fronts[k] != nil || k.Node != node },
			func(k dataplane.FrontKey) []byte { return tables.AppendKey(nil, k) })
		err = k.Get(l.table, in.vips, keys, func(e nftables.Elem) { take(&e) })
	}
	if err != nil {
		return err
	}
	total := 0
	for _, fr := range fronts {
		total += int(fr.size&0xffff + fr.size>>16)
	}
	if thorough || total <= thoroughUpTo {
		if err = t.dumpSlots(&in, fronts, node, each); err != nil {
			return err
		}
	}
	if err = t.lookUpSlots(r, &in, fronts); err != nil {
		return err
	}
	for list, set := range in.serving {
		begin := func() {
			for _, fr := range fronts {
				fr.stored[list] = map[netip.AddrPort]bool{}
			}
		}
		err := each(set, begin, func(e *nftables.Elem) bool {
			n := int(l.Len) + 4
			if len(e.Key) < n {
				return false
			}
			a, ok := l.parseEndpoint(e.Key[:n])
			k, _, ok2 := tables.ParseKey(e.Key[n:], l.family, node)
			if ok && ok2 {
				at(k).stored[list][a] = true
			}
			return ok && ok2
		})
		if err != nil {
			return err
		}
	}
	maps.Copy(r.fronts, fronts)
	return nil
}

// frontMap are the fronts found.
type frontMap map[dataplane.FrontKey]*front

func (m frontMap) at(k dataplane.FrontKey) *front {
	if m[k] == nil {
		m[k] = &front{stored: &[2]map[netip.AddrPort]bool{{}, {}}}
	}
	return m[k]
}

// dumpSlots reads all endpoints.
func (t *target) dumpSlots(in *sets, fronts frontMap, node bool, each func(string, func(), func(*nftables.Elem) bool) error) error {
	for _, sticky := range []bool{true, false} {
		begin := func() {
			for _, fr := range fronts {
				if fr.sticky == sticky {
					fr.lists, fr.sticky = [2][]table.Endpoint{}, false
				}
			}
		}
		err := each(in.slots(sticky), begin, func(e *nftables.Elem) bool {
			k, rest, ok := tables.ParseKey(e.Key, t.layout.family, node)
			return ok && t.layout.takeSlot(fronts.at(k), rest, e.Data, sticky)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// lookUpSlots reads the endpoints that frontends lead to.
func (t *target) lookUpSlots(r *found, in *sets, fronts frontMap) error {
	entries := map[uint32]string{}
	for name, ch := range r.chains {
		if ch.target {
			entries[ch.id] = name
		}
	}
	for _, sticky := range []bool{true, false} {
		set := in.slots(sticky)
		if !r.sets[set] {
			continue
		}
		var keys [][]byte
		for k, fr := range fronts {
			if strings.Contains(entries[fr.id], "sticky-") != sticky {
				continue
			}
			for list, n := range []uint32{fr.size & 0xffff, fr.size >> 16} {
				for slot := range n {
					if fr.slot(list, int(slot)).IsValid() {
						continue // a dump showed it
					}
					keys = append(keys, appendMark(tables.AppendKey(make([]byte, 0, 28), k), uint32(list*localList)+slot))
				}
			}
		}
		err := t.kernel.Get(t.layout.table, set, keys, func(e nftables.Elem) {
			k, rest, ok := tables.ParseKey(e.Key, t.layout.family, in.vips == setNodePorts)
			if fr := fronts[k]; ok && fr != nil {
				t.layout.takeSlot(fr, rest, e.Data, sticky)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// takeSlot takes down an endpoint found in a slot. A frontend's slots are in one
// map only; what is in the other as well is not ours.
func (l *layout) takeSlot(fr *front, key, data []byte, sticky bool) bool {
	if sticky {
		if len(data) < 4 {
			return false
		}
		data = data[4:]
	}
	a, ok := l.parseEndpoint(data)
	if !ok || len(key) != 4 {
		return false
	}
	slot := int(binary.NativeEndian.Uint32(key))
	if slot >= 2*localList || (fr.sticky && !sticky) {
		return false
	}
	fr.sticky = sticky
	list := &fr.lists[slot/localList]
	slot %= localList
	if n := slot + 1 - len(*list); n > 0 {
		*list = append(*list, make([]table.Endpoint, n)...)
	}
	(*list)[slot].Addr = a
	return true
}

// readAddresses reads the sets of addresses.
func (t *target) readAddresses(r *found, ports iter.Seq[*table.ServicePort]) error {
	for _, s := range []struct {
		set  string
		take func(a netip.Addr) bool
	}{
		{setNodeAddresses, func(a netip.Addr) bool { r.nodeAddrs[a] = true; return true }},
		{setClusterIPs, func(a netip.Addr) bool { r.clusterIPs[a] = &counted{present: true}; return true }},
		{setLocalEndpoints, func(a netip.Addr) bool { r.pairs[a] = &counted{present: true}; return true }},
	} {
		if !r.sets[s.set] {
			continue
		}
		// A set that changes during the read is read again from its beginning; what is
		// already there does no harm.
		err := t.kernel.Elems(t.layout.table, s.set, func() {}, func(e nftables.Elem) {
			n := int(t.layout.Len)
			if s.set == setLocalEndpoints && (len(e.Key) != 2*n || string(e.Key[:n]) != string(e.Key[n:])) {
				r.discard(s.set, e.Key)
				return
			}
			if a, ok := netip.AddrFromSlice(e.Key[:n]); ok {
				s.take(a)
			}
		})
		if err != nil {
			return err
		}
	}
	if !r.sets[setClusterIPs] {
		return nil
	}
	keys := t.missed(ports, func(k dataplane.FrontKey) bool { return k.Node || r.clusterIPs[k.Addr] != nil },
		func(k dataplane.FrontKey) []byte { return k.Addr.AsSlice() })
	return t.kernel.Get(t.layout.table, setClusterIPs, keys, func(e nftables.Elem) {
		if a, ok := netip.AddrFromSlice(e.Key); ok {
			r.clusterIPs[a] = &counted{present: true}
		}
	})
}

// reportDrift reports what is in the kernel otherwise than this process left it.
func (f *found) reportDrift(c *dataplane.Change, l *layout, left *state) {
	drift := func(format string, args ...any) { c.Drift(l.table.String()+": "+format, args...) }
	switch {
	case f.replace:
		drift("the table was of another layout")
		return
	case !f.usable:
		drift("the table was missing")
		return
	}
	for _, s := range l.sets() {
		if !f.sets[s.Name] {
			drift("set %s was missing", s.Name)
		}
	}
	for _, c := range l.base(&left.settings) {
		if stored, there := f.base[c.name]; !there {
			drift("chain %s was missing", c.name)
		} else if !sameRules(stored, c.rules) {
			drift("the rules of chain %s were changed", c.name)
		}
	}
	for name, ch := range left.chains {
		now := f.chains[name]
		switch {
		case now == nil || !now.present:
			drift("chain %s was missing", name)
		case !now.target:
			drift("chain %s was missing in map %s", name, setTargets)
		case !slices.Equal(now.stored, ch.stored):
			drift("the rules of chain %s were changed", name)
		}
	}
	for name := range f.chains {
		if left.chains[name] == nil {
			drift("a foreign chain %s was there", name)
		}
	}
	f.elementDrift(drift, left)
	if !f.refuse || !f.drop {
		drift("an element of map %s was missing", setTargets)
	}
	if n := len(f.junk) + len(f.foreignSets); n > 0 {
		drift("%d foreign elements and sets were there", n)
	}
}

func (f *found) elementDrift(drift func(string, ...any), left *state) {
	for k, was := range left.fronts {
		is := f.fronts[k]
		switch {
		case is == nil || !is.present:
			drift("%s of %s was missing", k, was.owner)
		case !same(was, is):
			drift("%s of %s was changed", k, was.owner)
		}
	}
	for k := range f.fronts {
		if left.fronts[k] == nil {
			drift("a foreign %s was there", k)
		}
	}
	for a := range left.pairs {
		if f.pairs[a] == nil {
			drift("%s was missing in set %s", a, setLocalEndpoints)
		}
	}
	for a := range left.clusterIPs {
		if f.clusterIPs[a] == nil {
			drift("%s was missing in set %s", a, setClusterIPs)
		}
	}
	for _, a := range left.settings.NodeAddrs {
		if !f.nodeAddrs[a] {
			drift("%s was missing in set %s", a, setNodeAddresses)
		}
	}
}

// same compares the written and the found state of a frontend.
func same(was, is *front) bool {
	if was.id != is.id || was.size != is.size || (was.sticky != is.sticky && was.size != 0) || was.owner != is.owner {
		return false
	}
	for list := range was.lists {
		a, b := was.lists[list], is.lists[list]
		if !slices.EqualFunc(a, b, func(x, y table.Endpoint) bool { return x.Addr == y.Addr }) ||
			!maps.Equal(was.serving(list), is.serving(list)) {
			return false
		}
	}
	return true
}
