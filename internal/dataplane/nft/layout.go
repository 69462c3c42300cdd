package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// mode is this mode's name.
	mode = "nft"
	// tableName is the name of our table in both families.
	tableName = "fairlead"
	// schema is the comment of the table. Whatever carries another one is not
	// understood here and replaced as a whole.
	schema = "fairlead service proxy, layout 2; changes by hand are undone"
)

// The names of sets and maps. README.md describes each.
const (
	setVIPs            = "vips"
	setNodePorts       = "node-ports"
	setTargets         = "targets"
	setEndpoints       = "endpoints"
	setNodeEndpoints   = "node-endpoints"
	setStickyEndpoints = "sticky-endpoints"
	setNodeStickyEndp  = "node-sticky-endpoints"
	setServing         = "serving"
	setLocalServing    = "local-serving"
	setNodeServing     = "node-serving"
	setNodeLocServing  = "node-local-serving"
	setSticky          = "sticky"
	setNodeSticky      = "node-sticky"
	setLocalEndpoints  = "local-endpoints"
	setNodeAddresses   = "node-addresses"
	setClusterIPs      = "cluster-ips"
)

// The names of the chains that are always there.
const (
	chainPrerouting  = "prerouting"
	chainOutput      = "output"
	chainPostrouting = "postrouting"
	chainForward     = "forward"
	chainLoopback    = "loopback"
	chainServices    = "services"
	chainUnserved    = "unserved"
	chainServedIn    = "served-here"
	chainServedOut   = "served-elsewhere"
	chainRefuse      = "refuse"
	chainDrop        = "discard"
)

// The keys of map targets that are always there. Chain pick-N has the key N;
// other chains get keys from idFirstFree to idLast.
const (
	idRefuse    = 0
	idDrop      = 0xffffffff
	idFirstFree = 0x10000
	idLast      = idDrop - 1
)

// The priorities of netfilter hooks: nf_ip_hook_priorities.
const (
	priorityDstNAT = -100
	prioritySrcNAT = 100
	// priorityServed is before every chain that may translate a source: the first one that does is the last that the kernel
	// asks for the connection.
	priorityServed = 90
	priorityFilter = 0
	priorityRaw    = -300
)

const (
	// stickySize bounds the remembered clients, for virtual IPs and for node
	// ports: a flood of forged sources must not fill the machine's memory. When
	// it is full, new clients do not stick.
	stickySize = 1 << 20
	// localList is added to the slots of endpoints for LocalClients.
	localList = 1 << 16
)

// layout is what differs between the two families.
type layout struct {
	nftables.Header
	table  nftables.Table
	family svc.Family
	cfg    *Config
}

func newLayout(f svc.Family, cfg *Config) *layout {
	t := nftables.Table{Family: nftables.FamilyOf(f), Name: tableName}
	return &layout{Header: nftables.HeaderOf(f), table: t, family: f, cfg: cfg}
}

// sets are the sets and maps of the table.
func (l *layout) sets() []nftables.Set {
	const (
		proto = nftables.TypeProto
		port  = nftables.TypePort
		mark  = nftables.TypeMark
	)
	a := l.Addr
	type ts = []nftables.Type
	own := []nftables.Set{
		{Name: setVIPs, Key: ts{a, proto, port}, Data: ts{mark, mark},
			Comment: "frontend : number of endpoints (upper half: for clients inside) . key of targets"},
		{Name: setNodePorts, Key: ts{proto, port}, Data: ts{mark, mark},
			Comment: "node port : number of endpoints (upper half: for clients inside) . key of targets"},
		{Name: setTargets, Key: ts{mark}, Data: ts{nftables.TypeVerdict}, Comment: "what happens to a connection"},
		{Name: setEndpoints, Key: ts{a, proto, port, mark}, Data: ts{a, port}, Comment: "frontend . slot : endpoint"},
		{Name: setNodeEndpoints, Key: ts{proto, port, mark}, Data: ts{a, port}, Comment: "node port . slot : endpoint"},
		{Name: setStickyEndpoints, Key: ts{a, proto, port, mark}, Data: ts{mark, a, port},
			Comment: "frontend with affinity . slot : 0 . endpoint"},
		{Name: setNodeStickyEndp, Key: ts{proto, port, mark}, Data: ts{mark, a, port}, Comment: "node port with affinity . slot : 0 . endpoint"},
		{Name: setServing, Key: ts{a, port, a, proto, port}, Comment: "endpoint . frontend with affinity"},
		{Name: setLocalServing, Key: ts{a, port, a, proto, port}, Comment: "endpoint . frontend with affinity, for clients inside"},
		{Name: setNodeServing, Key: ts{a, port, proto, port}, Comment: "endpoint . node port with affinity"},
		{Name: setNodeLocServing, Key: ts{a, port, proto, port}, Comment: "endpoint . node port with affinity, for clients inside"},
		{Name: setSticky, Key: ts{a, proto, port, a}, Data: ts{mark, a, port}, Dynamic: true, Size: stickySize,
			Comment: "frontend . client : 0 . endpoint"},
		{Name: setNodeSticky, Key: ts{proto, port, a}, Data: ts{mark, a, port}, Dynamic: true, Size: stickySize,
			Comment: "node port . client : 0 . endpoint"},
		{Name: setLocalEndpoints, Key: ts{a, a}, Comment: "endpoints on this node, twice"},
		{Name: setNodeAddresses, Key: ts{a}, Comment: "where node ports answer"},
		{Name: setClusterIPs, Key: ts{a}, Comment: "addresses whose other ports are refused"},
	}
	return slices.Concat(own, servedSets(l), drops.Sets(&l.Header))
}

