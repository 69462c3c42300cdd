package connecttime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
)

// kernel is what a target needs of connect.Programs.
type kernel interface {
	Fronts(f func(connect.Front, connect.Route)) error
	PutFront(f connect.Front, r connect.Route) error
	DelFront(f connect.Front) error
	Slots(f func(list, slot uint32, at netip.AddrPort)) error
	PutSlots(list uint32, endpoints []netip.AddrPort) error
	DelSlots(list uint32, endpoints []netip.AddrPort) error
	Own(f func(list uint32, a netip.Addr)) error
	PutOwn(list uint32, a netip.Addr) error
	DelOwn(list uint32, a netip.Addr) error
	Members(f func(list uint32, at netip.AddrPort)) error
	PutMembers(list uint32, endpoints []netip.AddrPort) error
	DelMember(list uint32, at netip.AddrPort) error
	Nodes() ([]netip.Addr, error)
	PutNode(a netip.Addr) error
	DelNode(a netip.Addr) error
	sockets
}

// classifier is what a target needs of connect.Clients.
type classifier interface {
	Classify(f func(*connect.Namespace) connect.Class) error
}

// shared is what the targets of both families have in common. They have one user at a time.
type shared struct {
	kernel  kernel
	clients classifier
	log     *slog.Logger
	sets    [2]dataplane.Settings
	// unset are the families whose Settings are not known yet. A Pod is classified by both.
	unset map[svc.Family]bool
	// lists are the numbers in use, next the one to try next.
	lists map[uint32]bool
	next  uint32
	// That the map of frontends, or that of the node's addresses, has no room was logged.
	full, nodesFull bool
	// sweeper gets the endpoints that serve.
	sweeper *sweeper
	// last is what IPv4 has read, for IPv6, which follows it in an Apply.
	last *installed
	// missing are the families of which not everything was written yet. Then attach puts the programs in force.
	missing map[svc.Family]bool
	attach  func() error
}

// newShared has targets of these families wait for one another.
func newShared(k kernel, d leader, clients classifier, log *slog.Logger, families []svc.Family, attach func() error) *shared {
	s := &shared{
		kernel: k, clients: clients, log: log, attach: attach,
		lists: map[uint32]bool{}, unset: map[svc.Family]bool{}, missing: map[svc.Family]bool{},
		next: rand.Uint32(), sweeper: newSweeper(k, d, log),
	}
	for _, f := range families {
		s.unset[f], s.missing[f] = true, true
	}
	return s
}

// target is the dataplane.Target of one family.
type target struct {
	*shared
	family svc.Family
	fronts map[dataplane.FrontKey]*front
	nodes  map[netip.Addr]bool
	// stray are installed slots and own endpoints that no frontend leads to.
	stray []list
}

// Unwatched is dataplane.Unwatched's: what watches the rules does not see changes of the maps.
func (t *target) Unwatched() {}

// Read is dataplane.Target's.
func (t *target) Read(_ context.Context, c *dataplane.Change) error {
	fronts, nodes := t.fronts, t.nodes
	if err := t.read(); err != nil {
		return err
	}
	if c.Trusted {
		t.reportDrift(c, fronts, nodes)
	}
	return nil
}

// reportDrift reports what is installed otherwise than it was left.
func (t *target) reportDrift(c *dataplane.Change, fronts map[dataplane.FrontKey]*front, nodes map[netip.Addr]bool) {
	for k, was := range fronts {
		switch is := t.fronts[k]; {
		case is == nil:
			c.Drift("connect-time: %s was missing", k)
		case !is.same(was):
			c.Drift("connect-time: %s was altered", k)
		}
	}
	for k := range t.fronts {
		if fronts[k] == nil {
			c.Drift("connect-time: a foreign %s was there", k)
		}
	}
	for a := range nodes {
		if !t.nodes[a] {
			c.Drift("connect-time: the node's address %s was missing", a)
		}
	}
	for a := range t.nodes {
		if !nodes[a] {
			c.Drift("connect-time: a foreign address %s of the node was there", a)
		}
	}
}

