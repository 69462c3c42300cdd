// Package direct is direct return in mode nft: packets to a frontend with Hops are passed on to the node of an endpoint as they
// are, which answers the client itself. It is a second Target beside mode nft's, which translates what stays or was passed on
// to this node. See README.md.
package direct

import (
	"fmt"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

const (
	// TableName is the name of the table in both families.
	TableName = "fairlead-direct"
	// schema is the comment of the table; one with another comment is replaced.
	schema = "fairlead direct return, layout 1; changes by hand are undone"
)

// The names of sets, maps and chains.
const (
	setFronts = "frontends"
	setSlots  = "slots"
	setHops   = "hops"
	setFlows  = "flows"

	chainKnown  = "known-flows"
	chainFlow   = "passed-on"
	chainNew    = "new-flows"
	chainTables = "tables"
)

const (
	// passedHops is the time to live of packets that another node has passed on; with so much or less, none is passed on. It
	// leaves enough for the way into a Pod. All versions of a cluster have the same one.
	passedHops = 7
	// maxFlows bounds the remembered flows: a flood of forged sources must not fill the machine's memory.
	maxFlows = 1 << 18
	// affine is added to the size of a table in frontends with session affinity.
	affine = 1 << 16
)

// How long a flow is remembered after a packet, in milliseconds: its first one, a later one of TCP, of another protocol.
const (
	freshTime = 60_000
	tcpTime   = 24 * 3600_000
	otherTime = 180_000
)

// priorityNew is after connection tracking (-200) and before any translation (-100).
const priorityNew = -150

// layout is the table of one family. A rule holds in its registers, in IPv6 all 16 of them:
//
//	0  |  hop, whose last one may be a slot's number  |  frontend: address, protocol, port  |  client  client's port
//
// so that a flow, a frontend with a slot, and a frontend with a hop are each in one row. The 0 is for nft(8): up to 1.0.6 at least
// it ends with a failed assertion when it prints a lookup of what another lookup found. So maps have the hop behind a 0, and nft(8)
// believes that its registers have the destination, which is loaded there before.
type layout struct {
	nftables.Header
	table                     nftables.Table
	family                    svc.Family
	slot, front, client, port nftables.Reg
}

// hop is the register of the hop.
const hop nftables.Reg = 1

func newLayout(f svc.Family) *layout {
	l := &layout{Header: nftables.HeaderOf(f), table: nftables.Table{Family: nftables.FamilyOf(f), Name: TableName}, family: f}
	a := l.Regs()
	l.slot, l.front = a, a+1
	l.client = l.front + a + 2
	l.port = l.client + a
	return l
}

func (l *layout) sets() []nftables.Set {
	const (
		proto = nftables.TypeProto
		port  = nftables.TypePort
		mark  = nftables.TypeMark
	)
	a := l.Addr
	type ts = []nftables.Type
	return []nftables.Set{
		{Name: setFronts, Key: ts{a, proto, port}, Data: ts{mark}, Comment: "frontend : size of its table, + 0x10000 with affinity"},
		{Name: setSlots, Key: ts{mark, a, proto, port}, Data: ts{mark, a}, Comment: "slot . frontend : 0 . next hop, unspecified for this node"},
		{Name: setHops, Key: ts{a, a, proto, port}, Comment: "next hop that serves . frontend"},
		{Name: setFlows, Key: ts{a, proto, port, a, port}, Data: ts{mark, a}, Dynamic: true, Size: maxFlows,
			Comment: "frontend . client : 0 . next hop"},
	}
}

// chain is a chain with its rules.
type chain struct {
	name  string
	hook  *nftables.Hook
	rules []nftables.Rule
}

// chains are all chains, each after those it leads to.
func (l *layout) chains(set *dataplane.Settings) []chain {
	before := func(priority int32) *nftables.Hook {
		return &nftables.Hook{Type: "filter", Number: nftables.Prerouting, Priority: priority}
	}
	var out []chain
	tables := chain{name: chainTables}
	for _, size := range table.HopTables {
		for _, affinity := range []bool{false, true} {
			class := classOf(size, affinity)
			name := fmt.Sprintf("table-%d", size)
			if affinity {
				name += "-affine"
			}
			out = append(out, chain{name: name, rules: l.tableRules(size, affinity)})
			p := l.flow().Map(setFronts, l.front, 0).Equal(0, nftables.Uint32(class)).Goto(name)
			tables.rules = append(tables.rules, commented(p, "%s map @frontends is %#x: goto %s", l.FrontendText(), class, name))
		}
	}
	return append(out, tables,
		chain{name: chainFlow, rules: l.known()},
		chain{name: chainKnown, hook: before(nftables.PriorityRaw), rules: l.lookUp()},
		chain{name: chainNew, hook: before(priorityNew), rules: l.choose(set)})
}

// classOf is what map frontends has for a frontend.
func classOf(size int, affinity bool) uint32 {
	if affinity {
		return uint32(size) | affine
	}
	return uint32(size)
}

func commented(p *nftables.Program, text string, args ...any) nftables.Rule {
	r := nftables.NewRule(p, text, args...)
	r.Comment = true
	return r
}

// flow begins a rule by loading the flow of the packet.
func (l *layout) flow() *nftables.Program { return l.loadFlow(new(nftables.Program)) }

func (l *layout) loadFlow(p *nftables.Program) *nftables.Program {
	a := l.Regs()
	return p.Network(hop, l.Destination, l.Len).Network(l.client, l.Source, l.Len).Port(l.port, nftables.Source).
		Network(l.front, l.Destination, l.Len).Meta(l.front+a, nftables.MetaL4Proto).Port(l.front+a+1, nftables.Destination)
}

// tcpFlags begins a rule for segments of TCP, by loading some of their flags into register 0.
func tcpFlags(flags byte) *nftables.Program {
	return new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(svc.TCP)}).
		TCPFlags(0).Mask(0, []byte{flags}, []byte{0})
}

