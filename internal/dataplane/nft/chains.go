package nft

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// spec is what a frontend needs of chains. Frontends of equal specs share all
// their chains, except chains of only one frontend (own).
type spec struct {
	node     bool   // the frontend is a node port
	own      string // names chains that belong to only this frontend
	n        [2]int // endpoints for everybody; for clients inside, if split
	split    bool
	drop     bool // without endpoints drop rather than refuse
	masq     dataplane.Masquerading
	affinity uint32 // seconds
	inTurn   bool   // round robin
	// allow are the clients let in, if limited.
	limited bool
	allow   []netip.Prefix
	vip     netip.Addr // the frontend's own address
}

// chainSpec is a chain by name, with its rules for when they are needed.
type chainSpec struct {
	name string
	// own chains have rules that can change without the name changing.
	own   bool
	rules func() []nftables.Rule
}

// chains returns the name of the chain that connections of a frontend enter,
// and the chains needed for that, each after those it leads to.
//
// A chain never changes in what depends on the number of endpoints: another
// number is another chain. The kernel lets a packet that is under way while a
// transaction ends see the old rules of all chains, none of one that is new,
// but the new elements of all maps. So chains are made by a transaction of
// their own before the one in which elements lead to them.
func (l *layout) chains(s *spec, set *dataplane.Settings) (entry string, out []chainSpec) {
	entry, out = l.end(s, 0, out)
	if entry != chainRefuse && entry != chainDrop {
		entry, out = l.masquerade(s.masq, set, entry, out)
	}
	if s.split {
		var inside string
		inside, out = l.end(s, 1, out)
		entry, out = l.split(set, inside, entry, out)
	}
	if s.limited {
		entry, out = l.limit(s, entry, out)
	}
	return entry, out
}

// prefix is how names of chains for a list begin: node ports and clients
// inside have their own maps or slots.
func (s *spec) prefix(list int) string {
	p := ""
	if s.node {
		p = "node-"
	}
	if list == 1 {
		p += "local-"
	}
	return p
}

// end is the chain that chooses an endpoint of a list.
func (l *layout) end(s *spec, list int, out []chainSpec) (string, []chainSpec) {
	n := s.n[list]
	switch {
	case n == 0 && list == 0 && s.drop:
		return chainDrop, out
	case n == 0:
		return chainRefuse, out
	case s.affinity != 0:
		name := fmt.Sprintf("%ssticky-%d-%d", s.prefix(list), s.affinity, n)
		return name, append(out, chainSpec{name: name, rules: func() []nftables.Rule { return l.sticky(s.node, list, n, s.affinity) }})
	case s.inTurn:
		name := fmt.Sprintf("%sturn-%d-%s", s.prefix(list), n, s.own)
		return name, append(out, chainSpec{name: name, rules: func() []nftables.Rule { return []nftables.Rule{l.pick(s.node, list, n)} }})
	}
	name := fmt.Sprintf("%spick-%d", s.prefix(list), n)
	return name, append(out, chainSpec{name: name, rules: func() []nftables.Rule { return []nftables.Rule{l.pick(s.node, list, n)} }})
}

// number loads the slot of the endpoint to take.
func (l *layout) number(p *nftables.Program, to nftables.Reg, list, n int) string {
	kind, word := uint32(nftables.NumberRandom), "random"
	if l.cfg.Balance == dataplane.RoundRobin {
		kind, word = nftables.NumberIncrement, "inc"
	}
	p.Number(to, kind, uint32(n), uint32(list*localList))
	text := fmt.Sprintf("numgen %s mod %d", word, n)
	if list != 0 {
		text += fmt.Sprintf(" offset %d", list*localList)
	}
	return text
}

// pick sends a connection to one of n endpoints.
func (l *layout) pick(node bool, list, n int) nftables.Rule {
	a := l.Regs()
	if node {
		p := new(nftables.Program).Meta(0, nftables.MetaL4Proto).Port(1, nftables.Destination)
		number := l.number(p, 2, list, n)
		p.Map(setNodeEndpoints, 0, 0).DNAT(l.table.Family, 0, a)
		return nftables.NewRule(p, "dnat %s to meta l4proto . th dport . %s map @node-endpoints", l.Word, number)
	}
	p := l.Frontend()
	number := l.number(p, a+2, list, n)
	p.Map(setEndpoints, 0, 0).DNAT(l.table.Family, 0, a)
	return nftables.NewRule(p, "dnat %s to %s . %s map @endpoints", l.Word, l.FrontendText(), number)
}

