// Package nftrace follows one packet through the nf_tables of a network namespace. It has a table of its own, whose first chains
// choose the packet (meta nftrace), and whose first and last chains of each hook show where the packet was, from where to where,
// whatever changed it in between. Rules of every program are reported, except rules of iptables-legacy.
package nftrace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// TableName is the name of the table, of the packet's family.
const TableName = "fairlead-trace"

// comment is the comment of the table.
const comment = "fairlead trace: one packet is followed; the table goes with its process"

// maxSteps bounds the reports that are kept of one packet. A packet meets as many rules as match it: of fairlead a few in each hook.
const maxSteps = 400

// ErrBusy is the error of Start while another process has a table.
var ErrBusy = errors.New("another trace is under way in this network namespace")

// ErrMissed is the error of Read when the kernel had to drop reports.
var ErrMissed = errors.New("the kernel dropped a part of the trace")

// Packet is the traced packet, by both of its ends: a datagram, or the first segment of a TCP connection.
type Packet struct {
	Protocol            svc.Protocol
	Source, Destination netip.AddrPort
	// Sequence is the sequence number of a TCP segment, by which it is known again when its addresses have changed.
	Sequence uint32
}

// Kind is what a Step reports.
type Kind string

// The kinds.
const (
	Rule   Kind = "rule"
	Policy Kind = "policy" // of a base chain at its end
	Return Kind = "return" // from a chain at its end
)

// kinds are by the kernel's numbers.
var kinds = map[uint32]Kind{unix.NFT_TRACETYPE_RULE: Rule, unix.NFT_TRACETYPE_POLICY: Policy, unix.NFT_TRACETYPE_RETURN: Return}

// Step is one report of the kernel.
type Step struct {
	Table  nftables.Table
	Chain  string
	Handle uint64 // of a rule
	Kind   Kind
	// Verdict is "accept", "drop", "continue", "jump", "goto", "return" or another of the kernel; Target is the chain of a jump.
	Verdict, Target string
	// Hook is set in the reports of this package's own chains, and First in those that are before all other chains of the hook.
	Hook  string
	First bool
	// In and Out are devices.
	In, Out string
	// Source and Destination are the packet's, not valid in reports without its headers.
	Source, Destination netip.AddrPort
}

// hooks are the names of the places, by their numbers.
var hooks = map[uint32]string{
	nftables.Prerouting: "prerouting", nftables.Input: "input", nftables.Forward: "forward", nftables.Output: "output",
	nftables.Postrouting: "postrouting",
}

const first, last = "-first", "-last"

// Trace follows one packet in the network namespace of the thread that called Start. One goroutine uses it at a time.
type Trace struct {
	packet  Packet
	table   nftables.Table
	conn    *nftables.Conn
	sub     *netlink.Subscription
	devices map[uint32]string
	ids     map[uint32]bool
	steps   []Step
	more    int
	dropped bool
}

// Start makes the table and subscribes to what the kernel reports. A packet that is sent from now on is traced. The table belongs
// to the Trace: the kernel removes it when the process ends. Linux before 5.12 knows no owners (EINVAL): there it stays until Remove.
func Start(p Packet) (t *Trace, err error) {
	t = &Trace{packet: p, ids: map[uint32]bool{}, devices: map[uint32]string{}}
	t.table = nftables.Table{Family: nftables.FamilyOf(svc.FamilyOf(p.Source.Addr())), Name: TableName}
	if t.sub, err = netlink.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTRACE); err != nil {
		return nil, err
	}
	if err = t.sub.Enlarge(); err == nil {
		t.conn, err = nftables.Dial()
	}
	if err == nil {
		if err = t.install((*nftables.Batch).OwnTable); nftables.IsUnsupported(err) || errors.Is(err, unix.EINVAL) {
			err = t.install((*nftables.Batch).ReplaceTable)
		}
	}
	if err != nil {
		if t.conn != nil {
			_ = t.conn.Close()
		}
		return nil, errors.Join(err, t.sub.Close())
	}
	if list, err := net.Interfaces(); err == nil { // else devices have numbers
		for _, i := range list {
			t.devices[uint32(i.Index)] = i.Name
		}
	}
	return t, nil
}