func notTCP() *nftables.Program {
	return new(nftables.Program).Meta(0, nftables.MetaL4Proto).NotEqual(0, []byte{byte(svc.TCP)})
}

// passOn ends a rule: a copy of the packet goes to the hop, and the packet no further.
func (l *layout) passOn(p *nftables.Program) *nftables.Program {
	nftables.SetHops(p.Value(l.port, []byte{passedHops + 1}), l.table.Family, l.port)
	return nftables.Duplicate(p, hop).Drop()
}

// remember keeps the flow and its hop for some milliseconds, or renews that.
func (l *layout) remember(p *nftables.Program, ms uint64) *nftables.Program {
	return p.Value(0, nftables.Uint32(0)).Remember(setFlows, l.front, 0, ms)
}

// enough ends the chain for packets that are not to be passed on (again).
func (l *layout) enough() nftables.Rule {
	p := nftables.Hops(new(nftables.Program), l.table.Family, 0).Mask(0, []byte{^byte(passedHops)}, []byte{0}).Equal(0, []byte{0}).Return()
	return commented(p, "time to live or hop limit up to %d: return", passedHops)
}

// lookUp passes remembered flows on, before connection tracking: it would see half of each connection. ICMP errors about a
// remembered flow follow it.
func (l *layout) lookUp() []nftables.Rule {
	return []nftables.Rule{
		l.enough(),
		commented(l.passOn(l.errorFlow().Map(setFlows, l.front, 0)), "ICMP error about a flow in @flows: pass on"),
		commented(l.flow().Map(setFlows, l.front, 0).Goto(chainFlow), "flow in @flows: goto %s", chainFlow),
	}
}

