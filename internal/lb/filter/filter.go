// Package filter lets the addresses of proxied load balancers only be reached at their listeners' ports.
//
// Such an address is one of the node's by a local route: without a filter every program that
// listens on all addresses would be reached there, and the source ranges of the Service do not concern it.
// What is neither ICMP nor for a listener is rejected as by a machine where nothing listens.
//
// A listener may be bound to an address of no machine, so that it takes no port from other programs of the node, nor they
// its own: packets are led to it (TPROXY), and answers of UDP, which the kernel gives the socket's own source, get the
// listener's. The kernel does the same for answers of TCP.
//
// All of it is in the nft table inet fairlead-lb of the network namespace of the calling thread, after
// translation and IPVS: a Service of the direct way that shares an address is not concerned.
package filter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// table is the one nft table of this package.
var table = nftables.Table{Family: nftables.Inet, Name: "fairlead-lb"}

// priority is after that of IPVS, which takes its packets at 98 and 99 of the same hook (ip_vs_core.c).
const priority = 150

// Listener is what may be reached at an address.
type Listener struct {
	Protocol svc.Protocol
	At       netip.AddrPort
}

// Bound is a Listener with where its socket is bound.
type Bound struct {
	Listener
	// Inside is where, with IP_TRANSPARENT; invalid if that is At. No other listener of the protocol is bound there.
	Inside netip.AddrPort
	// First is true if At is a ClusterIP: a new connection goes to the listener, whatever rules of translation other programs
	// have for it.
	First bool
}

// Filter writes the table. Its methods are called one at a time.
type Filter struct {
	changed func()
	conn    *nftables.Conn
	// damaged is set when another program may have changed the table.
	damaged atomic.Bool
	absent  bool // there is no table, also not of an earlier process
	// addrs and listeners are what the table has, nil if that is unknown.
	addrs     map[netip.Addr]bool
	listeners map[Bound]bool
	inside    bool // the table has what leads to listeners that are bound elsewhere
	first     bool // and what makes some of them first
	// bridged is what link.FiltersBridged returned when the table was made, looked is when it was asked last.
	bridged bool
	looked  time.Time
}

// New returns a Filter that does nothing before Set. changed is called when another program has changed the
// table; it does not block, and leads to Set.
func New(changed func()) *Filter { return &Filter{changed: changed} }

// Set is SetBound for listeners that are bound to their addresses.
func (f *Filter) Set(addrs []netip.Addr, listeners []Listener) error {
	var bound []Bound
	for _, l := range listeners {
		bound = append(bound, Bound{Listener: l})
	}
	return f.SetBound(addrs, bound)
}

// SetBound lets addrs only be reached at listeners, in one transaction. It writes nothing if nothing has changed, and the
// whole table if another program has changed it. Without addresses there is no table.
func (f *Filter) SetBound(addrs []netip.Addr, listeners []Bound) error {
	if f.conn == nil {
		if len(addrs) == 0 {
			if f.absent {
				return nil
			}
			err := nftables.RemoveTable(table)
			f.absent = err == nil
			return err
		}
		conn, err := dial(table, &f.damaged, f.changed)
		if err != nil {
			return err
		}
		f.conn = conn
	}
	a, l := map[netip.Addr]bool{}, map[Bound]bool{}
	for _, addr := range addrs {
		a[addr] = true
	}
	for _, x := range listeners {
		l[x] = true
	}
	damaged := f.damaged.Swap(false)
	if !damaged && !f.firstBridge() && f.addrs != nil {
		if maps.Equal(a, f.addrs) && maps.Equal(l, f.listeners) {
			return nil
		}
		if len(a) > 0 && len(f.addrs) > 0 && (f.inside || !hasInside(l)) {
			err := f.conn.Commit(f.difference(a, l))
			if err == nil {
				f.addrs, f.listeners, f.first = a, l, f.first || hasFirst(l)
				return nil
			}
			if !nftables.IsConflict(err) {
				return f.failed(err)
			}
		}
	}
	bridged := link.FiltersBridged()
	if err := f.conn.Commit(whole(a, l)); err != nil {
		return f.failed(err)
	}
	f.addrs, f.listeners, f.inside, f.first = a, l, len(a) > 0 && hasInside(l), len(a) > 0 && hasFirst(l)
	f.bridged, f.looked = bridged, time.Now()
	return nil
}

// lookPeriod is how often Set looks for a bridge.
const lookPeriod = 5 * time.Second

// firstBridge reports whether bridges are filtered only since the table was made: the kernel's own rule of bridges is before
// the chain "bridged" then, which has to be made again.
func (f *Filter) firstBridge() bool {
	if !f.inside || f.bridged || time.Since(f.looked) < lookPeriod {
		return false
	}
	f.looked = time.Now()
	return link.FiltersBridged()
}