// install makes the table by make.
func (t *Trace) install(table func(*nftables.Batch, nftables.Table, string)) error {
	b := nftables.NewBatch()
	table(b, t.table, comment)
	for number, name := range hooks {
		for suffix, priority := range map[string]int32{first: nftables.PriorityFirst, last: nftables.PriorityLast - 1} {
			b.AddChain(t.table, nftables.Chain{
				Name: name + suffix, Hook: &nftables.Hook{Type: "filter", Number: number, Priority: priority},
			})
		}
	}
	for _, name := range []string{hooks[nftables.Prerouting], hooks[nftables.Output]} {
		b.AddRule(t.table, name+first, t.rule())
	}
	err := t.conn.Commit(b)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY) {
		if _, there, e := t.conn.Table(t.table); e == nil && there {
			return ErrBusy
		}
	}
	return err
}

// rule chooses the packet.
func (t *Trace) rule() nftables.Rule {
	h := nftables.HeaderOf(svc.FamilyOf(t.packet.Source.Addr()))
	port := func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }
	p := new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(t.packet.Protocol)}).
		Network(0, h.Source, h.Len).Equal(0, t.packet.Source.Addr().AsSlice()).
		Network(0, h.Destination, h.Len).Equal(0, t.packet.Destination.Addr().AsSlice()).
		Port(0, nftables.Source).Equal(0, port(t.packet.Source)).Port(0, nftables.Destination).Equal(0, port(t.packet.Destination))
	if t.packet.Protocol == svc.TCP { // not the reset that follows an answer
		p.TCPFlags(0).Mask(0, []byte{nftables.TCPSyn | nftables.TCPAck}, []byte{0}).Equal(0, []byte{nftables.TCPSyn})
	}
	return nftables.NewRule(nftables.Trace(p), "%s from %s to %s: meta nftrace set 1", t.packet.Protocol, t.packet.Source,
		t.packet.Destination)
}

// Read takes what the kernel has reported by now. It does not wait.
func (t *Trace) Read() error {
	err := t.sub.Pending(func(typ uint16, body []byte) {
		const genLen = 4
		if typ == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE && len(body) >= genLen {
			t.report(nftables.Family(body[0]), body[genLen:])
		}
	})
	if errors.Is(err, unix.ENOBUFS) {
		return ErrMissed
	}
	return err
}

// Steps are what Read has taken, in their order, and how many more there were.
func (t *Trace) Steps() (list []Step, more int) { return t.steps, t.more }

// Dropped reports whether a rule or a policy has dropped the packet.
func (t *Trace) Dropped() bool { return t.dropped }

// Describe returns the rule of a step in words, "" if it is gone.
func (t *Trace) Describe(s *Step) string {
	text, found, err := nftables.Describe(t.conn, s.Table, s.Chain, s.Handle)
	if err != nil || !found {
		return ""
	}
	return text
}

// End removes the table, and ends the trace.
func (t *Trace) End() error {
	b := nftables.NewBatch()
	b.DelTable(t.table)
	err := t.conn.Commit(b)
	if errors.Is(err, unix.ENOENT) { // another program has removed it
		err = nil
	}
	return errors.Join(err, t.conn.Close(), t.sub.Close())
}

// Remove removes the tables that processes have left in the network namespace of the calling thread. One of a running process goes
// with that.
func Remove(ctx context.Context) error {
	err := nftables.Remove(ctx, TableName)
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}