// installed is what all maps have.
type installed struct {
	at     time.Time // when it was read
	lists  map[uint32]*list
	fronts map[connect.Front]connect.Route
	nodes  []netip.Addr
}

// lastFor bounds how long IPv4's Read counts for IPv6's.
const lastFor = time.Second

// installed reads all maps, or returns what IPv4 has just read, if nothing was written since.
func (t *target) installed() (*installed, error) {
	in := t.last
	t.last = nil
	if in != nil && t.family == svc.IPv6 && time.Since(in.at) < lastFor {
		return in, nil
	}
	in = &installed{at: time.Now(), fronts: map[connect.Front]connect.Route{}}
	var err error
	if in.lists, err = t.readLists(); err != nil {
		return nil, err
	}
	if err = t.kernel.Fronts(func(f connect.Front, r connect.Route) { in.fronts[f] = r }); err != nil {
		return nil, err
	}
	if in.nodes, err = t.kernel.Nodes(); err != nil {
		return nil, err
	}
	if t.family == svc.IPv4 {
		t.last = in
	}
	return in, nil
}

// read replaces what the target remembers.
func (t *target) read() error {
	all, err := t.installed()
	if err != nil {
		return err
	}
	t.fronts, t.nodes, t.stray = map[dataplane.FrontKey]*front{}, map[netip.Addr]bool{}, nil
	clear(t.lists)
	for f, r := range all.fronts {
		k, family := frontKey(f)
		in := &front{split: r.Split, masquerade: r.Masquerade}
		for i := range in.lists {
			if r.List[i] == 0 {
				continue
			}
			t.lists[r.List[i]] = true
			if l := all.lists[r.List[i]]; l != nil {
				in.lists[i] = *l
			}
			in.lists[i].id = r.List[i]
			if int(r.Count[i]) != in.lists[i].endpoints.len() {
				in.lists[i].endpoints += pack(make([]netip.AddrPort, 1)) // no wanted list has an invalid endpoint
			}
		}
		if family == t.family {
			t.fronts[k] = in
		}
	}
	for id, l := range all.lists {
		if !t.lists[id] {
			t.stray = append(t.stray, *l)
		}
	}
	for i := range t.stray { // until they are removed no new list may have their numbers
		t.lists[t.stray[i].id] = true
	}
	for _, a := range all.nodes {
		if svc.FamilyOf(a) == t.family {
			t.nodes[a] = true
		}
	}
	return nil
}

// readLists returns the installed lists, with a hole for every slot that is missing.
func (t *target) readLists() (map[uint32]*list, error) {
	lists := map[uint32]*list{}
	of := func(id uint32) *list {
		l := lists[id]
		if l == nil {
			l = &list{id: id}
			lists[id] = l
		}
		return l
	}
	slots, members := map[uint32][]netip.AddrPort{}, map[uint32][]netip.AddrPort{}
	err := errors.Join(
		t.kernel.Slots(func(id, slot uint32, at netip.AddrPort) {
			l := slots[id]
			if missing := int(slot) + 1 - len(l); missing > 0 {
				l = append(l, make([]netip.AddrPort, missing)...)
				slots[id] = l
			}
			l[slot] = at
		}),
		t.kernel.Own(func(id uint32, a netip.Addr) { of(id).own = append(of(id).own, a) }),
		t.kernel.Members(func(id uint32, at netip.AddrPort) { members[id] = append(members[id], at) }))
	for id, l := range slots {
		of(id).endpoints = pack(l)
	}
	for id, l := range members {
		slices.SortFunc(l, netip.AddrPort.Compare)
		of(id).members = pack(l)
	}
	for _, l := range lists {
		slices.SortFunc(l.own, netip.Addr.Compare)
	}
	return lists, err
}

// Write is dataplane.Target's.
func (t *target) Write(ctx context.Context, c *dataplane.Change) error {
	if err := t.writeAll(ctx, c); err != nil {
		return err
	}
	t.sweeper.serve(t.family, c)
	return nil
}

