package filter

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// unusedTable is the nft table of Unused.
var unusedTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-lb-unused"}

// Priorities of the chains of Unused: after the proxies have translated packets for Services, and their filters, at 0, have
// dropped packets that may not reach one; and before the translation of the proxies, which have no ICMP.
const (
	priorityUnused = 10
	priorityEcho   = nftables.PriorityDstNAT - 10
)

// Unused answers for addresses of load balancers where no Service does. Such an address is none of the machine's. A packet to
// it that no proxy has translated is forwarded: back to the router, which has a route to this node, until its TTL ends; or
// to the network of the node, where no machine answers for it. Here such a packet is refused at once, like the one to another port
// of a ClusterIP, and an echo request (ping) is answered.
//
// It works behind every proxy, since it sees only what none has translated. A packet to an address that is local is not
// forwarded and not concerned.
//
// Its methods are called one at a time.
type Unused struct {
	changed func()
	conn    *nftables.Conn
	damaged atomic.Bool
	known   bool // the table has all but pending
	there   bool // there is a table
	addrs   map[netip.Addr]bool
	spans   map[span]bool
	pending map[netip.Addr]bool // addresses that were added or removed since
}

// NewUnused returns an Unused without addresses, which writes nothing before Write. changed is as that of New.
func NewUnused(changed func()) *Unused {
	return &Unused{changed: changed, addrs: map[netip.Addr]bool{}, spans: map[span]bool{}, pending: map[netip.Addr]bool{}}
}

// Add adds an address of a load balancer, Delete removes one.
func (u *Unused) Add(a netip.Addr) { u.want(a, true) }

// Delete removes an address.
func (u *Unused) Delete(a netip.Addr) { u.want(a, false) }

func (u *Unused) want(a netip.Addr, wanted bool) {
	if u.addrs[a] == wanted {
		return
	}
	if delete(u.addrs, a); wanted {
		u.addrs[a] = true
	}
	if u.pending[a] { // as it is written
		delete(u.pending, a)
	} else {
		u.pending[a] = true
	}
}

// Write makes the table refuse what is for the addresses, and for whole networks, in one transaction of what has changed.
// Without any there is no table.
func (u *Unused) Write(networks []netip.Prefix) error {
	next := spansOf(networks)
	known := !u.damaged.Swap(false) && u.known
	gone, come := without(u.spans, next), without(next, u.spans)
	if known && len(u.pending)+len(gone)+len(come) == 0 {
		return nil
	}
	u.known = false
	there := len(u.addrs)+len(next) > 0
	if !there && u.conn == nil {
		err := nftables.RemoveTable(unusedTable)
		u.done(err, next)
		return err
	}
	if u.conn == nil {
		conn, err := dial(unusedTable, &u.damaged, u.changed)
		if err != nil {
			return err
		}
		u.conn = conn
	}
	var err error
	whole := !known || !u.there || !there
	if !whole {
		err = u.conn.Commit(u.difference(gone, come))
	}
	if whole || nftables.IsConflict(err) {
		err = u.conn.Commit(u.whole(next))
	}
	u.there = there
	if u.done(err, next); err != nil {
		return fmt.Errorf("write nft table %s: %w", unusedTable, err)
	}
	return nil
}

func (u *Unused) done(err error, spans map[span]bool) {
	if err == nil {
		u.known, u.spans = true, spans
		clear(u.pending)
	}
}

// Close removes the table.
func (u *Unused) Close() error {
	var err error
	if u.conn != nil {
		err = u.conn.Close()
	}
	return errors.Join(err, nftables.RemoveTable(unusedTable))
}

func (f family) networks() string { return "networks-" + f.name }

// difference returns the transaction of what has changed.
func (u *Unused) difference(gone, come map[span]bool) *nftables.Batch {
	b := nftables.NewBatch()
	for _, f := range families {
		for a := range u.pending {
			switch {
			case familyOf(a) != f:
			case u.addrs[a]:
				b.AddElem(unusedTable, f.addresses(), &nftables.Elem{Key: a.AsSlice()})
			default:
				b.DelElem(unusedTable, f.addresses(), a.AsSlice())
			}
		}
	}
	ranges(b.DelRange, gone)
	ranges(b.AddRange, come)
	return b
}

