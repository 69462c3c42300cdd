package userspace

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/plane"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// tableName is the name of our table in both families.
	tableName = "fairlead-userspace"
	// schema is the comment of the table. Whatever carries another one is
	// replaced as a whole.
	schema = "fairlead userspace proxy, layout 1; changes by hand are undone"
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
)

// priorityDstNAT is NF_IP_PRI_NAT_DST.
const priorityDstNAT = -100

// layout is what differs between the two families.
type layout struct {
	table  nftables.Table
	family svc.Family
	addr   nftables.Type
	alen   uint32 // bytes of an address
	saddr  uint32 // offset of the source address in the header
	daddr  uint32
	word   string // "ip" or "ip6", in rule texts
	cidrs  []netip.Prefix
}

func newLayout(f svc.Family, cidrs []netip.Prefix) *layout {
	l := &layout{
		table:  nftables.Table{Family: nftables.FamilyOf(f), Name: tableName},
		family: f, addr: nftables.TypeIPv4, alen: 4, saddr: 12, daddr: 16, cidrs: cidrs,
	}
	if f == svc.IPv6 {
		l.addr, l.alen, l.saddr, l.daddr = nftables.TypeIPv6, 16, 8, 24
	}
	l.word = l.table.Family.String()
	return l
}

// regs is how many registers an address fills.
func (l *layout) regs() nftables.Reg { return nftables.Reg(l.alen / 4) }

// portReg is where the rules keep a proxy port, behind whatever they look up.
const portReg nftables.Reg = 8

// sets are the sets and maps of the table.
func (l *layout) sets() []nftables.Set {
	const (
		proto = nftables.TypeProto
		port  = nftables.TypePort
	)
	a := l.addr
	type ts = []nftables.Type
	return []nftables.Set{
		{Name: setVIPs, Key: ts{a, proto, port}, Data: ts{port}, Comment: "frontend : port of the proxy"},
		{Name: setNodePorts, Key: ts{proto, port}, Data: ts{port}, Comment: "node port : port of the proxy"},
		{Name: setOtherVIPs, Key: ts{a, proto, port}, Data: ts{nftables.TypeVerdict}, Comment: "frontends with conditions, or without endpoints"},
		{Name: setOtherNode, Key: ts{proto, port}, Data: ts{nftables.TypeVerdict}, Comment: "node ports with conditions, or without endpoints"},
		{Name: setNodeAddresses, Key: ts{a}, Comment: "where node ports answer"},
		{Name: setClusterIPs, Key: ts{a}, Comment: "addresses whose other ports are refused"},
		{Name: setProxyPorts, Key: ts{proto, port}, Comment: "ports of the proxy, for captured connections only"},
	}
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

func rule(p *nftables.Program, text string, args ...any) nftables.Rule {
	return nftables.Rule{Text: fmt.Sprintf(text, args...), Exprs: p.Bytes()}
}

// base are the chains that are always there, each after those it leads to.
func (l *layout) base(s *plane.Settings) []chain {
	nat := func(n uint32) *nftables.Hook {
		return &nftables.Hook{Type: "nat", Number: n, Priority: priorityDstNAT}
	}
	// Twice: a packet that is under way while a transaction ends can miss a
	// frontend that moves from one map to another.
	way := []nftables.Rule{
		rule(new(nftables.Program).Jump(chainServices), "jump services"),
		rule(new(nftables.Program).Jump(chainServices), "jump services"),
		rule(new(nftables.Program).Jump(chainUnserved), "jump unserved"),
	}
	return []chain{
		{name: chainRefuse, rules: l.refuse()},
		{name: chainServices, rules: l.services(s)},
		{name: chainUnserved, rules: l.unserved()},
		{name: chainPrerouting, hook: nat(nftables.Prerouting), rules: way},
		{name: chainOutput, hook: nat(nftables.Output), rules: way},
	}
}

// capture sends the connection to the port in portReg of this node: of an
// address of the node, since an interface that it came in by may have none, as
// pods' often have not, and a redirect would drop it.
func (l *layout) capture(p *nftables.Program, s *plane.Settings) (*nftables.Program, string) {
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
func (l *layout) services(s *plane.Settings) []nftables.Rule {
	a := l.regs()
	vip := func() *nftables.Program {
		return new(nftables.Program).Network(0, l.daddr, l.alen).Meta(a, nftables.MetaL4Proto).DestinationPort(a + 1)
	}
	node := func() *nftables.Program {
		return new(nftables.Program).Network(0, l.daddr, l.alen).InSet(setNodeAddresses, 0).
			Meta(a, nftables.MetaL4Proto).DestinationPort(a + 1)
	}
	toVIP, text := l.capture(vip().Map(setVIPs, 0, portReg), s)
	toNode, _ := l.capture(node().Map(setNodePorts, a, portReg), s)
	return []nftables.Rule{
		rule(toVIP, "%s:%s daddr . meta l4proto . th dport map @vips", text, l.word),
		rule(vip().VerdictMap(setOtherVIPs, 0), "%s daddr . meta l4proto . th dport vmap @other-vips", l.word),
		rule(toNode, "%s daddr @node-addresses %s:meta l4proto . th dport map @node-ports", l.word, text),
		rule(node().VerdictMap(setOtherNode, a), "%s daddr @node-addresses meta l4proto . th dport vmap @other-node-ports", l.word),
	}
}

// unserved is for what is sent to the addresses of Services, but to none of
// their ports, and for what is sent to a port of the proxy without having been
// captured: it would evade source ranges.
func (l *layout) unserved() []nftables.Rule {
	other := new(nftables.Program).Network(0, l.daddr, l.alen).InSet(setClusterIPs, 0).Goto(chainRefuse)
	direct := new(nftables.Program).DestinationType(0).Equal(0, nftables.Uint32(nftables.TypeLocal)).
		Meta(0, nftables.MetaL4Proto).DestinationPort(1).InSet(setProxyPorts, 0).Goto(chainRefuse)
	rules := []nftables.Rule{
		rule(other, "%s daddr @cluster-ips goto refuse", l.word),
		rule(direct, "fib daddr type local meta l4proto . th dport @proxy-ports goto refuse"),
	}
	for _, p := range l.cidrs {
		if svc.FamilyOf(p.Addr()) == l.family {
			rules = append(rules, rule(l.inPrefix(l.daddr, p).Drop(), "%s daddr %s drop", l.word, p.Masked()))
		}
	}
	return rules
}

// inPrefix begins a rule for packets whose address at an offset of the header
// lies in p.
func (l *layout) inPrefix(offset uint32, p netip.Prefix) *nftables.Program {
	prog := new(nftables.Program).Network(0, offset, l.alen)
	if !p.IsSingleIP() {
		prog.Mask(0, nftables.PrefixMask(p), make([]byte, l.alen))
	}
	return prog.Equal(0, p.Masked().Addr().AsSlice())
}

// refuse answers that there is nobody. nf_tables takes reject in a NAT chain,
// since Linux 5.9 in prerouting too.
func (l *layout) refuse() []nftables.Rule {
	return []nftables.Rule{
		rule(new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(svc.TCP)}).RejectTCP(), "meta l4proto tcp reject with tcp reset"),
		rule(new(nftables.Program).RejectPort(l.table.Family), "reject"),
	}
}