func (t *target) writeAll(ctx context.Context, c *dataplane.Change) error {
	if c.Full {
		if err := t.settings(&c.Settings); err != nil {
			return err
		}
		for k := range t.fronts {
			if _, f := c.Wanted(k); f == nil {
				if err := t.replace(k, nil, func() []netip.AddrPort { return nil }); err != nil {
					return err
				}
			}
		}
	}
	for k := range c.Dirty {
		if err := ctx.Err(); err != nil {
			return err
		}
		p, f := c.Wanted(k)
		var want *front
		if f != nil {
			want = planned(&c.Settings, p, f)
		}
		if err := t.replace(k, want, func() []netip.AddrPort { return serving(p, f) }); err != nil {
			return err
		}
	}
	if !c.Full {
		return nil
	}
	for i := range t.stray {
		if err := t.remove(&t.stray[i]); err != nil {
			return err
		}
	}
	t.stray = nil
	if delete(t.missing, t.family); len(t.missing) > 0 {
		return nil
	}
	return t.attach()
}

// replace writes a frontend, and has the sweeper look at what is connected with endpoints of TCP that serve no more.
func (t *target) replace(k dataplane.FrontKey, want *front, serving func() []netip.AddrPort) error {
	has := t.fronts[k]
	if err := t.write(k, want); err != nil {
		return err
	}
	if k.Proto != svc.TCP {
		return nil
	}
	if has != nil && want != nil && has.same(want) {
		has, want = nil, nil
	}
	t.sweeper.leave(keyOf(k, t.family), has, want, serving)
	return nil
}

// settings writes what all frontends depend on.
func (t *target) settings(set *dataplane.Settings) error {
	i := 0
	if t.family == svc.IPv6 {
		i = 1
	}
	t.sets[i] = *set
	if delete(t.unset, t.family); len(t.unset) == 0 {
		sets := t.sets
		if err := t.clients.Classify(func(ns *connect.Namespace) connect.Class { return classify(&sets, ns) }); err != nil {
			return err
		}
	}
	return t.nodeAddrs(set.NodeAddrs)
}

// nodeAddrs has node ports answer on want. Where there is no room for an address, its node ports are left to the rules.
func (t *target) nodeAddrs(want []netip.Addr) error {
	for a := range t.nodes {
		if slices.Contains(want, a) {
			continue
		}
		t.last = nil
		if err := t.kernel.DelNode(a); err != nil {
			return err
		}
		delete(t.nodes, a)
	}
	for _, a := range want {
		if t.nodes[a] {
			continue
		}
		t.last = nil
		err := t.kernel.PutNode(a)
		if errors.Is(err, connect.ErrFull) {
			if !t.nodesFull {
				t.log.Warn("connect-time has no room for all addresses of the node; only the rules of the mode translate node ports of the others",
					"address", a, "err", err)
			}
			t.nodesFull = true
			return nil
		}
		if err != nil {
			return err
		}
		t.nodes[a] = true
	}
	return nil
}

// write brings one frontend from what is installed to want; nil is none. What a frontend leads to is written before it, and removed
// after it. Where there is no room it is left to the rules.
func (t *target) write(k dataplane.FrontKey, want *front) error {
	has := t.fronts[k]
	if has == nil && want == nil || has != nil && want != nil && has.same(want) {
		return nil
	}
	t.last = nil
	if want != nil {
		full, err := t.install(k, has, want)
		if err != nil {
			return fmt.Errorf("connect-time, %s: %w", k, err)
		}
		if full != nil {
			t.warnFull(k, full)
			want = nil
		}
	}
	if want == nil {
		if err := t.kernel.DelFront(keyOf(k, t.family)); err != nil {
			return fmt.Errorf("connect-time, %s: %w", k, err)
		}
		delete(t.fronts, k)
	} else {
		t.fronts[k] = want
	}
	if has == nil {
		return nil
	}
	for i := range has.lists {
		if want != nil && has.lists[i].id == want.lists[i].id {
			continue
		}
		if err := t.remove(&has.lists[i]); err != nil {
			return fmt.Errorf("connect-time, %s: %w", k, err)
		}
	}
	return nil
}