// sticky sends a connection where the client's last one went, if that endpoint
// still serves the frontend, and renews the time; else to any endpoint, and
// remembers it; else, if the memory is full, to any. A rule that finds nothing,
// or no room, ends by itself.
//
// The registers hold 0, endpoint, frontend, client, in IPv6 all 16 of them:
// frontend and client are the key of the memory, endpoint and frontend that of
// the set of serving endpoints, 0 and endpoint the remembered value. The 0 is for
// nft(8), see services: it takes what it last saw loaded into the registers
// behind it for the endpoint.
func (l *layout) sticky(node bool, list, n int, seconds uint32) []nftables.Rule {
	a, ms := l.Regs(), uint64(seconds)*1000
	ep := nftables.Reg(1)
	front := ep + a + 1
	client := front + a + 2
	memory, endpoints, serving := setSticky, setStickyEndpoints, [2]string{setServing, setLocalServing}[list]
	if node {
		client = front + 2
		memory, endpoints, serving = setNodeSticky, setNodeStickyEndp, [2]string{setNodeServing, setNodeLocServing}[list]
	}
	load := func() *nftables.Program {
		p := new(nftables.Program).Network(ep, l.Destination, l.Len).Port(ep+a, nftables.Destination)
		if !node {
			p.Network(front, l.Destination, l.Len)
		}
		return p.Meta(client-2, nftables.MetaL4Proto).Port(client-1, nftables.Destination)
	}
	toClient := func(p *nftables.Program) *nftables.Program {
		return p.Value(0, nftables.Uint32(0)).Network(client, l.Source, l.Len)
	}
	known := toClient(load()).Map(memory, front, 0).InSet(serving, ep).Value(0, nftables.Uint32(0)).
		Remember(memory, front, 0, ms).DNAT(l.table.Family, ep, ep+a)
	fresh, full := load(), load()
	number := l.number(fresh, client, list, n)
	toClient(fresh.Map(endpoints, front, 0)).Forget(memory, front, 0).
		Remember(memory, front, 0, ms).DNAT(l.table.Family, ep, ep+a)
	l.number(full, client, list, n)
	full.Map(endpoints, front, 0).DNAT(l.table.Family, ep, ep+a)
	return []nftables.Rule{
		commented(known, "a client in @%s whose endpoint is in @%s: there again, renewed for %ds", memory, serving, seconds),
		commented(fresh, "other clients: %s in @%s, kept in @%s for %ds", number, endpoints, memory, seconds),
		commented(full, "@%s is full: %s in @%s", memory, number, endpoints),
	}
}

// masquerade marks connections on their way to another chain.
func (l *layout) masquerade(m dataplane.Masquerading, set *dataplane.Settings, to string, out []chainSpec) (string, []chainSpec) {
	switch m {
	case dataplane.MasqueradeAlways:
		name := "masq-" + to
		return name, append(out, chainSpec{name: name, rules: func() []nftables.Rule {
			return []nftables.Rule{nftables.NewRule(l.mark(new(nftables.Program)).Goto(to), "%s goto %s", l.markText(), to)}
		}})
	case dataplane.MasqueradeOutside:
		name := "cluster-" + to
		return name, append(out, chainSpec{name: name, rules: func() []nftables.Rule {
			rules := l.fromPods(set.Pods, set.PodInterfaces, to)
			return append(rules, nftables.NewRule(l.mark(new(nftables.Program)).Goto(to), "%s goto %s", l.markText(), to))
		}})
	}
	return to, out
}

func (l *layout) fromPods(pods []netip.Prefix, interfaces []table.Interface, to string) []nftables.Rule {
	var rules []nftables.Rule
	for _, i := range interfaces {
		rules = append(rules, nftables.NewRule(nftables.FromInterface(i.Name, i.Prefix).Goto(to), "iifname \"%s\" goto %s", i, to))
	}
	for _, p := range pods {
		rules = append(rules, nftables.NewRule(l.InPrefix(l.Source, p).Goto(to), "%s saddr %s goto %s", l.Word, p, to))
	}
	return rules
}

// split sends clients inside, this node and its pods, one way and all others
// another. This node's own connections are masqueraded: their source may be
// the very address they were sent to, if an interface has it.
func (l *layout) split(set *dataplane.Settings, inside, outside string, out []chainSpec) (string, []chainSpec) {
	name := "inside-" + inside + "-outside-" + outside
	return name, append(out, chainSpec{name: name, rules: func() []nftables.Rule {
		rules := l.fromPods(set.LocalPods, set.PodInterfaces, inside)
		self := new(nftables.Program).AddressType(0, nftables.Source).Equal(0, nftables.Uint32(nftables.TypeLocal))
		return append(rules,
			nftables.NewRule(l.mark(self).Goto(inside), "fib saddr type local %s goto %s", l.markText(), inside),
			nftables.NewRule(new(nftables.Program).Goto(outside), "goto %s", outside))
	}})
}

// limit lets only some clients in. The frontend's own address is only that of a
// client if an interface of this node has it: others forge it.
func (l *layout) limit(s *spec, to string, out []chainSpec) (string, []chainSpec) {
	name := s.prefix(0) + "allow-" + s.own + "-" + to
	return name, append(out, chainSpec{name: name, own: true, rules: func() []nftables.Rule {
		var rules []nftables.Rule
		for _, p := range s.allow {
			switch {
			case svc.FamilyOf(p.Addr()) != l.family:
			case dataplane.IsOwn(p, s.vip):
				self := new(nftables.Program).AddressType(0, nftables.Source).Equal(0, nftables.Uint32(nftables.TypeLocal)).
					Network(0, l.Source, l.Len).Equal(0, p.Addr().AsSlice()).Goto(to)
				rules = append(rules, nftables.NewRule(self, "fib saddr type local %s saddr %s goto %s", l.Word, p.Addr(), to))
			default:
				rules = append(rules, nftables.NewRule(l.InPrefix(l.Source, p).Goto(to), "%s saddr %s goto %s", l.Word, p.Masked(), to))
			}
		}
		return append(rules, nftables.NewRule(new(nftables.Program).Goto(chainDrop), "goto %s", chainDrop))
	}})
}
