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
	"sync/atomic"
	"syscall"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// family is the half of a Mode for one address family.
type family struct {
	layout *layout
	cfg    *Config
	// failing counts endpoints that fail, for both families.
	failing *atomic.Int64
	kernel  kernel

	claims    *dataplane.Claims
	settings  dataplane.Settings
	listeners map[table.Key][]*listener
	fronts    map[dataplane.FrontKey]*front
	// clusterIPs counts the frontends at an address whose other ports are
	// refused.
	clusterIPs map[netip.Addr]int
	// have is all that the kernel has; nil before it was read, and after an
	// error that leaves it in doubt.
	have *content
	// retired are listeners that the kernel may still send connections to.
	retired []*relay.Listener
	// moved are UDP clients that must not stay where connection tracking
	// remembers them.
	moved    []conntrack.Flow
	repaired []string
}

func newFamily(f svc.Family, cfg *Config, failing *atomic.Int64, k kernel) *family {
	return &family{
		layout: newLayout(f, cfg.ServiceCIDRs), cfg: cfg, failing: failing, kernel: k,
		claims: dataplane.NewClaims(), listeners: map[table.Key][]*listener{},
		fronts: map[dataplane.FrontKey]*front{}, clusterIPs: map[netip.Addr]int{},
	}
}

// apply makes the family's share of t true. First the listeners, then the rules
// that lead to them, then what nothing leads to any more is closed.
func (f *family) apply(ctx context.Context, e *relay.Engine, t *table.Table, changed []table.Key) error {
	f.repaired = nil
	set := dataplane.SettingsOf(t, f.layout.family)
	o := &opener{cfg: f.cfg, failing: f.failing, family: f.layout.family, engine: e}
	if changed == nil || f.have == nil || !set.Equal(&f.settings) {
		return f.full(ctx, o, t, set)
	}
	var refused dataplane.Rejections
	ch := newChange()
	f.plan(o, t, changed, ch, &refused)
	err := f.write(ctx, ch.have, ch.want, fitting)
	if mismatch(err) {
		// Somebody else changed our table: look at all of it.
		return f.full(ctx, o, t, set)
	}
	if err == nil {
		f.have.take(ch)
	}
	return f.finish(ctx, err, &refused)
}

// full compares everything.
func (f *family) full(ctx context.Context, o *opener, t *table.Table, set dataplane.Settings) error {
	found, err := f.read()
	if err != nil {
		return fmt.Errorf("read what is there: %w", err)
	}
	f.settings, o.hints = set, found.ports
	var refused dataplane.Rejections
	f.plan(o, t, f.everything(t), newChange(), &refused)
	want := f.content()
	f.repaired = f.differences(found, want)
	err = f.write(ctx, found.content, want, found.state)
	f.have = want
	return f.finish(ctx, err, &refused)
}

// mismatch says that the kernel's table is not as remembered.
func mismatch(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EEXIST) || errors.Is(err, syscall.EBUSY)
}

// finish does what must wait until the rules are written.
func (f *family) finish(ctx context.Context, err error, refused *dataplane.Rejections) error {
	if err != nil {
		f.have = nil // in doubt
		return refused.Err(err)
	}
	for _, l := range f.retired {
		l.Close()
	}
	f.retired = nil
	moved := f.moved
	f.moved = nil
	if err := forget(ctx, moved); err != nil {
		return refused.Err(err)
	}
	return refused.Err()
}