// hasInside reports whether a listener is bound elsewhere.
func hasInside(listeners map[Bound]bool) bool {
	for l := range listeners {
		if l.Inside.IsValid() {
			return true
		}
	}
	return false
}

// hasFirst reports whether a listener is first.
func hasFirst(listeners map[Bound]bool) bool {
	for l := range listeners {
		if l.First {
			return true
		}
	}
	return false
}

// dial connects to nf_tables. If another program changes the table, damaged is set and changed called, once until it is unset.
func dial(t nftables.Table, damaged *atomic.Bool, changed func()) (*nftables.Conn, error) {
	conn, err := nftables.Dial()
	if err != nil {
		return nil, fmt.Errorf("connect to nf_tables: %w", err)
	}
	err = conn.Watch(t.Name, func() {
		if !damaged.Swap(true) {
			changed()
		}
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch nf_tables: %w", err), conn.Close())
	}
	return conn, nil
}

// failed makes the next Set write the whole table.
func (f *Filter) failed(err error) error {
	f.addrs, f.listeners = nil, nil
	return fmt.Errorf("write nft table %s: %w", table, err)
}

// Settle waits until no packet is on its way by what the last Set has removed.
func (f *Filter) Settle() { _ = nftables.AwaitPackets(context.Background()) }

// Close leaves the table as it is.
func (f *Filter) Close() error {
	if f.conn == nil {
		return nil
	}
	return f.conn.Close()
}

// Remove removes the tables. It is no error if there are none.
func Remove() error {
	return errors.Join(nftables.RemoveTable(table), nftables.RemoveTable(groupTable), nftables.RemoveTable(unusedTable))
}

// Redirects reports whether this kernel leads packets to listeners that are bound elsewhere (Bound.Inside).
func (f *Filter) Redirects() bool {
	return probes(func(b *nftables.Batch, t nftables.Table) { write(b, t, true) })
}

// Firsts reports whether this kernel also makes them First.
func (f *Filter) Firsts() bool {
	return probes(func(b *nftables.Batch, t nftables.Table) {
		write(b, t, true)
		writeFirst(b, t)
	})
}

// probes reports whether the kernel takes what a function writes.
func probes(write func(*nftables.Batch, nftables.Table)) bool {
	probe := nftables.Table{Family: nftables.Inet, Name: table.Name + "-probe"}
	conn, err := nftables.Dial()
	if err != nil {
		return false
	}
	b := nftables.NewBatch()
	b.ReplaceTable(probe, "fairlead: is removed at once")
	write(b, probe)
	b.DelTable(probe)
	return errors.Join(conn.Commit(b), conn.Close()) == nil
}

// family is what differs between the two of them.
type family struct {
	name   string
	proto  byte // NFPROTO_*
	addr   nftables.Type
	at, n  uint32 // of the destination in the header; the source is before it
	icmp   byte
	reject nftables.Family
	echo   byte // the type of an echo request
}

var families = []family{
	{"4", 2, nftables.TypeIPv4, 16, 4, 1, nftables.IPv4, 8},
	{"6", 10, nftables.TypeIPv6, 24, 16, 58, nftables.IPv6, 128},
}

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return families[0]
	}
	return families[1]
}

func (f family) addresses() string { return "addresses-" + f.name }
func (f family) listeners() string { return "listeners-" + f.name }
func (f family) chain() string     { return "to-address-" + f.name }

// inside are the listeners that are bound elsewhere, with where, and outside is the reverse for answers of UDP.
func (f family) inside() string  { return "inside-" + f.name }
func (f family) outside() string { return "outside-" + f.name }

// first are the listeners that are First.
func (f family) first() string { return "first-" + f.name }

// key and place are the types of a listener, and of where one is bound.
func (f family) key() []nftables.Type {
	return []nftables.Type{f.addr, nftables.TypeProto, nftables.TypePort}
}
func (f family) place() []nftables.Type { return []nftables.Type{f.addr, nftables.TypePort} }

// Priorities of chains that lead packets to listeners: after DNAT, so that a packet for a node port goes to its Pod; and
// before connection tracking, which sees answers of UDP as the client does.
const (
	priorityInside  = nftables.PriorityDstNAT + 10
	priorityOutside = nftables.PriorityRaw
	// priorityFirst is before any translation. The first rule that translates a connection ends all others (nf_nat_inet_fn), of
	// nf_tables as of iptables.
	priorityFirst = nftables.PriorityDstNAT - 20
)