// end is the rule that ends a chain where a connection is to go: to a port of
// the proxy, or refused, or dropped.
func (l *layout) end(p *nftables.Program, when string, to dest, s *plane.Settings) nftables.Rule {
	switch {
	case to.port != 0:
		p, text := l.capture(p.Value(portReg, binary.BigEndian.AppendUint16(nil, to.port)), s)
		return rule(p, "%s%s:%d", when, text, to.port)
	case to.drop:
		return rule(p.Drop(), "%sdrop", when)
	}
	return rule(p.Goto(chainRefuse), "%sgoto refuse", when)
}

// dest is where a connection goes: to a port of the proxy, or nowhere.
type dest struct {
	port uint16
	drop bool // without a port: drop rather than refuse
}

// conditions are the chains of a frontend that treats clients differently, the
// one entered last. Its clients are this node, pods, and all others.
func (l *layout) conditions(fr *front, s *plane.Settings) []chain {
	name := ownName(fr.key)
	in := chain{name: name}
	if fr.split {
		for _, p := range s.Pods {
			in.rules = append(in.rules, l.end(l.inPrefix(l.saddr, p), fmt.Sprintf("%s saddr %s ", l.word, p), fr.to[1], s))
		}
		self := new(nftables.Program).SourceType(0).Equal(0, nftables.Uint32(nftables.TypeLocal))
		in.rules = append(in.rules, l.end(self, "fib saddr type local ", fr.to[1], s))
	}
	in.rules = append(in.rules, l.end(new(nftables.Program), "", fr.to[0], s))
	if !fr.limited {
		return []chain{in}
	}
	in.name += "-in"
	gate := chain{name: name}
	for _, p := range fr.allow {
		if svc.FamilyOf(p.Addr()) == l.family {
			gate.rules = append(gate.rules, rule(l.inPrefix(l.saddr, p).Goto(in.name), "%s saddr %s goto %s", l.word, p.Masked(), in.name))
		}
	}
	gate.rules = append(gate.rules, rule(new(nftables.Program).Drop(), "drop"))
	return []chain{in, gate}
}

// ownName names the chains of one frontend. Chain names have no colons.
func ownName(k plane.FrontKey) string {
	name := fmt.Sprintf("%s-%d", strings.ToLower(k.Proto.String()), k.Port)
	if k.Node {
		return "node-" + name
	}
	return name + "-" + strings.ReplaceAll(k.Addr.String(), ":", ".")
}

// key is a concatenation as the kernel has it: each part fills whole words.
func key(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return out
}

func portBytes(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

// frontKey is the key of a frontend in its map.
func frontKey(k plane.FrontKey) []byte {
	if k.Node {
		return key([]byte{byte(k.Proto)}, portBytes(k.Port))
	}
	return key(k.Addr.AsSlice(), []byte{byte(k.Proto)}, portBytes(k.Port))
}

// parseFront reads the key of an element of setVIPs or setNodePorts.
func (l *layout) parseFront(set string, b []byte) (plane.FrontKey, bool) {
	var k plane.FrontKey
	if set == setNodePorts {
		k.Node = true
	} else {
		if len(b) < int(l.alen) {
			return k, false
		}
		k.Addr, _ = netip.AddrFromSlice(b[:l.alen])
		b = b[l.alen:]
	}
	if len(b) != 8 {
		return k, false
	}
	k.Proto, k.Port = svc.Protocol(b[0]), binary.BigEndian.Uint16(b[4:])
	return k, true
}
