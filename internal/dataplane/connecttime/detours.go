package connecttime

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

// detourTable is the name of the tables of detours, which are there while there are detours.
const detourTable = "fairlead-connect"

const (
	detourSet = "detours"
	// detourPriority is before the rules of Services: the first translation of a connection is its last.
	detourPriority = -101
	// detourTime is how long a detour stays if this process ends: longer than a connection is tried with net.ipv4.tcp_syn_retries at its
	// default of 6, 127 s.
	detourTime = 3 * time.Minute
	// maxDetours bounds them, in some 100 bytes each. An attempt beyond that is not led on.
	maxDetours = 1 << 12
)

// route are the addresses of an attempt.
type route struct{ from, to netip.AddrPort }

// detours lead attempts to connect with an endpoint that has left on to another one: packets that begin a connection from
// the attempt's port are translated. The next one that the client's kernel sends is the first of a new connection, since the old one is
// removed from connection tracking. It has one user at a time.
type detours struct {
	nft   *nftables.Conn
	track *conntrack.Conn
	all   map[route]netip.AddrPort
	// from is the number of detours of attempts to connect with an endpoint, none of them 0. Each noted connection is looked up in it.
	from  map[netip.AddrPort]int
	begun map[route]bool // their old connections are still tracked
	dirty bool           // also at first: tables of an earlier process go
}

// probeName is the name of the tables of probeDetours.
const probeName = "fairlead-connect-probe"

// probeDetours returns why attempts cannot be led on in this network namespace: that takes nf_tables, in front of mode iptables, too.
// What it asks the kernel for is taken back in the same transaction.
func probeDetours() error {
	c, err := nftables.Dial()
	if err != nil {
		return fmt.Errorf("connect-time: %w", err)
	}
	defer func() { _ = c.Close() }()
	for _, f := range socket.Families() {
		t, b := nftables.Table{Family: nftables.FamilyOf(f), Name: probeName}, nftables.NewBatch()
		addDetourTable(b, t, f)
		b.DelTable(t)
		if err := c.Commit(b); err != nil {
			return fmt.Errorf("connect-time leads connections without an answer on by nf_tables, which this kernel must have with nat, "+
				"for %s, beside mode iptables, too: %w", f, err)
		}
	}
	return nil
}

// newDetours returns detours of the network namespace of the calling thread.
func newDetours() (*detours, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	track, err := conntrack.Dial()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	d := noDetours()
	d.nft, d.track, d.dirty = c, track, true
	return d, nil
}

// noDetours returns detours that cannot be committed.
func noDetours() *detours {
	return &detours{all: map[route]netip.AddrPort{}, from: map[netip.AddrPort]int{}, begun: map[route]bool{}}
}

func (d *detours) close() error { return errors.Join(d.nft.Close(), d.track.Close()) }

// to returns where an attempt was led to.
func (d *detours) to(r route) (netip.AddrPort, bool) {
	at, ok := d.all[r]
	return at, ok
}

// leadsFrom reports whether an attempt to connect with an endpoint was led on.
func (d *detours) leadsFrom(at netip.AddrPort) bool { return d.from[at] > 0 }

// lead sends an attempt to an endpoint, from the next commit on, and reports whether there was room.
func (d *detours) lead(r route, to netip.AddrPort) bool {
	if _, has := d.all[r]; !has {
		if len(d.all) >= maxDetours {
			return false
		}
		d.from[r.to]++
	}
	d.all[r], d.begun[r], d.dirty = to, true, true
	return true
}

// keep drops the detours of all attempts but some, from the next commit on.
func (d *detours) keep(of map[route]bool) {
	for r := range d.all {
		if !of[r] {
			delete(d.all, r)
			delete(d.begun, r)
			if d.from[r.to]--; d.from[r.to] == 0 {
				delete(d.from, r.to)
			}
			d.dirty = true
		}
	}
}

func (d *detours) size() int { return len(d.all) }

// commit writes all detours, then has the attempts begin again that were led on. What has failed is done by the next one.
func (d *detours) commit() error {
	if d.dirty {
		for _, f := range socket.Families() {
			if err := d.write(f); err != nil {
				return err
			}
		}
		d.dirty = false
	}
	var errs []error
	for r := range d.begun {
		if _, err := d.track.Unanswer(svc.TCP, r.from, r.to); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(d.begun, r)
	}
	return errors.Join(errs...)
}

// write replaces the table of a family in one transaction. Without detours there is none.
func (d *detours) write(f svc.Family) error {
	t, b := detourTableOf(f), nftables.NewBatch()
	b.Tag(t)
	b.AddTable(t, "")
	b.DelTable(t)
	some := false
	for r, to := range d.all {
		if svc.FamilyOf(r.to.Addr()) != f {
			continue
		}
		if !some {
			some = true
			addDetourTable(b, t, f)
		}
		b.AddElem(t, detourSet, &nftables.Elem{
			Key: append(pairKey(r.from), pairKey(r.to)...), Data: pairKey(to), Timeout: uint64(detourTime.Milliseconds()),
		})
	}
	return d.nft.CommitTable(t, b)
}

func detourTableOf(f svc.Family) nftables.Table {
	return nftables.Table{Family: nftables.FamilyOf(f), Name: detourTable}
}

// addDetourTable adds a table with its set, its chains and its rules.
func addDetourTable(b *nftables.Batch, t nftables.Table, f svc.Family) {
	h := nftables.HeaderOf(f)
	address := []nftables.Type{h.Addr, nftables.TypePort}
	b.AddTable(t, "leads attempts to connect with endpoints that have left on to others")
	b.AddSet(t, nftables.Set{
		Name: detourSet, Key: append(address, address...), Data: address, Dynamic: true, Size: maxDetours,
		Comment: "client . endpoint that has left : endpoint",
	})
	a := h.Regs()
	p := new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(svc.TCP)}).
		TCPFlags(0).Mask(0, []byte{nftables.TCPSyn | nftables.TCPAck}, []byte{0}).Equal(0, []byte{nftables.TCPSyn}).
		Network(0, h.Source, h.Len).Port(a, nftables.Source).Network(a+1, h.Destination, h.Len).Port(2*a+1, nftables.Destination).
		Map(detourSet, 0, 0).DNAT(t.Family, 0, a)
	r := nftables.NewRule(p, "tcp flags syn / syn,ack dnat %s to %s saddr . tcp sport . %s daddr . tcp dport map @%s",
		h.Word, h.Word, h.Word, detourSet)
	for chain, hook := range map[string]uint32{"prerouting": nftables.Prerouting, "output": nftables.Output} {
		b.AddChain(t, nftables.Chain{Name: chain, Hook: &nftables.Hook{Type: "nat", Number: hook, Priority: detourPriority}})
		b.AddRule(t, chain, r)
	}
}

// pairKey is an address and a port as a part of an element.
func pairKey(at netip.AddrPort) []byte {
	return append(binary.BigEndian.AppendUint16(at.Addr().AsSlice(), at.Port()), 0, 0)
}

// Cleanup removes the detours of the network namespace of the calling thread. Attempts that were led on and have no answer yet go on
// trying.
func Cleanup() error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range socket.Families() {
		t := detourTableOf(f)
		if _, found, err := c.Table(t); err != nil || !found {
			continue // a kernel without nf_tables has none
		}
		b := nftables.NewBatch()
		b.DelTable(t)
		errs = append(errs, c.Commit(b))
	}
	return errors.Join(append(errs, c.Close())...)
}