// chain is a chain with its rules.
type chain struct {
	name  string
	hook  *nftables.Hook
	rules []nftables.Rule
}

// base are the chains that are always there, each after those it leads to.
func (l *layout) base(set *dataplane.Settings) []chain {
	nat := func(n uint32, priority int32) *nftables.Hook {
		return &nftables.Hook{Type: "nat", Number: n, Priority: priority}
	}
	// Twice: a packet that looks up a frontend before a transaction and its
	// endpoint after it may find nothing, and comes back here. The second time
	// all it sees is new, unless there was another transaction: see unserved.
	// (Before Linux 6.17 even one lookup could miss an element that is just
	// replaced.)
	toServices := []nftables.Rule{
		nftables.NewRule(new(nftables.Program).Jump(chainServices), "jump services"),
		nftables.NewRule(new(nftables.Program).Jump(chainServices), "jump services"),
		nftables.NewRule(new(nftables.Program).Jump(chainUnserved), "jump unserved"),
	}
	out := []chain{
		{name: chainRefuse, rules: drops.Rules(&l.Header, drops.Rejected, l.cfg.LogLost)},
		{name: chainDrop, rules: drops.Rules(&l.Header, drops.Dropped, l.cfg.LogLost)},
		{name: chainServices, rules: l.services()},
		{name: chainUnserved, rules: l.unserved(set.Services)},
		{name: chainPrerouting, hook: nat(nftables.Prerouting, priorityDstNAT), rules: toServices},
		{name: chainOutput, hook: nat(nftables.Output, priorityDstNAT), rules: toServices},
		{name: chainServedIn, hook: nat(nftables.Input, priorityServed), rules: l.counting()},
		{name: chainServedOut, hook: nat(nftables.Postrouting, priorityServed), rules: l.counting()},
		{name: chainPostrouting, hook: nat(nftables.Postrouting, prioritySrcNAT), rules: l.postrouting(set.Localhost)},
	}
	if l.cfg.DropInvalid {
		out = append(out, chain{
			name:  chainForward,
			hook:  &nftables.Hook{Type: "filter", Number: nftables.Forward, Priority: priorityFilter},
			rules: l.forward(),
		})
	}
	if set.Guard {
		out = append(out, chain{
			name:  chainLoopback,
			hook:  &nftables.Hook{Type: "filter", Number: nftables.Prerouting, Priority: priorityRaw},
			rules: l.loopback(),
		})
	}
	return out
}

// commented is a rule whose text nft(8) shows as its comment.
func commented(p *nftables.Program, text string, args ...any) nftables.Rule {
	r := nftables.NewRule(p, text, args...)
	r.Comment = true
	return r
}

// services finds what a new connection is for. Both NAT hooks lead here, so
// packets of known connections never do.
//
// What a frontend does is found in two steps, from the frontend to a number,
// and from the number to a chain: the kernel walks through all elements of a
// verdict map on every change of one (1.4 ms at 10,000, 12 ms at 50,000
// elements on Linux 6.18; a number is changed in 6 µs).
//
// nft(8) up to 1.0.6 at least ends with a failed assertion when it prints a
// lookup of what another lookup found. The number is therefore the second of
// two words found, where it covers the register of the port: nft(8) believes
// that it is still the port that is looked up, and the comment tells the truth.
func (l *layout) services() []nftables.Rule {
	a := l.Regs()
	vip := l.Frontend().Map(setVIPs, 0, a).VerdictMap(setTargets, a+1)
	node := new(nftables.Program).Network(0, l.Destination, l.Len).InSet(setNodeAddresses, 0).
		Meta(a, nftables.MetaL4Proto).Port(a+1, nftables.Destination).Map(setNodePorts, a, a).VerdictMap(setTargets, a+1)
	return []nftables.Rule{
		commented(vip, "target is the second part of: %s map @vips", l.FrontendText()),
		commented(node, "target is the second part of: meta l4proto . th dport map @node-ports"),
	}
}

