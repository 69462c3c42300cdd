// Package filter lets the addresses of proxied load balancers only be reached at their listeners' ports.
//
// Such an address is one of the node's by a local route: without a filter every program that
// listens on all addresses would be reached there, and the source ranges of the Service do not concern it.
// What is neither ICMP nor for a listener is rejected as by a machine where nothing listens.
//
// All of it is in the nft table inet fairlead-lb of the network namespace of the calling thread, after
// translation and IPVS: a Service of the direct way that shares an address is not concerned.
package filter

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"

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

// Filter writes the table. Its methods are called one at a time.
type Filter struct {
	changed func()
	conn    *nftables.Conn
	// damaged is set when another program may have changed the table.
	damaged atomic.Bool
	absent  bool // there is no table, also not of an earlier process
	// addrs and listeners are what the table has, nil if that is unknown.
	addrs     map[netip.Addr]bool
	listeners map[Listener]bool
}

// New returns a Filter that does nothing before Set. changed is called when another program has changed the
// table; it does not block, and leads to Set.
func New(changed func()) *Filter { return &Filter{changed: changed} }

// Set lets addrs only be reached at listeners, in one transaction. It writes nothing if nothing has changed, and the
// whole table if another program has changed it. Without addresses there is no table.
func (f *Filter) Set(addrs []netip.Addr, listeners []Listener) error {
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
	a, l := map[netip.Addr]bool{}, map[Listener]bool{}
	for _, addr := range addrs {
		a[addr] = true
	}
	for _, x := range listeners {
		l[x] = true
	}
	damaged := f.damaged.Swap(false)
	if !damaged && f.addrs != nil {
		if maps.Equal(a, f.addrs) && maps.Equal(l, f.listeners) {
			return nil
		}
		if len(a) > 0 && len(f.addrs) > 0 {
			err := f.conn.Commit(difference(f.addrs, a, f.listeners, l))
			if err == nil {
				f.addrs, f.listeners = a, l
				return nil
			}
			if !nftables.IsConflict(err) {
				return f.failed(err)
			}
		}
	}
	if err := f.conn.Commit(whole(a, l)); err != nil {
		return f.failed(err)
	}
	f.addrs, f.listeners = a, l
	return nil
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

// Close leaves the table as it is.
func (f *Filter) Close() error {
	if f.conn == nil {
		return nil
	}
	return f.conn.Close()
}

// Remove removes the tables. It is no error if there are none.
func Remove() error {
	return errors.Join(nftables.RemoveTable(table), nftables.RemoveTable(groupTable))
}

// family is what differs between the two of them.
type family struct {
	name   string
	proto  byte // NFPROTO_*
	addr   nftables.Type
	at, n  uint32 // of the destination in the header
	icmp   byte
	reject nftables.Family
}

var families = []family{
	{"4", 2, nftables.TypeIPv4, 16, 4, 1, nftables.IPv4},
	{"6", 10, nftables.TypeIPv6, 24, 16, 58, nftables.IPv6},
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

// whole returns the transaction that makes the table, in place of any other.
func whole(addrs map[netip.Addr]bool, listeners map[Listener]bool) *nftables.Batch {
	b := nftables.NewBatch()
	const comment = "fairlead: ports of proxied load balancers"
	if len(addrs) == 0 {
		b.AddTable(table, comment) // so that deleting cannot fail
		b.DelTable(table)
		return b
	}
	b.ReplaceTable(table, comment)
	b.AddChain(table, nftables.Chain{Name: "input", Hook: &nftables.Hook{Type: "filter", Number: nftables.Input, Priority: priority}})
	for _, f := range families {
		b.AddSet(table, nftables.Set{Name: f.addresses(), Key: []nftables.Type{f.addr}, Comment: "addresses of proxied load balancers"})
		b.AddSet(table, nftables.Set{
			Name: f.listeners(), Key: []nftables.Type{f.addr, nftables.TypeProto, nftables.TypePort}, Comment: "what may be reached there",
		})
		b.AddChain(table, nftables.Chain{Name: f.chain()})
		to := nftables.Reg(0)
		proto := to + nftables.Reg(f.n/4)
		rule := func(chain string, p *nftables.Program) { b.AddRule(table, chain, nftables.Rule{Exprs: p.Bytes()}) }
		rule("input", new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(to, f.at, f.n).
			InSet(f.addresses(), to).Goto(f.chain()))
		rule(f.chain(), new(nftables.Program).Network(to, f.at, f.n).Meta(proto, nftables.MetaL4Proto).Port(proto+1, nftables.Destination).
			InSet(f.listeners(), to).Return())
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
	elements(b.AddElem, addrs, listeners)
	return b
}

// difference returns the transaction that leads from one state to another.
func difference(oldAddrs, addrs map[netip.Addr]bool, oldListeners, listeners map[Listener]bool) *nftables.Batch {
	b := nftables.NewBatch()
	elements(func(t nftables.Table, set string, e *nftables.Elem) { b.DelElem(t, set, e.Key) },
		without(oldAddrs, addrs), without(oldListeners, listeners))
	elements(b.AddElem, without(addrs, oldAddrs), without(listeners, oldListeners))
	return b
}

func without[K comparable](a, b map[K]bool) map[K]bool {
	out := maps.Clone(a)
	maps.DeleteFunc(out, func(k K, _ bool) bool { return b[k] })
	return out
}

// elements calls do for the elements of both kinds, set by set, so that they share messages.
func elements(do func(t nftables.Table, set string, e *nftables.Elem), addrs map[netip.Addr]bool, listeners map[Listener]bool) {
	for _, f := range families {
		for a := range addrs {
			if familyOf(a) == f {
				do(table, f.addresses(), &nftables.Elem{Key: a.AsSlice()})
			}
		}
		for l := range listeners {
			if familyOf(l.At.Addr()) == f {
				do(table, f.listeners(), &nftables.Elem{Key: l.key()})
			}
		}
	}
}
