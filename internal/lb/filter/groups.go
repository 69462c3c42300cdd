package filter

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// groupTable is the nft table of Groups.
var groupTable = nftables.Table{Family: nftables.Inet, Name: "fairlead-lb-rules"}

// groupPriority is after conntrack, and before any translation: rules are about what clients send.
const groupPriority = -150

// Group is what the rules of a Network Load Balancer let through, as a security group of the nodes in AWS: clients at its
// addresses and node ports, ICMP of path MTU discovery from them, and its health checks (behaviour 141).
type Group struct {
	// Name is that of the balancer. The rules have comments kubernetes.io/rule/nlb/client=NAME, mtu=NAME and health=NAME.
	Name string
	// Clients are the networks of clients, all without any.
	Clients []netip.Prefix
	// Listeners are its ports at its addresses.
	Listeners []Listener
	// PathMTU are its IPv4 addresses that no Service without rules shares: ICMP has no port.
	PathMTU []netip.Addr
	// NodePorts are for Clients and the Nodes, and HealthPorts, which are TCP ports, only for the Nodes.
	NodePorts   []NodePort
	HealthPorts []uint16
}

// NodePort is a port at all addresses of the node.
type NodePort struct {
	Protocol svc.Protocol
	Port     uint16
}

// Groups writes the table of Groups. Its methods are called one at a time.
type Groups struct {
	changed func()
	conn    *nftables.Conn
	damaged atomic.Bool
	known   bool // groups and nodes are what the table has
	groups  []Group
	nodes   map[span]bool
}

// NewGroups returns Groups that do nothing before Set. changed is as that of New.
func NewGroups(changed func()) *Groups { return &Groups{changed: changed} }

// Set makes the rules of groups, which are sorted and are not changed afterwards, and no others, in one transaction. Health
// checks, and connections to node ports, come from nodes; without any HealthPorts are for all, and NodePorts for Clients. Of
// nodes only what has changed is written. Without groups there is no table. Connections that are open go on.
func (g *Groups) Set(nodes []netip.Prefix, groups []Group) error {
	spans := spansOf(nodes)
	damaged := g.damaged.Swap(false)
	known := g.known && !damaged && reflect.DeepEqual(groups, g.groups) && (len(spans) == 0) == (len(g.nodes) == 0)
	if known && maps.Equal(spans, g.nodes) {
		return nil
	}
	g.known = false
	if len(groups) == 0 && g.conn == nil {
		err := nftables.RemoveTable(groupTable)
		g.known, g.groups, g.nodes = err == nil, groups, spans
		return err
	}
	if g.conn == nil {
		conn, err := dial(groupTable, &g.damaged, g.changed)
		if err != nil {
			return err
		}
		g.conn = conn
	}
	var err error
	if known {
		err = g.conn.Commit(nodesChange(g.nodes, spans))
	}
	if !known || nftables.IsConflict(err) {
		err = g.conn.Commit(groupRules(spans, groups))
	}
	if err != nil {
		return fmt.Errorf("write nft table %s: %w", groupTable, err)
	}
	g.known, g.groups, g.nodes = true, groups, spans
	return nil
}

// Close leaves the table as it is.
func (g *Groups) Close() error {
	if g.conn == nil {
		return nil
	}
	return g.conn.Close()
}

const (
	groupChain = "from-clients"
	nodePorts  = "node-ports"
)

// icmpTooBig is type and code of "fragmentation needed and DF set" (RFC 792).
var icmpTooBig = []byte{3, 4}

// groupRules returns the transaction that makes the table, in place of any other.
func groupRules(nodes map[span]bool, groups []Group) *nftables.Batch {
	b := nftables.NewBatch()
	const comment = "fairlead: rules of Network Load Balancers"
	if len(groups) == 0 {
		b.AddTable(groupTable, comment) // so that deleting cannot fail
		b.DelTable(groupTable)
		return b
	}
	b.ReplaceTable(groupTable, comment)
	b.AddChain(groupTable, nftables.Chain{Name: groupChain,
		Hook: &nftables.Hook{Type: "filter", Number: nftables.Prerouting, Priority: groupPriority}})
	verdict := []nftables.Type{nftables.TypeVerdict}
	for _, f := range families {
		b.AddSet(groupTable, nftables.Set{Name: f.listeners(), Key: []nftables.Type{f.addr, nftables.TypeProto, nftables.TypePort},
			Data: verdict, Comment: "listeners of load balancers"})
		b.AddSet(groupTable, nftables.Set{Name: f.nodes(), Key: []nftables.Type{f.addr}, Interval: true, Comment: "Nodes and their Pods"})
	}
	v4 := families[0]
	b.AddSet(groupTable, nftables.Set{Name: v4.addresses(), Key: []nftables.Type{v4.addr}, Data: verdict, Comment: "path MTU discovery"})
	b.AddSet(groupTable, nftables.Set{Name: nodePorts, Key: []nftables.Type{nftables.TypeProto, nftables.TypePort}, Data: verdict,
		Comment: "node ports of load balancers"})
	spans(b.AddRange, nodes)
	dispatch(b)
	w := groupWriter{b: b, checked: len(nodes) > 0, taken: map[string]bool{}, mtu: map[netip.Addr][]*Group{}}
	for i := range groups {
		w.group(i, &groups[i])
	}
	w.pathMTU()
	return b
}