// plan takes over ports and opens what they need.
func (f *family) plan(o *opener, t *table.Table, changed []table.Key, ch *change, refused *dataplane.Rejections) {
	touched := f.claims.Take(t, f.layout.family, changed, mode, refused)
	f.listen(o, changed, ch, refused)
	f.move(touched, o.hints, ch)
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

// everything are the keys of all ports, those that are gone too.
func (f *family) everything(t *table.Table) []table.Key {
	keys := []table.Key{}
	for p := range t.All() {
		keys = append(keys, p.Key())
	}
	for k := range f.claims.Keys() {
		if t.Get(k) == nil {
			keys = append(keys, k)
		}
	}
	return keys
}

// listen opens and retires the listeners of ports.
func (f *family) listen(o *opener, changed []table.Key, ch *change, refused *dataplane.Rejections) {
	seen := map[table.Key]bool{}
	for _, k := range changed {
		if k.Family != f.layout.family || seen[k] {
			continue
		}
		seen[k] = true
		p := f.claims.Port(k)
		if p != nil && p.Protocol == svc.SCTP {
			refused.Add(k, fmt.Errorf("%s: the userspace mode does not carry SCTP (its connections cannot be relayed); use --mode nft, iptables or ipvs", p.ID))
			p = nil
		}
		ls, err := o.update(f.listeners[k], p)
		if err != nil {
			refused.Add(k, err)
			continue
		}
		for _, l := range ls {
			ch.want.addProxyPort(l.Protocol, l.Port)
		}
		for _, old := range f.listeners[k] {
			ch.have.addProxyPort(old.Protocol, old.Port)
			if !slices.ContainsFunc(ls, func(l *listener) bool { return l.Listener == old.Listener }) {
				old.target.retire()
				f.retired = append(f.retired, old.Listener)
			}
		}
		if f.listeners[k] = ls; len(ls) == 0 {
			delete(f.listeners, k)
		}
	}
}

// move brings the fronts up to date.
func (f *family) move(touched dataplane.Touched, hints map[dataplane.FrontKey]uint16, ch *change) {
	addrs := map[netip.Addr]bool{}
	for k := range touched {
		if addrs[k.Addr] = true; f.clusterIPs[k.Addr] > 0 {
			ch.have.addClusterIP(k.Addr)
		}
	}
	for k := range touched {
		old := f.fronts[k]
		var next *front
		if p, fe := f.claims.Wanted(k); fe != nil && p.Protocol != svc.SCTP {
			ls := f.listeners[p.Key()]
			next = frontFor(p, fe, func(pl place) uint16 { return portOf(ls, pl) })
			f.fronts[k] = next
			ch.want.addFront(f.layout, &f.settings, next)
		} else {
			delete(f.fronts, k)
		}
		if old != nil {
			ch.have.addFront(f.layout, &f.settings, old)
		}
		f.countCluster(old, -1)
		f.countCluster(next, 1)
		if k.Proto == svc.UDP && next != nil && next.left(old, hints[k]) {
			f.moved = append(f.moved, conntrack.Flow{Protocol: svc.UDP, OrigDst: f.layout.address(k)})
		}
	}
	for a := range addrs {
		if f.clusterIPs[a] > 0 {
			ch.want.addClusterIP(a)
		}
	}
}

// left says that UDP clients are remembered at a port that no longer serves
// them, though another one does. (Where none does, it is the node's loop that
// has them forgotten, for every mode.) hint is the port that an earlier process
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

func (f *family) countCluster(fr *front, n int) {
	if fr == nil || !fr.cluster {
		return
	}
	a := fr.key.Addr
	if f.clusterIPs[a] += n; f.clusterIPs[a] == 0 {
		delete(f.clusterIPs, a)
	}
}

// content is what the kernel should have.
func (f *family) content() *content {
	c := newContent()
	c.addBase(f.layout, &f.settings)
	for _, fr := range f.fronts {
		c.addFront(f.layout, &f.settings, fr)
	}
	for a := range f.clusterIPs {
		c.addClusterIP(a)
	}
	for _, ls := range f.listeners {
		for _, l := range ls {
			c.addProxyPort(l.Protocol, l.Port)
		}
	}
	return c
}

// write changes what the kernel has into what it should have, in two
// transactions: a packet under way while one ends sees new elements, but no
// rules of new chains.
func (f *family) write(ctx context.Context, have, want *content, is state) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, fill := range []func(*nftables.Batch){
		func(b *nftables.Batch) { f.writeChains(b, have, want, is) },
		func(b *nftables.Batch) { f.writeElems(b, have, want) },
	} {
		b := nftables.NewBatch()
		fill(b)
		if b.Empty() {
			continue
		}
		if err := f.kernel.Commit(b); err != nil {
			return err
		}
	}
	return nil
}