// report takes one message of the kernel, if it is of the packet.
func (t *Trace) report(f nftables.Family, attrs []byte) {
	s := Step{Table: nftables.Table{Family: f}}
	var id uint32
	var headers [2][]byte // of the network and the transport
	netlink.Attrs(attrs, func(typ uint16, v []byte) {
		switch typ {
		case unix.NFTA_TRACE_TABLE:
			s.Table.Name = netlink.CString(v)
		case unix.NFTA_TRACE_CHAIN:
			s.Chain = netlink.CString(v)
		case unix.NFTA_TRACE_RULE_HANDLE:
			if len(v) == 8 {
				s.Handle = binary.BigEndian.Uint64(v)
			}
		case unix.NFTA_TRACE_TYPE:
			s.Kind = kinds[number(v)]
		case unix.NFTA_TRACE_VERDICT:
			s.Verdict = verdict(number(netlink.Attr(v, unix.NFTA_VERDICT_CODE)))
			s.Target = netlink.CString(netlink.Attr(v, unix.NFTA_VERDICT_CHAIN))
		case unix.NFTA_TRACE_POLICY:
			s.Verdict = verdict(number(v))
		case unix.NFTA_TRACE_ID:
			id = number(v)
		case unix.NFTA_TRACE_NETWORK_HEADER:
			headers[0] = v
		case unix.NFTA_TRACE_TRANSPORT_HEADER:
			headers[1] = v
		case unix.NFTA_TRACE_IIF:
			s.In = t.device(number(v))
		case unix.NFTA_TRACE_OIF:
			s.Out = t.device(number(v))
		}
	})
	var sequence uint32
	s.Source, s.Destination, sequence = ends(headers[0], headers[1])
	if !t.ours(&s, id, sequence) {
		return
	}
	if s.Table == t.table {
		s.Hook, s.First = strings.CutSuffix(s.Chain, first)
		if !s.First {
			s.Hook = strings.TrimSuffix(s.Chain, last)
		}
	}
	if s.Verdict == "drop" {
		t.dropped = true
	}
	if len(t.steps) == maxSteps {
		t.more++
		return
	}
	t.steps = append(t.steps, s)
}

// ours reports whether a message is of the packet: another program may trace others. A TCP segment is known by its sequence number, a
// datagram by its source; a message without headers by the number that the kernel gives to a packet. That is made from where the
// packet is in memory and where it came by, so that a packet has several, and a later one may have the same.
func (t *Trace) ours(s *Step, id, sequence uint32) bool {
	if !s.Source.IsValid() {
		return t.ids[id]
	}
	is := s.Source == t.packet.Source || t.ids[id] // also behind masquerading
	if t.packet.Protocol == svc.TCP {
		is = sequence == t.packet.Sequence
	}
	t.ids[id] = is
	return is
}

func (t *Trace) device(index uint32) string {
	if name, ok := t.devices[index]; ok {
		return name
	}
	return fmt.Sprintf("device %d", index)
}

func number(v []byte) uint32 {
	if len(v) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}

// verdict is the word of nft(8) for a verdict of the kernel.
func verdict(code uint32) string {
	switch int32(code) {
	case 0: // NF_DROP
		return "drop"
	case 1: // NF_ACCEPT
		return "accept"
	case unix.NFT_CONTINUE, unix.NFT_BREAK:
		return "continue"
	case unix.NFT_JUMP:
		return "jump"
	case unix.NFT_GOTO:
		return "goto"
	case unix.NFT_RETURN:
		return "return"
	}
	if code&0xff == 3 { // NF_QUEUE
		return "queue"
	}
	return fmt.Sprintf("verdict %d", int32(code))
}

// ends reads the addresses, ports and the sequence number of the first bytes of both headers, as far as they are there.
func ends(network, transport []byte) (from, to netip.AddrPort, sequence uint32) {
	var src, dst netip.Addr
	switch {
	case len(network) >= 20 && network[0]>>4 == 4:
		src, dst = netip.AddrFrom4([4]byte(network[12:])), netip.AddrFrom4([4]byte(network[16:]))
	case len(network) >= 40 && network[0]>>4 == 6:
		src, dst = netip.AddrFrom16([16]byte(network[8:])), netip.AddrFrom16([16]byte(network[24:]))
	default:
		return from, to, 0
	}
	if len(transport) < 4 {
		return from, to, 0
	}
	if len(transport) >= 8 {
		sequence = binary.BigEndian.Uint32(transport[4:])
	}
	from = netip.AddrPortFrom(src, binary.BigEndian.Uint16(transport))
	return from, netip.AddrPortFrom(dst, binary.BigEndian.Uint16(transport[2:])), sequence
}