// whole returns the transaction that makes the table, in place of any other.
func whole(addrs map[netip.Addr]bool, listeners map[Bound]bool) *nftables.Batch {
	b := nftables.NewBatch()
	const comment = "fairlead: ports of proxied load balancers"
	if len(addrs) == 0 {
		b.AddTable(table, comment) // so that deleting cannot fail
		b.DelTable(table)
		return b
	}
	b.ReplaceTable(table, comment)
	write(b, table, hasInside(listeners))
	if hasFirst(listeners) {
		writeFirst(b, table)
	}
	elements(b.AddElem, addrs, listeners)
	return b
}

// write adds the chains and sets of a table t to a transaction; with inside also the ones for listeners that are
// bound elsewhere, which not every kernel has.
func write(b *nftables.Batch, t nftables.Table, inside bool) {
	b.AddChain(t, nftables.Chain{Name: "input", Hook: &nftables.Hook{Type: "filter", Number: nftables.Input, Priority: priority}})
	if inside {
		b.AddChain(t, nftables.Chain{Name: "inside",
			Hook: &nftables.Hook{Type: "filter", Number: nftables.Prerouting, Priority: priorityInside}})
		b.AddChain(t, nftables.Chain{Name: "bridged",
			Hook: &nftables.Hook{Type: "filter", Number: nftables.Prerouting, Priority: nftables.PriorityFirst}})
		b.AddChain(t, nftables.Chain{Name: "outside",
			Hook: &nftables.Hook{Type: "route", Number: nftables.Output, Priority: priorityOutside}})
	}
	for _, f := range families {
		b.AddSet(t, nftables.Set{Name: f.addresses(), Key: []nftables.Type{f.addr}, Comment: "addresses of proxied load balancers"})
		b.AddSet(t, nftables.Set{Name: f.listeners(), Key: f.key(), Comment: "what may be reached there"})
		b.AddChain(t, nftables.Chain{Name: f.chain()})
		to := nftables.Reg(0)
		proto := to + nftables.Reg(f.n/4)
		rule := func(chain string, p *nftables.Program) { b.AddRule(t, chain, nftables.Rule{Exprs: p.Bytes()}) }
		rule("input", new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(to, f.at, f.n).
			InSet(f.addresses(), to).Goto(f.chain()))
		listener := func() *nftables.Program {
			return new(nftables.Program).Network(to, f.at, f.n).Meta(proto, nftables.MetaL4Proto).Port(proto+1, nftables.Destination)
		}
		rule(f.chain(), listener().InSet(f.listeners(), to).Return())
		rule(f.chain(), fromListener(f).InSet(f.listeners(), to).Return())
		if inside {
			f.writeInside(b, t, rule)
		}
		// Echo, path MTU, neighbour discovery.
		rule(f.chain(), new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{f.icmp}).Return())
		// A segment that opens no connection belongs to an existing one, perhaps one that drains after its listener
		// has closed, or is answered by a reset.
		tcp := func() *nftables.Program {
			return new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(svc.TCP)})
		}
		rule(f.chain(), tcp().TCPFlags(0).Mask(0, []byte{nftables.TCPSyn | nftables.TCPAck}, []byte{0}).
			NotEqual(0, []byte{nftables.TCPSyn}).Return())
		rule(f.chain(), tcp().Reject(nftables.ResetTCP()))
		rule(f.chain(), new(nftables.Program).Reject(nftables.PortUnreachable(f.reject)))
	}
}

// fromListener begins a rule for answers of UDP listeners to the node itself, with the listener in the first registers: a client
// on the node has the load balancer's address as its own, since the kernel prefers that on the way to it.
func fromListener(f family) *nftables.Program {
	const lo = 1
	proto := nftables.Reg(f.n / 4)
	return new(nftables.Program).Meta(0, nftables.MetaIif).Equal(0, nftables.Uint32(lo)).
		Meta(proto, nftables.MetaL4Proto).Equal(proto, []byte{byte(svc.UDP)}).Network(0, f.at-f.n, f.n).Port(proto+1, nftables.Source)
}