// errorFlow begins a rule for ICMP errors, by loading the flow whose answer they quote. IPv4 headers with options are not looked
// into.
func (l *layout) errorFlow() *nftables.Program {
	const quoted = 8 // after the header of ICMP
	a := l.Regs()
	p := new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{l.ICMP})
	header, proto := uint32(ipv6.HeaderLen), uint32(6)
	if l.family == svc.IPv4 {
		header, proto = ipv4.HeaderLen, 9
		// Echoes are no errors; what else there is quotes no packet of these protocols.
		nftables.Transport(p, 0, 0, 1).NotEqual(0, []byte{byte(ipv4.ICMPTypeEcho)}).NotEqual(0, []byte{byte(ipv4.ICMPTypeEchoReply)})
		nftables.Transport(p, 0, quoted, 1).Equal(0, []byte{ipv4.Version<<4 | ipv4.HeaderLen/4})
	} else {
		nftables.Transport(p, 0, 0, 1).Mask(0, []byte{0x80}, []byte{0}).Equal(0, []byte{0}) // RFC 4443, section 2.1
	}
	p.Network(hop, l.Destination, l.Len)
	nftables.Transport(p, l.client, quoted+l.Destination, l.Len)
	nftables.Transport(p, l.port, quoted+header+2, 2)
	nftables.Transport(p, l.front, quoted+l.Source, l.Len)
	nftables.Transport(p, l.front+a, quoted+proto, 1)
	return nftables.Transport(p, l.front+a+1, quoted+header, 2)
}

// known passes remembered flows on, and renews or ends the memory. A new connection of TCP is a new flow, and so is one of another
// protocol whose hop does not serve any more.
func (l *layout) known() []nftables.Rule {
	flow := func(p *nftables.Program) *nftables.Program { return l.loadFlow(p).Map(setFlows, l.front, 0) }
	forget := func(p *nftables.Program) *nftables.Program {
		return flow(p).Value(0, nftables.Uint32(0)).Forget(setFlows, l.front, 0)
	}
	closing := tcpFlags(nftables.TCPFin|nftables.TCPRst).NotEqual(0, []byte{0})
	open, opening := tcpFlags(nftables.TCPSyn).Equal(0, []byte{0}), tcpFlags(nftables.TCPSyn).NotEqual(0, []byte{0})
	return []nftables.Rule{
		commented(l.passOn(l.remember(flow(notTCP()).InSet(setHops, hop), otherTime)),
			"not TCP, and the hop in @hops: renew, pass on"),
		commented(forget(notTCP()).Return(), "not TCP: forget"),
		commented(l.passOn(forget(closing)), "tcp fin or rst: forget, pass on"),
		commented(l.passOn(l.remember(flow(open), tcpTime)), "tcp without syn: renew, pass on"),
		commented(forget(opening), "tcp syn: forget"),
	}
}

// choose leads new flows of clients outside to the table of their frontend. Connections that are tracked as known have their endpoint
// here, or were translated here. A packet that meets a transaction may miss the frontend, and looks twice.
func (l *layout) choose(set *dataplane.Settings) []nftables.Rule {
	tracked := new(nftables.Program).Conntrack(0, nftables.CtState).
		Mask(0, nftables.Uint32(nftables.CtStateEstablished|nftables.CtStateRelated), nftables.Uint32(0)).
		NotEqual(0, nftables.Uint32(0)).Return()
	rules := []nftables.Rule{nftables.NewRule(tracked, "ct state established,related return"), l.enough()}
	for _, i := range set.PodInterfaces {
		rules = append(rules, nftables.NewRule(nftables.FromInterface(i.Name, i.Prefix).Return(), "iifname \"%s\" return", i))
	}
	for _, p := range set.LocalPods {
		rules = append(rules, nftables.NewRule(l.InPrefix(l.Source, p).Return(), "%s saddr %s return", l.Word, p))
	}
	for range 2 {
		p := l.flow().Map(setFronts, l.front, 0).Goto(chainTables)
		rules = append(rules, commented(p, "%s in @frontends: goto %s", l.FrontendText(), chainTables))
	}
	return rules
}

// tableRules chooses the hop of a new flow by its hash, and remembers it. What falls to this node goes on.
func (l *layout) tableRules(size int, affinity bool) []nftables.Rule {
	n, of := l.Len+4, "client and its port"
	if affinity {
		n, of = l.Len, "client"
	}
	choice := func() *nftables.Program {
		p := nftables.Hash(l.flow(), l.client, l.slot, n, uint32(size))
		return p.Map(setSlots, l.slot, 0).NotEqual(hop, make([]byte, l.Len))
	}
	return []nftables.Rule{
		commented(l.passOn(l.remember(choice(), freshTime)),
			"%s hashed mod %d in @slots, unless this node: remember, pass on", of, size),
		commented(l.passOn(choice()), "@flows is full: pass on"),
	}
}