func ranges(do func(t nftables.Table, set string, first, end []byte), of map[span]bool) {
	for _, f := range families {
		for s := range of {
			if familyOf(s.first) == f {
				do(unusedTable, f.networks(), s.first.AsSlice(), s.end.AsSlice())
			}
		}
	}
}

// whole returns the transaction that makes the table, in place of any other.
func (u *Unused) whole(spans map[span]bool) *nftables.Batch {
	b := nftables.NewBatch()
	const comment = "fairlead: addresses of load balancers, where no Service answers"
	if len(u.addrs)+len(spans) == 0 {
		b.AddTable(unusedTable, comment) // so that deleting cannot fail
		b.DelTable(unusedTable)
		return b
	}
	b.ReplaceTable(unusedTable, comment)
	hook := func(name, kind string, number uint32, priority int32) {
		b.AddChain(unusedTable, nftables.Chain{Name: name, Hook: &nftables.Hook{Type: kind, Number: number, Priority: priority}})
	}
	hook("forward", "filter", nftables.Forward, priorityUnused)
	hook("output", "filter", nftables.Output, priorityUnused)
	hook("echo", "nat", nftables.Prerouting, priorityEcho)
	hook("own-echo", "nat", nftables.Output, priorityEcho)
	rule := func(chain string, p *nftables.Program) {
		b.AddRule(unusedTable, chain, nftables.Rule{Exprs: p.Bytes()})
	}
	known := uint32(nftables.CtStateEstablished | nftables.CtStateRelated)
	// Without tracking leaves what mode nft passes on to another node (docs/design/024-direct-return.md).
	for chain, states := range map[string]uint32{"forward": known, "output": known | nftables.CtStateUntracked} {
		rule(chain, new(nftables.Program).Conntrack(0, nftables.CtState).
			Mask(0, nftables.Uint32(states), nftables.Uint32(0)).NotEqual(0, nftables.Uint32(0)).Return())
	}
	const lo = 1 // what is for a local address leaves by it
	rule("output", new(nftables.Program).Meta(0, nftables.MetaOif).Equal(0, nftables.Uint32(lo)).Return())
	for _, f := range families {
		b.AddSet(unusedTable, nftables.Set{Name: f.addresses(), Key: []nftables.Type{f.addr}, Comment: "addresses of load balancers"})
		b.AddSet(unusedTable, nftables.Set{Name: f.networks(), Key: []nftables.Type{f.addr}, Interval: true,
			Comment: "prefixes announced as a whole"})
		b.AddChain(unusedTable, nftables.Chain{Name: f.refuse()})
		to := func(set string) *nftables.Program {
			return new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(0, f.at, f.n).InSet(set, 0)
		}
		for _, chain := range []string{"forward", "output"} {
			rule(chain, to(f.addresses()).Goto(f.refuse()))
			rule(chain, to(f.networks()).Goto(f.refuse()))
		}
		for _, chain := range []string{"echo", "own-echo"} {
			for _, set := range []string{f.addresses(), f.networks()} {
				rule(chain, nftables.RedirectAddress(to(set).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{f.icmp}).
					Port(0, nftables.Source).Equal(0, []byte{f.echo, 0}))) // the first two bytes of the header
			}
		}
		l4 := func(proto byte) *nftables.Program {
			return new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{proto})
		}
		rule(f.refuse(), l4(byte(svc.TCP)).Reject(nftables.ResetTCP()))
		rule(f.refuse(), l4(f.icmp).Drop()) // no error about an error, nor about anything else of ICMP
		rule(f.refuse(), new(nftables.Program).Reject(nftables.PortUnreachable(f.reject)))
	}
	for _, f := range families {
		for a := range u.addrs {
			if familyOf(a) == f {
				b.AddElem(unusedTable, f.addresses(), &nftables.Elem{Key: a.AsSlice()})
			}
		}
	}
	ranges(b.AddRange, spans)
	return b
}

func (f family) refuse() string { return "refuse-" + f.name }
