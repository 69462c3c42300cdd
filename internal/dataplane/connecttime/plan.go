package connecttime

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// front is the content of the maps for one frontend, present or desired.
type front struct {
	lists      [2]list // the second one only if split
	split      bool
	masquerade connect.Masquerade
}

// list has endpoints by slot, and the ones that are Pods of this node, sorted.
type list struct {
	id        uint32 // 0: not installed
	endpoints packed
	own       []netip.Addr
	// members are all endpoints that may keep a socket that sends datagrams to them, sorted; of UDP.
	members packed
}

func (l *list) same(o *list) bool {
	return l.endpoints == o.endpoints && slices.Equal(l.own, o.own) && l.members == o.members
}

// same reports whether two fronts differ in nothing but the numbers of their lists.
func (f *front) same(o *front) bool {
	return f.split == o.split && f.masquerade == o.masquerade && f.lists[0].same(&o.lists[0]) && f.lists[1].same(&o.lists[1])
}

// planned returns what the programs do with a frontend, nil for what they leave to the rules: where a connection's way depends on
// more than who the client is, or there is no endpoint, whose refusal is theirs. A DNS server on the node itself, of 'fairlead agent' or
// NodeLocal DNSCache, answers at the address of the Service before they see the packet.
func planned(set *dataplane.Settings, p *table.ServicePort, f *table.Frontend) *front {
	switch {
	case p == nil, p.Protocol == svc.SCTP, p.Affinity != 0, f.SourceRanges != nil, f.Addr.Port() == svc.DNSPort:
		return nil
	}
	out := &front{split: f.LocalClients != nil, masquerade: masquerade(set, f)}
	if f.Hops == nil { // else nft divides other clients between nodes
		out.lists[0] = listOf(f.Endpoints)
	}
	if out.split {
		out.lists[1] = listOf(f.LocalClients)
	}
	if out.lists[0].endpoints == "" && out.lists[1].endpoints == "" {
		return nil
	}
	if p.Protocol == svc.UDP {
		members := pack(membersOf(p.Serving, f.Endpoints, f.LocalClients))
		for i := range out.lists {
			if out.lists[i].endpoints != "" {
				out.lists[i].members = members
			}
		}
	}
	return out
}

// serving returns the endpoints of a frontend that may keep their flows, sorted.
func serving(p *table.ServicePort, f *table.Frontend) []netip.AddrPort {
	if p == nil || f == nil {
		return nil
	}
	return membersOf(p.Serving, f.Endpoints, f.LocalClients)
}

// membersOf returns the endpoints that a flow of datagrams may keep: the ones that serve, also where others are preferred now.
func membersOf(all ...[]table.Endpoint) (out []netip.AddrPort) {
	for _, list := range all {
		for _, e := range list {
			out = append(out, e.Addr)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

func masquerade(set *dataplane.Settings, f *table.Frontend) connect.Masquerade {
	return connect.Masquerade(dataplane.MasqueradingOf(set, f))
}

func listOf(endpoints []table.Endpoint) (l list) {
	at := make([]netip.AddrPort, 0, len(endpoints))
	for _, e := range dataplane.Unique(endpoints) {
		at = append(at, e.Addr)
		if e.Local {
			l.own = append(l.own, e.Addr.Addr())
		}
	}
	slices.SortFunc(l.own, netip.Addr.Compare)
	l.own, l.endpoints = slices.Compact(l.own), pack(at)
	return l
}

// keyOf is the key of the maps for a frontend of a family.
func keyOf(k dataplane.FrontKey, f svc.Family) connect.Front {
	a := k.Addr
	if k.Node {
		a = netip.IPv4Unspecified()
		if f == svc.IPv6 {
			a = netip.IPv6Unspecified()
		}
	}
	return connect.Front{Addr: netip.AddrPortFrom(a, k.Port), Protocol: uint8(k.Proto), Node: k.Node}
}

// frontKey is the opposite of keyOf.
func frontKey(f connect.Front) (dataplane.FrontKey, svc.Family) {
	k := dataplane.FrontKey{Addr: f.Addr.Addr(), Port: f.Addr.Port(), Proto: svc.Protocol(f.Protocol), Node: f.Node}
	family := svc.FamilyOf(k.Addr)
	if k.Node {
		k.Addr = netip.Addr{}
	}
	return k, family
}

// classify finds what the rules find of a Pod's packets.
func classify(sets *[2]dataplane.Settings, ns *connect.Namespace) (c connect.Class) {
	for i := range sets {
		set := &sets[i]
		from := slices.ContainsFunc(set.PodInterfaces, func(x table.Interface) bool { return isFrom(x, ns.From) })
		c.InPods[i], c.Local[i] = from, from
		for _, a := range ns.Addrs {
			if a.Is4() != (i == 0) {
				continue
			}
			in := func(p netip.Prefix) bool { return p.Contains(a) }
			c.InPods[i] = c.InPods[i] || slices.ContainsFunc(set.Pods, in)
			c.Local[i] = c.Local[i] || slices.ContainsFunc(set.LocalPods, in)
		}
	}
	return c
}

func isFrom(x table.Interface, name string) bool {
	return x.Name == name || x.Prefix && strings.HasPrefix(name, x.Name)
}
