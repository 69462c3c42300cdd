package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// family is the half of a Mode for one address family.
type family struct {
	layout *layout
	rules  *rules
	// state and stored are nil until the kernel was read.
	state  *state
	stored *stored
	// doubtful says that an error left stored not to be relied upon.
	doubtful bool
	repaired []string
}

func newFamily(f svc.Family, cfg *Config, t tool) *family {
	l := newLayout(f, cfg)
	return &family{layout: l, rules: &rules{layout: l, tool: t}}
}

// mustBeFull says that the changes of t alone are not enough to go by.
func (f *family) mustBeFull(t *table.Table) bool {
	set := dataplane.SettingsOf(t, f.layout.family)
	return f.stored == nil || f.doubtful || !set.Equal(&f.state.settings)
}

// apply writes the family's share of t.
func (f *family) apply(ctx context.Context, k kernel, t *table.Table, changed []table.Key) error {
	f.repaired = nil
	if changed == nil || f.mustBeFull(t) {
		return f.fail(f.full(ctx, k, t))
	}
	var refused dataplane.Rejections
	touched := f.state.claims.Take(t, f.layout.family, changed, mode, &refused)
	if len(touched) == 0 {
		return refused.Err()
	}
	if err := k.catchUp(); err != nil {
		return f.fail(err)
	}
	e := newEdit()
	errs := f.plan(touched, e, &refused)
	if err := f.keepOpen(k, e); err != nil {
		f.doubtful = true
		return f.fail(err)
	}
	errs = append(errs, f.write(k, e, touched, &refused)...)
	f.doubtful = f.doubtful || len(errs) > 0
	return f.fail(refused.Err(errs...))
}

// fail says which family an error is of.
func (f *family) fail(err error) error {
	var refused *dataplane.Rejected
	if err == nil || errors.As(err, &refused) {
		return err
	}
	return fmt.Errorf("ipvs %s: %w", f.layout.family, err)
}

// plan plans the frontends touched.
func (f *family) plan(touched dataplane.Touched, e *edit, refused *dataplane.Rejections) []error {
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(touched), dataplane.FrontKey.Compare) {
		p, fr := f.state.claims.Wanted(k)
		if fr == nil {
			f.state.put(k, nil, e)
			continue
		}
		next, err := f.state.plan(k, p, fr)
		if err == nil {
			f.state.put(k, next, e)
		} else if !f.state.claims.Refuse(k, touched, err, refused) {
			errs = append(errs, err)
		}
	}
	return errs
}

// full reads what is in the kernel, and makes it what t says.
func (f *family) full(ctx context.Context, k kernel, t *table.Table) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	before := f.stored
	if f.doubtful {
		before = nil // what differs may be our own doing
	}
	f.doubtful = true
	if err := k.createSets(sets(f.layout.family)...); err != nil {
		return err
	}
	found := &stored{map[ipvs.Key]*virtual{}, map[element]bool{}}
	if err := f.readElements(k, found); err != nil {
		return err
	}
	f.state = newState(f.layout, dataplane.SettingsOf(t, f.layout.family), k.elsewhere, marked(found.elements))
	var refused dataplane.Rejections
	e := newEdit()
	touched := f.state.claims.Take(t, f.layout.family, nil, mode, &refused)
	errs := f.plan(touched, e, &refused)
	if err := f.readServers(k, found, before, e); err != nil {
		return err
	}
	f.state.marks.found, f.state.marks.foundUsed = nil, nil
	if before != nil {
		f.repaired = found.strange(before, f.layout.family)
	}
	f.stored = found
	for el := range found.elements {
		e.elements[el] = true
	}
	for el := range f.state.counts {
		e.elements[el] = true
	}
	if err := f.keepOpen(k, e); err != nil {
		return err
	}
	f.doubtful = false
	errs = append(errs, f.write(k, e, touched, &refused)...)
	changed, err := f.rules.ensure(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	if before != nil {
		f.repaired = append(f.repaired, changed...)
	}
	f.doubtful = f.doubtful || len(errs) > 0
	return refused.Err(errs...)
}