// dispatch writes which packets are looked up: packets that open connections, and ICMP errors of routers.
func dispatch(b *nftables.Batch) {
	rule := func(p *nftables.Program) { b.AddRule(groupTable, groupChain, nftables.Rule{Exprs: p.Bytes()}) }
	v4 := families[0]
	rule(new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{v4.proto}).Meta(0, nftables.MetaL4Proto).
		Equal(0, []byte{v4.icmp}).Port(0, nftables.Source).Equal(0, icmpTooBig). // the first two bytes of the header
		Network(0, v4.at, v4.n).VerdictMap(v4.addresses(), 0))
	rule(new(nftables.Program).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{byte(svc.TCP)}).TCPFlags(0).
		Mask(0, []byte{nftables.TCPSyn | nftables.TCPAck}, []byte{0}).NotEqual(0, []byte{nftables.TCPSyn}).Return())
	for _, f := range families {
		proto := nftables.Reg(f.n / 4)
		rule(new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(0, f.at, f.n).
			Meta(proto, nftables.MetaL4Proto).Port(proto+1, nftables.Destination).VerdictMap(f.listeners(), 0))
	}
	rule(new(nftables.Program).AddressType(0, nftables.Destination).Equal(0, nftables.Uint32(nftables.TypeLocal)).
		Meta(0, nftables.MetaL4Proto).Port(1, nftables.Destination).VerdictMap(nodePorts, 0))
}

// groupWriter writes the chains of groups, and what leads there.
type groupWriter struct {
	b       *nftables.Batch
	checked bool            // nodes are known, from which health checks come
	taken   map[string]bool // elements that are there: of two Services the first counts
	mtu     map[netip.Addr][]*Group
}

func (w *groupWriter) element(set string, key []byte, chain string) {
	if id := set + string(key); !w.taken[id] {
		w.taken[id] = true
		w.b.AddElem(groupTable, set, &nftables.Elem{Key: key, Goto: chain})
	}
}

func (w *groupWriter) group(i int, g *Group) {
	client := allow{from: g.Clients, what: "client=" + g.Name}
	health := allow{nodes: true, what: "health=" + g.Name}
	listeners, nodes, checks := fmt.Sprintf("listeners-%d", i), fmt.Sprintf("node-ports-%d", i), fmt.Sprintf("health-%d", i)
	w.chain(listeners, client)
	for _, l := range g.Listeners {
		w.element(familyOf(l.At.Addr()).listeners(), l.key(), listeners)
	}
	for _, a := range g.PathMTU {
		w.mtu[a] = append(w.mtu[a], g)
	}
	if w.checked {
		w.chain(nodes, client, health)
	} else {
		w.chain(nodes, client)
	}
	for _, p := range g.NodePorts {
		w.element(nodePorts, portKey(p.Protocol, p.Port), nodes)
	}
	if !w.checked || len(g.HealthPorts) == 0 {
		return
	}
	w.chain(checks, health)
	for _, p := range g.HealthPorts {
		w.element(nodePorts, portKey(svc.TCP, p), checks)
	}
}

// pathMTU writes the rules for addresses, which several Services may share.
func (w *groupWriter) pathMTU() {
	n := 0
	for a, groups := range w.mtu {
		var rules []allow
		for _, g := range groups {
			rules = append(rules, allow{from: g.Clients, what: "mtu=" + g.Name})
		}
		chain := fmt.Sprintf("path-mtu-%d", n)
		n++
		w.chain(chain, rules...)
		w.element(families[0].addresses(), a.AsSlice(), chain)
	}
}

// allow lets networks pass, all without any, or nodes.
type allow struct {
	from  []netip.Prefix
	nodes bool
	what  string
}

// chain makes a chain that drops what no rule lets pass.
func (w *groupWriter) chain(name string, rules ...allow) {
	w.b.AddChain(groupTable, nftables.Chain{Name: name})
	for _, r := range rules {
		rule := func(p *nftables.Program) {
			w.b.AddRule(groupTable, name,
				nftables.Rule{Text: "kubernetes.io/rule/nlb/" + r.what, Comment: true, Exprs: p.Return().Bytes()})
		}
		if r.nodes {
			for _, f := range families {
				rule(source(f).InSet(f.nodes(), 0))
			}
			continue
		}
		if len(r.from) == 0 {
			rule(new(nftables.Program))
		}
		for _, p := range r.from {
			rule(from(p))
		}
	}
	w.b.AddRule(groupTable, name, nftables.Rule{Exprs: new(nftables.Program).Drop().Bytes()})
}

// from matches packets of a network.
func from(p netip.Prefix) *nftables.Program {
	f := familyOf(p.Addr())
	mask := make([]byte, f.n)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return source(f).Mask(0, mask, make([]byte, f.n)).Equal(0, p.Masked().Addr().AsSlice())
}

// source loads where packets of a family come from.
func source(f family) *nftables.Program {
	return new(nftables.Program).Meta(0, nftables.MetaNFProto).Equal(0, []byte{f.proto}).Network(0, f.at-f.n, f.n)
}

// portKey is a protocol and a port, as registers have them.
func portKey(p svc.Protocol, port uint16) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{byte(p), 0, 0, 0}, port), 0, 0)
}

// key is the element of a listener.
func (l Listener) key() []byte {
	return append(l.At.Addr().AsSlice(), portKey(l.Protocol, l.At.Port())...)
}