func (f *family) writeChains(b *nftables.Batch, have, want *content, is state) {
	t := f.layout.table
	if is == foreign {
		b.DelTable(t)
	}
	if is != fitting {
		b.AddTable(t, schema)
		for _, s := range f.layout.sets() {
			b.AddSet(t, s)
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
			b.AddChain(t, nftables.Chain{Name: name, Hook: ch.hook})
		}
	}
	for _, name := range fresh {
		if _, there := have.chains[name]; there {
			b.FlushChain(t, name)
		}
		for _, r := range want.chains[name].rules {
			b.AddRule(t, name, r)
		}
	}
}

func (f *family) writeElems(b *nftables.Batch, have, want *content) {
	t := f.layout.table
	for s, e := range have.elems {
		if w, stays := want.elems[s]; !stays || !equal(&e, &w) {
			b.DelElem(t, s.set, []byte(s.key))
		}
	}
	for s, e := range want.elems {
		if h, there := have.elems[s]; !there || !equal(&e, &h) {
			b.AddElem(t, s.set, &e)
		}
	}
	var gone []string
	for name := range have.chains {
		if _, stays := want.chains[name]; !stays {
			gone = append(gone, name)
		}
	}
	for _, name := range gone {
		b.FlushChain(t, name)
	}
	for _, name := range gone {
		b.DelChain(t, name)
	}
}

func equal(a, b *nftables.Elem) bool {
	return bytes.Equal(a.Data, b.Data) && a.Goto == b.Goto
}

// differences says what of the last content the kernel had not, one line each.
func (f *family) differences(found *found, want *content) []string {
	if f.have == nil {
		return nil
	}
	if found.state != fitting {
		return []string{fmt.Sprintf("table %s", f.layout.table)}
	}
	var out []string
	for name, ch := range f.have.chains {
		if is, there := found.chains[name]; !there || !slices.Equal(is.hashes(), ch.hashes()) {
			out = append(out, "chain "+name)
		}
	}
	for s, e := range f.have.elems {
		if is, there := found.elems[s]; !there || !equal(&is, &e) {
			out = append(out, strings.TrimSpace("element of "+s.set+" "+e.Comment))
		}
	}
	for s := range found.elems {
		if _, ours := f.have.elems[s]; !ours {
			out = append(out, "foreign element of "+s.set)
		}
	}
	for name := range found.chains {
		_, ours := f.have.chains[name]
		if _, wanted := want.chains[name]; !ours && !wanted {
			out = append(out, "foreign chain "+name)
		}
	}
	slices.Sort(out)
	return out
}

// Probe says why this mode cannot work here, or nil. It asks the kernel for
// everything the rules use, in a transaction that also takes it back.
func Probe() error {
	k, err := nftables.Dial()
	if err != nil {
		return fmt.Errorf("userspace mode: %w", err)
	}
	defer func() { _ = k.Close() }()
	for _, fam := range []svc.Family{svc.IPv4, svc.IPv6} {
		l := newLayout(fam, []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")})
		l.table.Name += "-probe"
		f := &family{layout: l}
		c := newContent()
		c.addBase(l, &dataplane.Settings{})
		b := nftables.NewBatch()
		f.writeChains(b, newContent(), c, missing)
		b.DelTable(l.table)
		err := k.Commit(b)
		switch {
		case errors.Is(err, syscall.EPERM):
			return fmt.Errorf("mode userspace needs CAP_NET_ADMIN in this network namespace: run it as root, or give it that capability (AmbientCapabilities=CAP_NET_ADMIN in its unit): %w", err)
		case err != nil:
			return fmt.Errorf("userspace mode needs Linux 5.9 with nf_tables and its NAT, family %s; choose another --mode: %w", l.Word, err)
		}
	}
	return nil
}

// Cleanup removes our tables, all that the mode ever wrote. Where there are
// none it does nothing.
func Cleanup(ctx context.Context) error {
	if err := nftables.Remove(ctx, tableName); err != nil {
		return fmt.Errorf("userspace cleanup: %w", err)
	}
	return nil
}