// readElements reads our sets and the device.
func (f *family) readElements(k kernel, found *stored) error {
	for s := range setDevice {
		err := k.elements(s.name(f.layout.family), func(e ipset.Element) { found.elements[element{s, e}] = true })
		if err != nil {
			return err
		}
	}
	mine, err := k.addresses()
	if err != nil {
		return err
	}
	for a := range mine {
		if svc.FamilyOf(a) == f.layout.family && !a.IsLinkLocalUnicast() {
			found.elements[element{setDevice, ipset.Element{IP: a}}] = true
		}
	}
	return nil
}

// readServers reads the virtual servers that are ours, were ours or are to be.
// What is ours and not wanted is noted in e as gone.
func (f *family) readServers(k kernel, found, before *stored, e *edit) error {
	inside := map[uint32]svc.Protocol{}
	for el := range found.elements {
		if el.set == setInside {
			inside[el.Mark] = el.Proto
		}
	}
	err := k.services(func(s ipvs.Service) {
		known := before != nil && before.servers[s.Key] != nil
		if s.Family == f.layout.family && (known || e.wanted[s.Key] != nil || ours(s.Key, found.elements)) {
			v := &virtual{s, s.Proto, map[netip.AddrPort]uint32{}}
			if s.Mark != 0 {
				v.proto = inside[s.Mark]
			}
			found.servers[s.Key] = v
		}
	})
	if err != nil {
		return err
	}
	for key, v := range found.servers {
		if err := k.dests(key, func(d ipvs.Dest) { v.dests[d.Addr] = d.Weight }); err != nil {
			return err
		}
		if e.wanted[key] == nil {
			e.gone[key] = dataplane.FrontKey{}
		}
	}
	return nil
}

// write brings the kernel to what the state wants, as far as e says it may
// differ. What is added comes before what leads there, and what leads there
// goes before it.
func (f *family) write(k kernel, e *edit, touched dataplane.Touched, refused *dataplane.Rejections) []error {
	adds, dels := f.difference(e)
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	for s := range setDevice {
		note(f.change(k.add, s, adds[s], true))
	}
	c := &changes{}
	after := map[ipvs.Key]*virtual{}
	for key, want := range e.wanted {
		after[key] = c.bring(f.state.owners[key], f.stored.servers[key], want)
	}
	errs = append(errs, f.send(k, c, touched, refused)...)
	maps.Copy(f.stored.servers, after)
	errs = append(errs, f.addresses(k.bind, adds[setDevice], true, touched, refused)...)
	errs = append(errs, f.addresses(k.unbind, dels[setDevice], false, touched, refused)...)
	c = &changes{}
	for key, owner := range e.gone {
		if f.stored.servers[key] != nil {
			c.add(delServer, owner, ipvs.Service{Key: key}, ipvs.Dest{})
			delete(f.stored.servers, key)
		}
	}
	errs = append(errs, f.send(k, c, touched, refused)...)
	for s := range setDevice {
		note(f.change(k.del, s, dels[s], false))
	}
	errs = append(errs, f.drain(k, slices.Collect(maps.Keys(e.wanted)), touched, refused)...)
	return errs
}

// difference sorts the elements of e by what has to be done with them.
func (f *family) difference(e *edit) (adds, dels [setCount][]ipset.Element) {
	for el := range e.elements {
		switch want, have := f.state.counts[el] > 0, f.stored.elements[el]; {
		case want && !have:
			adds[el.set] = append(adds[el.set], el.Element)
		case have && !want:
			dels[el.set] = append(dels[el.set], el.Element)
		}
	}
	// The kernel tells elements apart without their marks: what is added with
	// another one must not be removed then.
	remarked := map[ipset.Element]bool{}
	for _, el := range adds[setInside] {
		remarked[unmarked(el)] = true
	}
	dels[setInside] = slices.DeleteFunc(dels[setInside], func(el ipset.Element) bool {
		if remarked[unmarked(el)] {
			delete(f.stored.elements, element{setInside, el})
			return true
		}
		return false
	})
	return adds, dels
}