// install writes the lists of want that has does not have, and the frontend. full is the error of a map that has no room; then
// nothing was changed.
func (t *target) install(k dataplane.FrontKey, has, want *front) (full, err error) {
	r := connect.Route{Split: want.split, Masquerade: want.masquerade}
	var added []*list
	for i := range want.lists {
		l := &want.lists[i]
		switch {
		case l.endpoints == "":
			continue
		case has != nil && has.lists[i].id != 0 && has.lists[i].same(l):
			l.id = has.lists[i].id
		default:
			l.id = t.number()
			added = append(added, l)
			err = t.putList(l)
		}
		if err != nil {
			break
		}
		r.List[i], r.Count[i] = l.id, uint32(l.endpoints.len())
	}
	if err == nil {
		err = t.kernel.PutFront(keyOf(k, t.family), r)
	}
	if err == nil {
		return nil, nil
	}
	var left error
	for _, l := range added {
		left = errors.Join(left, t.remove(l))
	}
	if left == nil && errors.Is(err, connect.ErrFull) {
		return err, nil
	}
	return nil, errors.Join(err, left)
}

func (t *target) putList(l *list) error {
	for _, a := range l.own {
		if err := t.kernel.PutOwn(l.id, a); err != nil {
			return err
		}
	}
	if err := t.kernel.PutMembers(l.id, l.members.list()); err != nil {
		return err
	}
	return t.kernel.PutSlots(l.id, l.endpoints.list())
}

// remove takes a list that no frontend leads to from the kernel.
func (t *target) remove(l *list) error {
	if l.id == 0 {
		return nil
	}
	t.last = nil
	if err := t.kernel.DelSlots(l.id, l.endpoints.list()); err != nil {
		return err
	}
	for _, a := range l.own {
		if err := t.kernel.DelOwn(l.id, a); err != nil {
			return err
		}
	}
	for _, at := range l.members.list() {
		if err := t.kernel.DelMember(l.id, at); err != nil {
			return err
		}
	}
	delete(t.lists, l.id)
	return nil
}

// number returns the number of a new list. Numbers are used again only after all others: a connection that has
// read a frontend just before its list went must not find another one there. A socket that sends datagrams remembers a number for as
// long as it is open, also when this process starts again: so each process begins at a random one.
func (s *shared) number() uint32 {
	for {
		s.next++
		if s.next != 0 && !s.lists[s.next] {
			s.lists[s.next] = true
			return s.next
		}
	}
}

func (s *shared) warnFull(k dataplane.FrontKey, err error) {
	if s.full {
		return
	}
	s.full = true
	s.log.Warn("connect-time has no room for all Services; only the rules of the mode translate the others", "frontend", k, "err", err)
}

// dump writes what the programs have, sorted and without the numbers of lists.
func dump(b interface{ WriteString(string) (int, error) }, k kernel) error {
	t := &target{shared: newShared(k, nil, nil, nil, nil, nil)}
	var lines []string
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t.family = f
		if err := t.read(); err != nil {
			return err
		}
		for _, k := range slices.SortedFunc(maps.Keys(t.fronts), dataplane.FrontKey.Compare) {
			lines = append(lines, t.fronts[k].line(k, f))
		}
	}
	for _, line := range lines {
		if _, err := b.WriteString(line); err != nil {
			return err
		}
	}
	return nil
}

func (f *front) line(k dataplane.FrontKey, family svc.Family) string {
	text := fmt.Sprintf("connect-time %s %s to %v", family, k, sorted(f.lists[0].endpoints))
	if f.split {
		text += fmt.Sprintf(", inside %v", sorted(f.lists[1].endpoints))
	}
	if f.masquerade != 0 {
		text += [...]string{"", ", not for Pods", ", for Pods"}[f.masquerade]
	}
	return text + "\n"
}

func sorted(p packed) []netip.AddrPort {
	return slices.SortedFunc(slices.Values(p.list()), netip.AddrPort.Compare)
}
