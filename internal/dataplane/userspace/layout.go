package userspace

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// tableName is the name of our table in both families.
	tableName = "fairlead-userspace"
	// schema is the comment of the table. Whatever carries another one is
	// replaced as a whole.
	schema = "fairlead userspace proxy, layout 2; changes by hand are undone"
)

// The names of sets and maps.
const (
	setVIPs          = "vips"
	setNodePorts     = "node-ports"
	setOtherVIPs     = "other-vips"
	setOtherNode     = "other-node-ports"
	setNodeAddresses = "node-addresses"
	setClusterIPs    = "cluster-ips"
	setProxyPorts    = "proxy-ports"
)

// The names of the chains that are always there.
const (
	chainPrerouting = "prerouting"
	chainOutput     = "output"
	chainServices   = "services"
	chainUnserved   = "unserved"
	chainRefuse     = "refuse"
	chainDrop       = "discard"
)

// priorityDstNAT is NF_IP_PRI_NAT_DST.
const priorityDstNAT = -100

// loopbackIndex is the interface number of lo in every network namespace.
const loopbackIndex = 1

// layout is what differs between the two families.
type layout struct {
	nftables.Header
	table  nftables.Table
	family svc.Family
}

func newLayout(f svc.Family) *layout {
	t := nftables.Table{Family: nftables.FamilyOf(f), Name: tableName}
	return &layout{Header: nftables.HeaderOf(f), table: t, family: f}
}

// portReg is where the rules keep a proxy port, behind whatever they look up.
const portReg nftables.Reg = 8

// sets are the sets and maps of the table.
func (l *layout) sets() []nftables.Set {
	const (
		proto = nftables.TypeProto
		port  = nftables.TypePort
	)
	a := l.Addr
	type ts = []nftables.Type
	return append([]nftables.Set{
		{Name: setVIPs, Key: ts{a, proto, port}, Data: ts{port}, Comment: "frontend : port of the proxy"},
		{Name: setNodePorts, Key: ts{proto, port}, Data: ts{port}, Comment: "node port : port of the proxy"},
		{Name: setOtherVIPs, Key: ts{a, proto, port}, Data: ts{nftables.TypeVerdict}, Comment: "frontends with conditions, or without endpoints"},
		{Name: setOtherNode, Key: ts{proto, port}, Data: ts{nftables.TypeVerdict}, Comment: "node ports with conditions, or without endpoints"},
		{Name: setNodeAddresses, Key: ts{a}, Comment: "where node ports answer"},
		{Name: setClusterIPs, Key: ts{a}, Comment: "addresses whose other ports are refused"},
		{Name: setProxyPorts, Key: ts{proto, port}, Comment: "ports of the proxy, for captured connections only"},
	}, drops.Sets(&l.Header)...)
}

// chain is a chain with its rules.
type chain struct {
	name  string
	hook  *nftables.Hook
	rules []nftables.Rule
	// stored are the rules of a chain that was read.
	stored []nftables.StoredRule
}

// hashes tell the rules of chains apart.
func (c chain) hashes() []uint64 {
	var out []uint64
	for _, r := range c.rules {
		out = append(out, r.Hash())
	}
	for _, r := range c.stored {
		out = append(out, r.Hash)
	}
	return out
}

// base are the chains that are always there, each after those it leads to.
func (l *layout) base(s *dataplane.Settings) []chain {
	nat := func(n uint32) *nftables.Hook {
		return &nftables.Hook{Type: "nat", Number: n, Priority: priorityDstNAT}
	}
	// Twice: a packet that is under way while a transaction ends can miss a
	// frontend that moves from one map to another.
	way := []nftables.Rule{
		nftables.NewRule(new(nftables.Program).Jump(chainServices), "jump services"),
		nftables.NewRule(new(nftables.Program).Jump(chainServices), "jump services"),
		nftables.NewRule(new(nftables.Program).Jump(chainUnserved), "jump unserved"),
	}
	in := way
	if s.Localhost {
		// Captured, it would come from another machine all the same; the kernel drops it.
		p := new(nftables.Program).Meta(0, nftables.MetaIif).NotEqual(0, nftables.Uint32(loopbackIndex)).
			Network(0, l.Destination, 1).Equal(0, []byte{127}).Return()
		in = append([]nftables.Rule{nftables.NewRule(p, "iif != lo ip daddr 127.0.0.0/8 return")}, way...)
	}
	return []chain{
		{name: chainRefuse, rules: drops.Rules(&l.Header, drops.Rejected, false)},
		{name: chainDrop, rules: drops.Rules(&l.Header, drops.Dropped, false)},
		{name: chainServices, rules: l.services(s)},
		{name: chainUnserved, rules: l.unserved(s.Services)},
		{name: chainPrerouting, hook: nat(nftables.Prerouting), rules: in},
		{name: chainOutput, hook: nat(nftables.Output), rules: way},
	}
}

// capture sends the connection to the port in portReg of this node: of an
// address of the node, since an interface that it came in by may have none, as
// pods' often have not, and a redirect would drop it.
func (l *layout) capture(p *nftables.Program, s *dataplane.Settings) (*nftables.Program, string) {
	for _, a := range s.NodeAddrs {
		if !a.IsLoopback() {
			text := a.String()
			if a.Is6() {
				text = "[" + text + "]"
			}
			return p.Value(0, a.AsSlice()).DNAT(l.table.Family, 0, portReg), "dnat to " + text
		}
	}
	return p.Redirect(portReg), "redirect to "
}

