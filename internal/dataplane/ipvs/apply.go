package ipvs

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
)

// target is a dataplane.Target: virtual servers, sets, addresses and rules of one
// address family.
type target struct {
	layout *layout
	kernel *kernel
	rules  *rules
	// state is the desired state and stored the kernel's; both are nil before
	// the first Read.
	state  *state
	stored *stored
	// foreign are the other virtual servers that the last Read found.
	foreign map[ipvs.Key]ipvs.Service
	// unchecked are virtual servers whose endpoints Intact is to read.
	unchecked []ipvs.Key
}

// Read is dataplane.Target's.
func (t *target) Read(_ context.Context, c *dataplane.Change) error {
	if err := t.kernel.sets.Create(t.layout.sets()...); err != nil {
		return err
	}
	found, err := t.read(func(k ipvs.Key) bool { return c.Trusted && t.stored.servers[k] != nil })
	if err != nil {
		return err
	}
	if c.Trusted {
		found.reportDrift(c, t.stored, t.layout.family)
	}
	t.stored = found
	t.state = newState(t.layout, c.Plan, t.kernel.device.Elsewhere, marked(found.elements))
	return nil
}

// Write is dataplane.Target's.
func (t *target) Write(ctx context.Context, c *dataplane.Change) error {
	if !c.Full {
		if err := t.kernel.device.CatchUp(); err != nil {
			return err
		}
	}
	e := newEdit()
	t.plan(c, e)
	if c.Full {
		t.state.marks.forgetFound()
		if err := t.compareAll(e); err != nil {
			return err
		}
	}
	if err := t.keepOpen(e); err != nil {
		return err
	}
	t.write(c, e)
	if !c.Full {
		return nil
	}
	changed, err := t.rules.ensure(ctx, &c.Settings)
	for _, text := range changed {
		c.Drift("%s", text)
	}
	return err
}

// plan plans the dirty frontends.
func (t *target) plan(c *dataplane.Change, e *edit) {
	for _, k := range slices.SortedFunc(maps.Keys(c.Dirty), dataplane.FrontKey.Compare) {
		p, f := c.Wanted(k)
		if f == nil {
			t.state.put(k, nil, e)
			continue
		}
		next, err := t.state.plan(k, p, f)
		if err != nil {
			c.Reject(k, err)
			continue
		}
		t.state.put(k, next, e)
	}
}

// compareAll adds to e whatever the last Read found, so that all of it is compared
// with the desired state. Servers of another program that are also desired are taken over.
func (t *target) compareAll(e *edit) error {
	for key := range e.wanted {
		if s, there := t.foreign[key]; there {
			if err := t.readServer(t.stored, s, s.Proto); err != nil {
				return err
			}
		}
	}
	for key := range t.stored.servers {
		if e.wanted[key] == nil {
			e.gone[key] = dataplane.FrontKey{}
		}
	}
	for el := range t.stored.elements {
		e.elements[el] = true
	}
	for el := range t.state.counts {
		e.elements[el] = true
	}
	return nil
}

// read reads our sets, the device, and the virtual servers that are ours: known
// reports it of one that set front has lost. Those of others are kept in foreign.
func (t *target) read(known func(ipvs.Key) bool) (*stored, error) {
	found := &stored{map[ipvs.Key]*virtual{}, map[element]bool{}}
	for s := range setDevice {
		err := t.kernel.sets.List(s.name(t.layout.family), func(e ipset.Element) { found.elements[element{s, e}] = true })
		if err != nil {
			return nil, err
		}
	}
	mine, err := t.kernel.device.List()
	if err != nil {
		return nil, err
	}
	for a := range mine {
		if svc.FamilyOf(a) == t.layout.family && !a.IsLinkLocalUnicast() {
			found.elements[element{setDevice, ipset.Element{IP: a}}] = true
		}
	}
	var list []ipvs.Service
	t.foreign = map[ipvs.Key]ipvs.Service{}
	err = t.kernel.servers.Services(func(s ipvs.Service) {
		switch {
		case s.Family != t.layout.family:
		case known(s.Key) || ours(s.Key, found.elements):
			list = append(list, s)
		default:
			t.foreign[s.Key] = s
		}
	})
	inside := map[uint32]svc.Protocol{}
	for el := range found.elements {
		if el.set == setInside {
			inside[el.Mark] = el.Proto
		}
	}
	for _, s := range list {
		proto := s.Proto
		if s.Mark != 0 {
			proto = inside[s.Mark]
		}
		if err == nil {
			err = t.readServer(found, s, proto)
		}
	}
	return found, err
}

// readServer adds a virtual server to found, with its endpoints; proto is the
// protocol of its packets.
func (t *target) readServer(found *stored, s ipvs.Service, proto svc.Protocol) error {
	v := &virtual{s, proto, map[netip.AddrPort]uint32{}}
	found.servers[s.Key] = v
	return t.kernel.servers.Dests(s.Key, func(d ipvs.Dest) { v.dests[d.Addr] = d.Weight })
}