// unserved is for packets to the addresses of Services, but to none of
// their ports: it must not leave this node.
//
// A frontend that is there, but led nowhere, has changed twice while the packet
// was under way. Its client sends once more; a refusal would be final.
func (l *layout) unserved(services []netip.Prefix) []nftables.Rule {
	a := l.Regs()
	vip := l.Frontend().Map(setVIPs, 0, a).Goto(chainDrop)
	node := new(nftables.Program).Network(0, l.Destination, l.Len).InSet(setNodeAddresses, 0).
		Meta(a, nftables.MetaL4Proto).Port(a+1, nftables.Destination).Map(setNodePorts, a, a).Goto(chainDrop)
	other := new(nftables.Program).Network(0, l.Destination, l.Len).InSet(setClusterIPs, 0).Goto(chainRefuse)
	rules := []nftables.Rule{
		commented(vip, "%s in @vips: goto discard, the client will send again", l.FrontendText()),
		commented(node, "meta l4proto . th dport in @node-ports: goto discard, the client will send again"),
		nftables.NewRule(other, "%s daddr @cluster-ips goto refuse", l.Word),
	}
	for _, p := range services {
		if l.cfg.LogLost {
			rules = append(rules, drops.Log(l.InPrefix(l.Destination, p), fmt.Sprintf("%s daddr %s ", l.Word, p), drops.Dropped))
		}
		rules = append(rules, nftables.NewRule(l.InPrefix(l.Destination, p).Drop(), "%s daddr %s drop", l.Word, p))
	}
	return rules
}

// bit is the mark of connections to masquerade.
func (l *layout) bit() uint32 { return 1 << l.cfg.MasqueradeBit }

// mark sets the mark of connections to masquerade on the packet.
func (l *layout) mark(p *nftables.Program) *nftables.Program {
	return p.Meta(0, nftables.MetaMark).
		Mask(0, nftables.Uint32(^l.bit()), nftables.Uint32(l.bit())).SetMark(0)
}

func (l *layout) markText() string { return fmt.Sprintf("meta mark set meta mark | %#x", l.bit()) }

// loopbackIndex is the interface number of lo in every network namespace.
const loopbackIndex = 1

// postrouting masquerades an endpoint that was sent to itself, and what is
// marked. On lo a connection to itself is no hairpin but two sockets of this
// node. With localhost, what left 127.0.0.0/8 for an endpoint elsewhere gets an
// address that can be answered.
func (l *layout) postrouting(localhost bool) []nftables.Rule {
	hairpin := new(nftables.Program).Meta(0, nftables.MetaOif).NotEqual(0, nftables.Uint32(loopbackIndex)).
		Network(0, l.Source, l.Len).Network(l.Regs(), l.Destination, l.Len).InSet(setLocalEndpoints, 0).Masquerade()
	unmarked := new(nftables.Program).Meta(0, nftables.MetaMark).
		Mask(0, nftables.Uint32(l.bit()), nftables.Uint32(0)).Equal(0, nftables.Uint32(0)).Return()
	clear := new(nftables.Program).Meta(0, nftables.MetaMark).
		Mask(0, nftables.Uint32(^uint32(0)), nftables.Uint32(l.bit())).SetMark(0)
	var rules []nftables.Rule
	if localhost {
		p := new(nftables.Program).Meta(0, nftables.MetaOif).NotEqual(0, nftables.Uint32(loopbackIndex)).
			Network(0, l.Source, 1).Equal(0, []byte{127}).
			Conntrack(0, nftables.CtStatus).Mask(0, nftables.Uint32(nftables.CtStatusDNAT), nftables.Uint32(0)).
			NotEqual(0, nftables.Uint32(0)).Masquerade()
		rules = append(rules, nftables.NewRule(p, "oif != lo ip saddr 127.0.0.0/8 ct status dnat masquerade fully-random"))
	}
	return append(rules,
		nftables.NewRule(hairpin, "oif != lo %s saddr . %s daddr @local-endpoints masquerade fully-random", l.Word, l.Word),
		nftables.NewRule(unmarked, "meta mark & %#x == 0 return", l.bit()),
		nftables.NewRule(clear, "meta mark set meta mark ^ %#x", l.bit()),
		nftables.NewRule(new(nftables.Program).Masquerade(), "masquerade fully-random"))
}

// forward drops what an endpoint of this node sends outside of any connection
// that is known: it would arrive untranslated, and the client would answer the
// unknown peer with a reset (kubernetes/kubernetes#74839). Other machines' packets
// are not looked at.
func (l *layout) forward() []nftables.Rule {
	p := new(nftables.Program).Conntrack(0, nftables.CtState).
		Mask(0, nftables.Uint32(nftables.CtStateInvalid), nftables.Uint32(0)).NotEqual(0, nftables.Uint32(0)).
		Network(0, l.Source, l.Len).Network(l.Regs(), l.Source, l.Len).InSet(setLocalEndpoints, 0).Drop()
	return []nftables.Rule{nftables.NewRule(p, "ct state invalid %s saddr . %s saddr @local-endpoints drop", l.Word, l.Word)}
}

// loopback keeps other machines from the node's own 127.0.0.0/8, which
// route_localnet would open to them (kubernetes/kubernetes#90259). Before
// connection tracking a packet still has the destination it came with.
func (l *layout) loopback() []nftables.Rule {
	p := new(nftables.Program).Meta(0, nftables.MetaIif).NotEqual(0, nftables.Uint32(loopbackIndex)).
		Network(0, l.Destination, 1).Equal(0, []byte{127}).Drop()
	return []nftables.Rule{nftables.NewRule(p, "iif != lo ip daddr 127.0.0.0/8 drop")}
}
