package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// server is a virtual server as it is wanted.
type server struct {
	ipvs.Service
	// proto is that of its packets, which the key of a mark does not tell.
	proto svc.Protocol
	dests []table.Endpoint
	// kept are endpoints that flows may keep, sorted.
	kept []table.Endpoint
}

// keeps reports whether an endpoint that gets no new connections may stay for those
// that it has: until they are over, or as long as it serves.
func (s *server) keeps(ep netip.AddrPort) bool {
	if drains(s.Scheduler, s.proto) {
		return true
	}
	_, serves := slices.BinarySearchFunc(s.kept, ep, func(e table.Endpoint, ep netip.AddrPort) int { return e.Addr.Compare(ep) })
	return serves && s.Scheduler != hashingByDestination
}

// front is what one frontend is in the kernel.
type front struct {
	servers  []server
	elements []element
}

// planner turns frontends into what they are in the kernel.
type planner struct {
	*layout
	settings *dataplane.Settings
	// elsewhere reports whether an address is on another interface of this node:
	// it is not only the Services', and stays where it is.
	elsewhere func(netip.Addr) bool
	// mark returns the mark of a frontend with endpoints for clients inside.
	mark func(dataplane.FrontKey) uint32
}

func (l *planner) plan(k dataplane.FrontKey, p *table.ServicePort, f *table.Frontend) (*front, error) {
	out := &front{}
	base := ipvs.Service{Scheduler: p.Scheduler, Persistence: time.Duration(dataplane.AffinitySeconds(p)) * time.Second}
	if base.Scheduler == "" {
		base.Scheduler = l.cfg.Scheduler
	}
	if fallsBack(base.Scheduler) {
		base.Flags = ipvs.Fallback
	}
	if r := l.excluded(k.Addr); r.IsValid() {
		return nil, fmt.Errorf("%s of %s: its address is within %s, which --ipvs-exclude-cidrs leaves to others", k, p.ID, r)
	}
	// Where no node has endpoints, clients inside are like all others.
	inside := f.LocalClients != nil && (len(f.LocalClients)+len(f.Endpoints) > 0 || f.Drop)
	for _, a := range l.addressesOf(k) {
		s := server{base, p.Protocol, dataplane.Unique(f.Endpoints), p.Serving}
		s.Key = ipvs.AddressKey(p.Protocol, netip.AddrPortFrom(a, k.Port))
		out.servers = append(out.servers, s)
		l.rules(out, s.Key.Addr, p, f)
		if inside {
			e := frontElement(setInside, p.Protocol, s.Key.Addr)
			e.Mark = l.mark(k)
			out.elements = append(out.elements, e)
		}
	}
	if inside {
		mark := l.mark(k)
		if mark == 0 {
			return nil, fmt.Errorf("%s, frontend %s: more than %d frontends with separate endpoints for clients inside", p.ID, f.Addr, maxInside)
		}
		s := server{base, p.Protocol, dataplane.Unique(f.LocalClients), p.Serving}
		s.Key = ipvs.MarkKey(mark, l.family)
		if s.Persistence > 0 {
			// The kernel leaves the port as it is where it remembers clients of a
			// mark. A hash that hardly changes with the endpoints keeps them
			// together without that.
			s.Scheduler, s.Flags, s.Persistence = hashing, ipvs.Fallback, 0
		}
		out.servers = append(out.servers, s)
	}
	if !k.Node && !l.elsewhere(k.Addr) {
		s := setOuter
		if f.Kind == table.ClusterIP {
			s = setCluster
		}
		a := ipset.Element{IP: k.Addr}
		out.elements = append(out.elements, element{s, a}, element{setDevice, a})
	}
	for _, list := range [][]table.Endpoint{f.Endpoints, f.LocalClients} {
		for _, e := range list {
			if e.Local {
				h := frontElement(setHairpin, p.Protocol, e.Addr)
				h.IP2 = e.Addr.Addr()
				out.elements = append(out.elements, h)
			}
		}
	}
	return out, nil
}

// addressesOf are the addresses of a frontend: its own, or the ones that node ports answer
// on and no other program balances. IPVS sends what comes from 127.0.0.0/8 by no
// interface but lo.
func (l *planner) addressesOf(k dataplane.FrontKey) []netip.Addr {
	if !k.Node {
		return []netip.Addr{k.Addr}
	}
	return slices.DeleteFunc(slices.Clone(l.settings.NodeAddrs), func(a netip.Addr) bool {
		return a.IsLoopback() || l.excluded(a).IsValid()
	})
}

// excluded is the range of --ipvs-exclude-cidrs that an address is in, if any.
func (l *planner) excluded(a netip.Addr) netip.Prefix {
	for _, p := range l.cfg.ExcludeCIDRs {
		if p.Contains(a) {
			return p
		}
	}
	return netip.Prefix{}
}

// rules adds the elements that make netfilter treat a frontend's packets as it
// must.
func (l *planner) rules(out *front, at netip.AddrPort, p *table.ServicePort, f *table.Frontend) {
	add := func(s set) { out.elements = append(out.elements, frontElement(s, p.Protocol, at)) }
	add(setFront)
	if len(f.Endpoints) > 0 {
		switch dataplane.MasqueradingOf(l.settings, f) {
		case dataplane.MasqueradeAlways:
			add(setMasq)
		case dataplane.MasqueradeOutside:
			add(setOutside)
		case dataplane.MasqueradeNone:
		}
	} else {
		add(setNobody)
		if f.Drop {
			add(setDrop)
		}
	}
	if f.SourceRanges == nil {
		return
	}
	add(setRanged)
	clients, self := l.clients(f.SourceRanges, at.Addr())
	for _, r := range clients {
		e := frontElement(setAllow, p.Protocol, at)
		e.Net = r
		out.elements = append(out.elements, e)
	}
	if self {
		e := frontElement(setSelf, p.Protocol, at)
		e.IP2 = at.Addr()
		out.elements = append(out.elements, e)
	}
}

// clients are the ranges of clients let in, and whether this node is, which sends to
// a virtual IP from that very address: if one of its addresses is.
func (l *planner) clients(ranges []netip.Prefix, vip netip.Addr) (out []netip.Prefix, self bool) {
	for _, r := range ranges {
		switch {
		case svc.FamilyOf(r.Addr()) != l.family:
		case dataplane.IsOwn(r, vip):
			self = true
		default:
			out = append(out, ipset.Halves(r)...)
			self = self || slices.ContainsFunc(l.settings.NodeAddrs, r.Contains)
		}
	}
	return out, self
}
