package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// target is a dataplane.Target: the listeners of one address family, and the table
// that leads to them.
type target struct {
	layout *layout
	mode   *Mode
	kernel kernel

	plan *dataplane.Plan
	// mu guards listeners against Look: the user of the Mode only writes them with it.
	mu        sync.Mutex
	listeners map[table.Key][]*listener
	fronts    map[dataplane.FrontKey]*front
	// clusterIPs counts the frontends at an address whose other ports are
	// refused.
	clusterIPs map[netip.Addr]int
	// have is what the kernel has; nil before the first Read.
	have *content
	// found is what the last Read found, until the Write that follows.
	found *found
	// retired are listeners that the kernel may still send connections to.
	retired []*relay.Listener
	// moved are UDP clients that must not stay where connection tracking
	// remembers them.
	moved []conntrack.Flow
}

func newTarget(f svc.Family, m *Mode) *target {
	return &target{
		layout: newLayout(f), mode: m, kernel: m.kernel, listeners: map[table.Key][]*listener{},
		fronts: map[dataplane.FrontKey]*front{}, clusterIPs: map[netip.Addr]int{},
	}
}

// Read is dataplane.Target's.
func (t *target) Read(_ context.Context, c *dataplane.Change) error {
	found, err := t.read(t.kernel)
	if err != nil {
		return fmt.Errorf("read table %s: %w", t.layout.table, err)
	}
	if c.Trusted {
		t.reportDrift(c, found)
	}
	t.have, t.found, t.plan = found.content, found, c.Plan
	return nil
}

// Write is dataplane.Target's. First it opens listeners, then it writes the rules
// that lead to them, then it closes what nothing leads to any more.
func (t *target) Write(ctx context.Context, c *dataplane.Change) error {
	o := &opener{cfg: &t.mode.cfg, failing: &t.mode.failing, family: t.layout.family, engine: t.mode.engine.Load()}
	found := t.found
	t.found = nil
	if c.Full {
		o.hints = found.ports
	}
	ch := newChange()
	t.listen(o, c, ch)
	t.move(c.Dirty, o.hints, ch)
	if c.Full {
		want := t.content()
		if err := t.write(ctx, t.have, want, found.state); err != nil {
			return err
		}
		t.have = want
	} else {
		if err := t.write(ctx, ch.have, ch.want, fitting); err != nil {
			return err
		}
		t.have.take(ch)
	}
	for _, l := range t.retired {
		l.Close()
	}
	t.retired = nil
	moved := t.moved
	t.moved = nil
	return forget(ctx, moved)
}

// change is the part of the content that an Apply is about.
type change struct{ have, want *content }

func newChange() *change { return &change{newContent(), newContent()} }

// take makes c what it is after a change.
func (c *content) take(ch *change) {
	for at := range ch.have.elems {
		delete(c.elems, at)
	}
	for name := range ch.have.chains {
		delete(c.chains, name)
	}
	maps.Copy(c.elems, ch.want.elems)
	maps.Copy(c.chains, ch.want.chains)
}

// listen opens and retires the listeners of ports.
func (t *target) listen(o *opener, c *dataplane.Change, ch *change) {
	for _, k := range c.Keys {
		p := c.Port(k)
		if p != nil && p.Protocol == svc.SCTP {
			c.RejectPort(k, fmt.Errorf("%s: the userspace mode does not carry SCTP (its connections cannot be relayed); use --mode nft, iptables "+
				"or ipvs", p.ID))
			p = nil
		}
		ls, err := o.update(t.listeners[k], p)
		if err != nil {
			c.RejectPort(k, err)
			continue
		}
		for _, l := range ls {
			ch.want.addProxyPort(l.Protocol, l.Port)
		}
		for _, old := range t.listeners[k] {
			ch.have.addProxyPort(old.Protocol, old.Port)
			if !slices.ContainsFunc(ls, func(l *listener) bool { return l.Listener == old.Listener }) {
				old.balancer.retire()
				t.retired = append(t.retired, old.Listener)
			}
		}
		t.mu.Lock()
		if t.listeners[k] = ls; len(ls) == 0 {
			delete(t.listeners, k)
		}
		t.mu.Unlock()
	}
}