// services finds what a new connection is for.
func (l *layout) services(s *dataplane.Settings) []nftables.Rule {
	a := l.Regs()
	node := func() *nftables.Program {
		return new(nftables.Program).Network(0, l.Destination, l.Len).InSet(setNodeAddresses, 0).
			Meta(a, nftables.MetaL4Proto).Port(a+1, nftables.Destination)
	}
	toVIP, text := l.capture(l.Frontend().Map(setVIPs, 0, portReg), s)
	toNode, _ := l.capture(node().Map(setNodePorts, a, portReg), s)
	return []nftables.Rule{
		nftables.NewRule(toVIP, "%s:%s map @vips", text, l.FrontendText()),
		nftables.NewRule(l.Frontend().VerdictMap(setOtherVIPs, 0), "%s vmap @other-vips", l.FrontendText()),
		nftables.NewRule(toNode, "%s daddr @node-addresses %s:meta l4proto . th dport map @node-ports", l.Word, text),
		nftables.NewRule(node().VerdictMap(setOtherNode, a), "%s daddr @node-addresses meta l4proto . th dport vmap @other-node-ports", l.Word),
	}
}

// unserved is for packets to the addresses of Services, but to none of
// their ports, and for packets to a port of the proxy without having been
// captured: it would evade source ranges.
func (l *layout) unserved(services []netip.Prefix) []nftables.Rule {
	other := new(nftables.Program).Network(0, l.Destination, l.Len).InSet(setClusterIPs, 0).Goto(chainRefuse)
	direct := new(nftables.Program).AddressType(0, nftables.Destination).Equal(0, nftables.Uint32(nftables.TypeLocal)).
		Meta(0, nftables.MetaL4Proto).Port(1, nftables.Destination).InSet(setProxyPorts, 0).Goto(chainRefuse)
	rules := []nftables.Rule{
		nftables.NewRule(other, "%s daddr @cluster-ips goto refuse", l.Word),
		nftables.NewRule(direct, "fib daddr type local meta l4proto . th dport @proxy-ports goto refuse"),
	}
	for _, p := range services {
		rules = append(rules, nftables.NewRule(l.InPrefix(l.Destination, p).Drop(), "%s daddr %s drop", l.Word, p))
	}
	return rules
}

// end is the rule that ends a chain where a connection is to go: to a port of
// the proxy, or refused, or dropped.
func (l *layout) end(p *nftables.Program, when string, to dest, s *dataplane.Settings) nftables.Rule {
	switch {
	case to.port != 0:
		p, text := l.capture(p.Value(portReg, binary.BigEndian.AppendUint16(nil, to.port)), s)
		return nftables.NewRule(p, "%s%s:%d", when, text, to.port)
	case to.drop:
		return nftables.NewRule(p.Goto(chainDrop), "%sgoto %s", when, chainDrop)
	}
	return nftables.NewRule(p.Goto(chainRefuse), "%sgoto refuse", when)
}

// dest is where a connection goes: to a port of the proxy, or nowhere.
type dest struct {
	port uint16
	drop bool // without a port: drop rather than refuse
}

// conditions are the chains of a frontend that treats clients differently, the
// one entered last. Its clients are this node, its pods, and all others.
func (l *layout) conditions(fr *front, s *dataplane.Settings) []chain {
	name := ownName(fr.key)
	in := chain{name: name}
	if fr.split {
		for _, i := range s.PodInterfaces {
			in.rules = append(in.rules, l.end(nftables.FromInterface(i.Name, i.Prefix), fmt.Sprintf("iifname \"%s\" ", i), fr.to[1], s))
		}
		for _, p := range s.LocalPods {
			in.rules = append(in.rules, l.end(l.InPrefix(l.Source, p), fmt.Sprintf("%s saddr %s ", l.Word, p), fr.to[1], s))
		}
		self := new(nftables.Program).AddressType(0, nftables.Source).Equal(0, nftables.Uint32(nftables.TypeLocal))
		in.rules = append(in.rules, l.end(self, "fib saddr type local ", fr.to[1], s))
	}
	in.rules = append(in.rules, l.end(new(nftables.Program), "", fr.to[0], s))
	if !fr.limited {
		return []chain{in}
	}
	in.name += "-in"
	gate := chain{name: name}
	for _, p := range fr.allow {
		switch {
		case svc.FamilyOf(p.Addr()) != l.family:
		case dataplane.IsOwn(p, fr.key.Addr):
			self := new(nftables.Program).AddressType(0, nftables.Source).Equal(0, nftables.Uint32(nftables.TypeLocal)).
				Network(0, l.Source, l.Len).Equal(0, p.Addr().AsSlice()).Goto(in.name)
			gate.rules = append(gate.rules, nftables.NewRule(self, "fib saddr type local %s saddr %s goto %s", l.Word, p.Addr(), in.name))
		default:
			gate.rules = append(gate.rules, nftables.NewRule(l.InPrefix(l.Source, p).Goto(in.name), "%s saddr %s goto %s", l.Word, p.Masked(),
				in.name))
		}
	}
	gate.rules = append(gate.rules, nftables.NewRule(new(nftables.Program).Goto(chainDrop), "goto %s", chainDrop))
	return []chain{in, gate}
}

// ownName names the chains of one frontend.
func ownName(k dataplane.FrontKey) string {
	if k.Node {
		return "node-" + tables.OwnName(k)
	}
	return tables.OwnName(k)
}

func portBytes(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