// writeInside adds what leads packets to listeners that are bound elsewhere, and back. Without its socket, as after a
// crash, a listener's packets are for no program of the node: they are let through only with a transparent one.
//
// With net.bridge.bridge-nf-call-iptables, as many clusters need it, a packet that comes by a bridge passes prerouting before
// the bridge gives it to the machine. That forgets the socket which a rule found (ip_rcv), and lets no rule of prerouting
// see the packet again but the ones before the kernel's own first one (ip_sabotage_in). So the chain "bridged" is the very
// first. The chain "inside" is for other packets, whose fragments are whole only there.
func (f family) writeInside(b *nftables.Batch, t nftables.Table, rule func(chain string, p *nftables.Program)) {
	b.AddSet(t, nftables.Set{Name: f.inside(), Key: f.key(), Data: f.place(), Comment: "listeners that are bound elsewhere, and where"})
	b.AddSet(t, nftables.Set{Name: f.outside(), Key: f.key(), Data: f.place(), Comment: "the reverse for UDP"})
	key := nftables.Reg(0)
	proto := key + nftables.Reg(f.n/4)
	place := proto + 2
	find := func(p *nftables.Program, at uint32, of nftables.End, set string) *nftables.Program {
		return p.Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(key, at, f.n).
			Meta(proto, nftables.MetaL4Proto).Port(proto+1, of).Map(set, key, place)
	}
	port := place + nftables.Reg(f.n/4)
	lead := func(p *nftables.Program) *nftables.Program {
		return nftables.TransparentProxy(find(p, f.at, nftables.Destination, f.inside()), f.reject, place, port)
	}
	rule("inside", lead(new(nftables.Program)))
	rule("bridged", lead(nftables.FromKind(new(nftables.Program), "bridge")))
	source := f.at - f.n
	rule("outside", nftables.SetSource(find(new(nftables.Program), source, nftables.Source, f.outside()), f.reject, source, f.n, place, port))
	rule(f.chain(), fromListener(f).Map(f.inside(), key, place).Return())
	rule(f.chain(), find(new(nftables.Program), f.at, nftables.Destination, f.inside()).Transparent(0).Equal(0, []byte{1}).Return())
}

// writeFirst adds what makes listeners First: a connection to one of them is translated to where it goes anyhow.
func writeFirst(b *nftables.Batch, t nftables.Table) {
	for chain, hook := range map[string]uint32{"first-in": nftables.Prerouting, "first-out": nftables.Output} {
		b.AddChain(t, nftables.Chain{Name: chain, Hook: &nftables.Hook{Type: "nat", Number: hook, Priority: priorityFirst}})
	}
	for _, f := range families {
		b.AddSet(t, nftables.Set{Name: f.first(), Key: f.key(), Comment: "listeners at ClusterIPs"})
		proto := nftables.Reg(f.n / 4)
		for _, chain := range []string{"first-in", "first-out"} {
			p := new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(0, f.at, f.n).
				Meta(proto, nftables.MetaL4Proto).Port(proto+1, nftables.Destination).InSet(f.first(), 0)
			b.AddRule(t, chain, nftables.Rule{Exprs: p.DNAT(f.reject, 0, proto+1).Bytes()})
		}
	}
}

// difference returns the transaction that leads to another state. What makes listeners First is added to the table: a whole one in its
// place would refuse connections for a moment. The chains of the old one are asked until the kernel has removed them, and the elements of
// its maps are not found there any more (nf_tables_commit_chain_prepare and nft_map_deactivate of Linux 6.18).
func (f *Filter) difference(addrs map[netip.Addr]bool, listeners map[Bound]bool) *nftables.Batch {
	b := nftables.NewBatch()
	if !f.first && hasFirst(listeners) {
		writeFirst(b, table)
	}
	elements(func(t nftables.Table, set string, e *nftables.Elem) { b.DelElem(t, set, e.Key) },
		without(f.addrs, addrs), without(f.listeners, listeners))
	elements(b.AddElem, without(addrs, f.addrs), without(listeners, f.listeners))
	return b
}

func without[K comparable](a, b map[K]bool) map[K]bool {
	out := maps.Clone(a)
	maps.DeleteFunc(out, func(k K, _ bool) bool { return b[k] })
	return out
}

// elements calls do for the elements of both kinds, set by set, so that they share messages.
func elements(do func(t nftables.Table, set string, e *nftables.Elem), addrs map[netip.Addr]bool, listeners map[Bound]bool) {
	for _, f := range families {
		for a := range addrs {
			if familyOf(a) == f {
				do(table, f.addresses(), &nftables.Elem{Key: a.AsSlice()})
			}
		}
		for l := range listeners {
			if familyOf(l.At.Addr()) == f && !l.Inside.IsValid() {
				do(table, f.listeners(), &nftables.Elem{Key: l.key()})
			}
		}
		for l := range listeners {
			if familyOf(l.At.Addr()) == f && l.Inside.IsValid() {
				do(table, f.inside(), &nftables.Elem{Key: l.key(), Data: place(l.Inside)})
			}
		}
		for l := range listeners {
			if familyOf(l.At.Addr()) == f && l.First {
				do(table, f.first(), &nftables.Elem{Key: l.key()})
			}
		}
		for l := range listeners {
			if familyOf(l.At.Addr()) == f && l.Inside.IsValid() && l.Protocol == svc.UDP {
				from := Listener{Protocol: svc.UDP, At: l.Inside}
				do(table, f.outside(), &nftables.Elem{Key: from.key(), Data: place(l.At)})
			}
		}
	}
}

// place is an address and a port as data of a map.
func place(a netip.AddrPort) []byte {
	return append(a.Addr().AsSlice(), byte(a.Port()>>8), byte(a.Port()), 0, 0)
}