// move brings the fronts up to date.
func (t *target) move(dirty dataplane.Dirty, hints map[dataplane.FrontKey]uint16, ch *change) {
	addrs := map[netip.Addr]bool{}
	for k := range dirty {
		if addrs[k.Addr] = true; t.clusterIPs[k.Addr] > 0 {
			ch.have.addClusterIP(k.Addr)
		}
	}
	for k := range dirty {
		old := t.fronts[k]
		var next *front
		if p, fe := t.plan.Wanted(k); fe != nil && p.Protocol != svc.SCTP {
			ls := t.listeners[p.Key()]
			next = frontFor(p, fe, func(pl place) uint16 { return portOf(ls, pl) })
			t.fronts[k] = next
			ch.want.addFront(t.layout, &t.plan.Settings, next)
		} else {
			delete(t.fronts, k)
		}
		if old != nil {
			ch.have.addFront(t.layout, &t.plan.Settings, old)
		}
		t.countCluster(old, -1)
		t.countCluster(next, 1)
		if k.Proto == svc.UDP && next != nil && next.left(old, hints[k]) {
			t.moved = append(t.moved, conntrack.Flow{Protocol: svc.UDP, OrigDst: t.layout.address(k)})
		}
	}
	for a := range addrs {
		if t.clusterIPs[a] > 0 {
			ch.want.addClusterIP(a)
		}
	}
}

// left reports whether UDP clients are remembered at a port that no longer serves
// them, though another one does. (Where none does, it is the proxy that has them
// forgotten, for every mode.) hint is the port that an earlier process
// had.
func (fr *front) left(old *front, hint uint16) bool {
	if fr.to[0].port == 0 && fr.to[1].port == 0 {
		return false
	}
	before := []uint16{hint}
	if old != nil {
		before = []uint16{old.to[0].port, old.to[1].port}
	}
	return slices.ContainsFunc(before, func(p uint16) bool {
		return p != 0 && p != fr.to[0].port && p != fr.to[1].port
	})
}

// address is a frontend as conntrack.Flow has it.
func (l *layout) address(k dataplane.FrontKey) netip.AddrPort {
	if k.Node {
		if l.family == svc.IPv6 {
			return netip.AddrPortFrom(netip.IPv6Unspecified(), k.Port)
		}
		return netip.AddrPortFrom(netip.IPv4Unspecified(), k.Port)
	}
	return netip.AddrPortFrom(k.Addr, k.Port)
}

func (t *target) countCluster(fr *front, n int) {
	if fr == nil || !fr.cluster {
		return
	}
	a := fr.key.Addr
	if t.clusterIPs[a] += n; t.clusterIPs[a] == 0 {
		delete(t.clusterIPs, a)
	}
}

// content is what the kernel should have.
func (t *target) content() *content {
	c := newContent()
	c.addBase(t.layout, &t.plan.Settings)
	for _, fr := range t.fronts {
		c.addFront(t.layout, &t.plan.Settings, fr)
	}
	for a := range t.clusterIPs {
		c.addClusterIP(a)
	}
	for _, ls := range t.listeners {
		for _, l := range ls {
			c.addProxyPort(l.Protocol, l.Port)
		}
	}
	return c
}

// write changes what the kernel has into what it should have, in two
// transactions: a packet under way while one ends sees new elements, but no
// rules of new chains. Chain unserved, where it is new, gets its rules with the
// second.
func (t *target) write(ctx context.Context, have, want *content, is state) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, fill := range []func(*nftables.Batch){
		func(b *nftables.Batch) { t.writeChains(b, have, want, is) },
		func(b *nftables.Batch) { t.writeElems(b, have, want) },
	} {
		b := nftables.NewBatch()
		fill(b)
		if b.Empty() {
			continue
		}
		if err := t.kernel.Commit(b); err != nil {
			return tables.Stale(err)
		}
	}
	return nil
}

func (t *target) writeChains(b *nftables.Batch, have, want *content, is state) {
	tab := t.layout.table
	if is == foreign {
		b.DelTable(tab)
	}
	if is != fitting {
		b.AddTable(tab, schema)
		for _, s := range t.layout.sets() {
			b.AddSet(tab, s)
		}
	}
	var fresh []string
	for _, name := range slices.Sorted(maps.Keys(want.chains)) {
		if old, there := have.chains[name]; !there || !slices.Equal(old.hashes(), want.chains[name].hashes()) {
			fresh = append(fresh, name)
		}
	}
	for _, name := range fresh {
		if _, there := have.chains[name]; !there {
			ch := want.chains[name]
			b.AddChain(tab, nftables.Chain{Name: name, Hook: ch.hook})
		}
	}
	for _, name := range fresh {
		if _, there := have.chains[name]; there {
			b.FlushChain(tab, name)
		}
		if !late(have, name) {
			addRules(b, tab, want.chains[name])
		}
	}
}