// change adds elements to a set or removes them from it.
func (f *family) change(do func(string, []ipset.Element) error, s set, list []ipset.Element, there bool) error {
	if len(list) == 0 {
		return nil
	}
	if err := do(s.name(f.layout.family), list); err != nil {
		return err
	}
	for _, e := range list {
		f.note(element{s, e}, there)
	}
	return nil
}

func (f *family) note(e element, there bool) {
	if there {
		f.stored.elements[e] = true
	} else {
		delete(f.stored.elements, e)
	}
}

// addresses binds or unbinds addresses. Where that fails, the frontends touched
// with the address are refused.
func (f *family) addresses(do func([]netip.Addr) map[netip.Addr]error, list []ipset.Element, there bool, touched dataplane.Touched, refused *dataplane.Rejections) []error {
	if len(list) == 0 {
		return nil
	}
	addrs := make([]netip.Addr, len(list))
	for i, e := range list {
		addrs[i] = e.IP
	}
	failed := do(addrs)
	var errs []error
	for _, e := range list {
		err := failed[e.IP]
		if err == nil {
			f.note(element{setDevice, e}, there)
			continue
		}
		named := false
		for k := range touched {
			if k.Addr == e.IP {
				named = f.state.claims.Refuse(k, touched, err, refused) || named
			}
		}
		if f.doubtful = true; !named {
			errs = append(errs, err)
		}
	}
	return errs
}

// send makes changes of virtual servers. What is refused is read again by the
// next Apply.
func (f *family) send(k kernel, c *changes, touched dataplane.Touched, refused *dataplane.Rejections) []error {
	if len(c.list) == 0 {
		return nil
	}
	list, err := k.send(c)
	if err != nil {
		return []error{err}
	}
	var errs []error
	for _, r := range list {
		f.doubtful = true
		if !f.state.claims.Refuse(r.Owner, touched, r.Err, refused) {
			errs = append(errs, r.Err)
		}
	}
	return errs
}

// drain removes endpoints that are gone and have no connections left.
func (f *family) drain(k kernel, keys []ipvs.Key, touched dataplane.Touched, refused *dataplane.Rejections) []error {
	c := &changes{}
	for _, key := range keys {
		v := f.stored.servers[key]
		if v == nil || !slices.Contains(slices.Collect(maps.Values(v.dests)), 0) {
			continue
		}
		err := k.dests(key, func(d ipvs.Dest) {
			if was, there := v.dests[d.Addr]; there && was == 0 && d.Weight == 0 && d.Connections == 0 {
				c.add(delDest, f.state.owners[key], v.Service, d)
				delete(v.dests, d.Addr)
			}
		})
		if err != nil {
			return []error{err}
		}
	}
	return f.send(k, c, touched, refused)
}

// maxRepairs bounds how many lines Repaired has for one kind of damage.
const maxRepairs = 20

// strange says how what was found differs from what was stored before.
func (found *stored) strange(before *stored, fam svc.Family) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for key, v := range before.servers {
		now := found.servers[key]
		if now == nil {
			say("virtual server %s was missing", key)
			continue
		}
		if now.Service != v.Service {
			say("virtual server %s was changed", key)
		}
		for a, w := range v.dests {
			switch n, there := now.dests[a]; {
			case !there && w != 0:
				say("real server %s of %s was missing", a, key)
			case there && n != w:
				say("the weight of real server %s of %s was changed", a, key)
			}
		}
		for a := range now.dests {
			if _, known := v.dests[a]; !known {
				say("a foreign real server %s was at %s", a, key)
			}
		}
	}
	for e := range before.elements {
		if !found.elements[e] {
			say("%s was missing", e.text(fam))
		}
	}
	for e := range found.elements {
		if !before.elements[e] {
			say("%s was foreign", e.text(fam))
		}
	}
	slices.SortFunc(out, strings.Compare)
	if more := len(out) - maxRepairs; more > 0 {
		out = append(out[:maxRepairs], fmt.Sprintf("and %d more", more))
	}
	return out
}