// write brings the kernel to what the state wants, as far as e says it may
// differ. What is added comes before what leads there, and what leads there
// goes before it.
func (t *target) write(c *dataplane.Change, e *edit) {
	adds, dels := t.difference(e)
	for s := range setDevice {
		c.Fail(t.change(t.kernel.sets.Add, s, adds[s], true))
	}
	b := &changes{}
	after := map[ipvs.Key]*virtual{}
	for key, want := range e.wanted {
		owner, _ := t.state.claims.Owner(key)
		after[key] = b.bring(owner, t.stored.servers[key], want)
	}
	t.send(c, b)
	maps.Copy(t.stored.servers, after)
	t.addresses(c, t.kernel.device.Add, adds[setDevice], true)
	t.addresses(c, t.kernel.device.Del, dels[setDevice], false)
	b = &changes{}
	for key, owner := range e.gone {
		if t.stored.servers[key] != nil {
			b.add(delServer, owner, ipvs.Service{Key: key}, ipvs.Dest{})
			delete(t.stored.servers, key)
		}
	}
	t.send(c, b)
	for s := range setDevice {
		c.Fail(t.change(t.kernel.sets.Del, s, dels[s], false))
	}
	t.drain(c, slices.Collect(maps.Keys(e.wanted)))
}

// difference sorts the elements of e by what has to be done with them.
func (t *target) difference(e *edit) (adds, dels [setCount][]ipset.Element) {
	for el := range e.elements {
		switch want, have := t.state.counts[el] > 0, t.stored.elements[el]; {
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
			delete(t.stored.elements, element{setInside, el})
			return true
		}
		return false
	})
	return adds, dels
}

// change adds elements to a set or removes them from it.
func (t *target) change(do func(string, []ipset.Element) error, s set, list []ipset.Element, there bool) error {
	if len(list) == 0 {
		return nil
	}
	if err := do(s.name(t.layout.family), list); err != nil {
		return err
	}
	for _, e := range list {
		t.store(element{s, e}, there)
	}
	return nil
}

func (t *target) store(e element, there bool) {
	if there {
		t.stored.elements[e] = true
	} else {
		delete(t.stored.elements, e)
	}
}

// addresses binds or unbinds addresses. Where that fails, the dirty frontends with
// the address are rejected.
func (t *target) addresses(c *dataplane.Change, do func([]netip.Addr) map[netip.Addr]error, list []ipset.Element, there bool) {
	if len(list) == 0 {
		return
	}
	addrs := make([]netip.Addr, len(list))
	for i, e := range list {
		addrs[i] = e.IP
	}
	failed := do(addrs)
	for _, e := range list {
		err := failed[e.IP]
		if err == nil {
			t.store(element{setDevice, e}, there)
			continue
		}
		c.Reread()
		found := false
		for k := range c.Dirty {
			if k.Addr == e.IP {
				c.Reject(k, err)
				found = true
			}
		}
		if !found {
			c.Fail(err)
		}
	}
}

// send makes changes of virtual servers. What is rejected is read again by the
// next Apply.
func (t *target) send(c *dataplane.Change, b *changes) {
	if len(b.list) == 0 {
		return
	}
	rejected, err := t.kernel.servers.Send(b)
	c.Fail(err)
	for _, r := range rejected {
		c.Reread()
		c.Reject(r.Owner, r.Err)
	}
}

// drain removes endpoints that are gone and have no connections left.
func (t *target) drain(c *dataplane.Change, keys []ipvs.Key) {
	b := &changes{}
	for _, key := range keys {
		v := t.stored.servers[key]
		if v == nil || !slices.Contains(slices.Collect(maps.Values(v.dests)), 0) {
			continue
		}
		owner, _ := t.state.claims.Owner(key)
		err := t.kernel.servers.Dests(key, func(d ipvs.Dest) {
			if was, there := v.dests[d.Addr]; there && was == 0 && d.Weight == 0 && d.Connections == 0 {
				b.add(delDest, owner, v.Service, d)
				delete(v.dests, d.Addr)
			}
		})
		if err != nil {
			c.Fail(err)
			return
		}
	}
	t.send(c, b)
}

// reportDrift reports how the found state differs from the state stored before.
func (found *stored) reportDrift(c *dataplane.Change, before *stored, fam svc.Family) {
	for key, v := range before.servers {
		now := found.servers[key]
		if now == nil {
			c.Drift("virtual server %s was missing", key)
			continue
		}
		if now.Service != v.Service {
			c.Drift("virtual server %s was changed", key)
		}
		v.compareDests(now.dests, c.Drift)
	}
	for e := range before.elements {
		if !found.elements[e] {
			c.Drift("%s was missing", e.text(fam))
		}
	}
	for e := range found.elements {
		if !before.elements[e] {
			c.Drift("%s was foreign", e.text(fam))
		}
	}
}