// late reports whether a chain gets its rules after all elements: a frontend that
// is not written yet may be served by what an earlier mode left, whose hooks come
// after ours.
func late(have *content, name string) bool {
	_, there := have.chains[name]
	return name == chainUnserved && !there
}

func addRules(b *nftables.Batch, tab nftables.Table, ch chain) {
	for _, r := range ch.rules {
		b.AddRule(tab, ch.name, r)
	}
}

func (t *target) writeElems(b *nftables.Batch, have, want *content) {
	tab := t.layout.table
	for s, e := range have.elems {
		if w, stays := want.elems[s]; !stays || !equal(&e, &w) {
			b.DelElem(tab, s.set, []byte(s.key))
		}
	}
	for s, e := range want.elems {
		if h, there := have.elems[s]; !there || !equal(&e, &h) {
			b.AddElem(tab, s.set, &e)
		}
	}
	for name, ch := range want.chains {
		if late(have, name) {
			addRules(b, tab, ch)
		}
	}
	var gone []string
	for name := range have.chains {
		if _, stays := want.chains[name]; !stays {
			gone = append(gone, name)
		}
	}
	for _, name := range gone {
		b.FlushChain(tab, name)
	}
	for _, name := range gone {
		b.DelChain(tab, name)
	}
}

func equal(a, b *nftables.Elem) bool {
	return bytes.Equal(a.Data, b.Data) && a.Goto == b.Goto
}

// reportDrift reports what the kernel has otherwise than it was left.
func (t *target) reportDrift(c *dataplane.Change, found *found) {
	if found.state != fitting {
		c.Drift("table %s", t.layout.table)
		return
	}
	for name, ch := range t.have.chains {
		if is, there := found.chains[name]; !there || !slices.Equal(is.hashes(), ch.hashes()) {
			c.Drift("chain %s", name)
		}
	}
	for s, e := range t.have.elems {
		if is, there := found.elems[s]; !there || !equal(&is, &e) {
			c.Drift("%s", strings.TrimSpace("element of "+s.set+" "+e.Comment))
		}
	}
	for s := range found.elems {
		if _, ours := t.have.elems[s]; !ours {
			c.Drift("foreign element of %s", s.set)
		}
	}
	for name := range found.chains {
		if _, ours := t.have.chains[name]; !ours {
			c.Drift("foreign chain %s", name)
		}
	}
}

// Probe returns why this mode cannot work here, or nil. It asks the kernel for
// everything the rules use, in a transaction that also takes it back.
func Probe() error {
	k, err := nftables.Dial()
	if err != nil {
		return fmt.Errorf("userspace mode: %w", err)
	}
	defer func() { _ = k.Close() }()
	for _, fam := range socket.Families() {
		l := newLayout(fam)
		l.table.Name += "-probe"
		t := &target{layout: l}
		c := newContent()
		s := &dataplane.Settings{Services: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
		if fam == svc.IPv6 {
			s.Services[0] = netip.MustParsePrefix("2001:db8::/32")
		}
		c.addBase(l, s)
		b := nftables.NewBatch()
		t.writeChains(b, newContent(), c, missing)
		t.writeElems(b, newContent(), c)
		b.DelTable(l.table)
		err := k.Commit(b)
		switch {
		case errors.Is(err, syscall.EPERM):
			return fmt.Errorf("mode userspace needs CAP_NET_ADMIN in this network namespace: run it as root, or give it that capability "+
				"(AmbientCapabilities=CAP_NET_ADMIN in its unit): %w", err)
		case err != nil:
			return fmt.Errorf("userspace mode needs Linux 5.9 with nf_tables and its NAT, family %s; choose another --mode: %w", l.Word, err)
		}
	}
	return nil
}

// Cleanup removes our tables, all that the mode ever wrote. Where there are
// none it does nothing.
func Cleanup(ctx context.Context) error {
	return tables.Cleanup(ctx, mode, tableName)
}
