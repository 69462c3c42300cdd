package proxy

import (
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// served is what a frontend is to the connections that are tracked.
type served struct {
	// serving, endpoints and inside are the endpoints that a connection may keep, all
	// sorted: ServicePort.Serving, and the endpoints of the Frontend. New connections are
	// sent to the latter two.
	serving, endpoints, inside []table.Endpoint
}

// servedBy describes a frontend of p.
func servedBy(p *table.ServicePort, f *table.Frontend) *served {
	return &served{p.Serving, f.Endpoints, localClients(f)}
}

func localClients(f *table.Frontend) []table.Endpoint {
	if f.LocalClients != nil {
		return f.LocalClients
	}
	return f.Endpoints
}

// by reports whether an endpoint serves the frontend.
func (s *served) by(at netip.AddrPort) bool {
	return in(s.serving, at) || in(s.endpoints, at) || in(s.inside, at)
}

// in reports whether a sorted list has an endpoint.
func in(list []table.Endpoint, at netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(list, at, func(e table.Endpoint, at netip.AddrPort) int { return e.Addr.Compare(at) })
	return found
}

// none reports whether no endpoint serves the frontend.
func (s *served) none() bool { return len(s.serving)+len(s.endpoints)+len(s.inside) == 0 }

// stale reports whether a connection to a frontend that is now so (nil: gone) must
// go. relayed is Options.Relayed.
//
// A translation is chosen for the first packet of a connection and kept as long as
// packets come. Clients of UDP and SCTP do not notice that their endpoint is gone,
// and go on sending to
//
//   - an endpoint that does not serve any more (one that is only not preferred any
//     more keeps its flows),
//   - a frontend that is gone, or has no endpoint left,
//   - a frontend that had no endpoint when the flow began: that flow is not
//     translated at all, and endpoints that appear later never see it
//     (kubernetes/kubernetes#139628).
//
// TCP connections end by themselves. But one that has had no answer yet tries again
// and again, each time renews its entry, and never gets another endpoint.
func (s *served) stale(e *conntrack.Entry, relayed bool) bool {
	switch {
	case e.Protocol == svc.TCP && e.Replied:
		return false
	case s == nil:
		return e.Translated()
	case !e.Translated():
		return len(s.endpoints)+len(s.inside) > 0
	case relayed:
		return s.none()
	}
	return !s.by(e.ReplySrc)
}

// spentIdle is how long a flow of UDP without packets may still be in use.
const spentIdle = time.Second

// spent reports whether a flow of UDP is no more than the memory of one question that was
// answered, at an endpoint that new flows are not sent to: it terminates, as a rule. The
// next flow from the same port, which is another one to its client, would be sent there
// for as long as the kernel remembers, until the endpoint's process ends and loses it.
// Flows that last stay where they are. timeout is conntrack.UDPTimeout.
func (s *served) spent(e *conntrack.Entry, timeout time.Duration) bool {
	if s == nil || e.Protocol != svc.UDP || !e.Translated() || !e.Replied || e.Assured || e.Left >= timeout-spentIdle {
		return false
	}
	return !in(s.endpoints, e.ReplySrc) && !in(s.inside, e.ReplySrc)
}

// less reports whether a frontend may have connections that are stale now, if it
// was old before (nil: it was not there).
func (s *served) less(old *served, p svc.Protocol) bool {
	if old == nil {
		old = &served{}
	}
	if s == nil {
		return true
	}
	if len(old.endpoints) == 0 && len(s.endpoints) > 0 || len(old.inside) == 0 && len(s.inside) > 0 {
		return true
	}
	lost := func(e table.Endpoint) bool { return !s.by(e.Addr) }
	if p == svc.UDP { // for flows that are spent
		turned := func(e table.Endpoint) bool { return !in(s.endpoints, e.Addr) && !in(s.inside, e.Addr) }
		return slices.ContainsFunc(old.serving, lost) || slices.ContainsFunc(old.endpoints, turned) || slices.ContainsFunc(old.inside, turned)
	}
	return slices.ContainsFunc(old.serving, lost) || slices.ContainsFunc(old.endpoints, lost) || slices.ContainsFunc(old.inside, lost)
}

// suspect is a frontend that may have stale connections.
type suspect struct {
	now *served // nil: gone
	// lost are the answering addresses whose connections may be stale: endpoints that
	// served the frontend and do not any more, and its own address, which "answers"
	// what is not translated. many is set instead of more than maxLost, and where they
	// do not tell enough: of UDP and SCTP.
	lost []netip.AddrPort
	many bool
}

// maxLost bounds suspect.lost.
const maxLost = 16

// newSuspect returns what is suspect of a frontend that was old (nil: not there) and is
// now.
func newSuspect(at svc.Frontend, old, now *served, relayed bool) *suspect {
	s := &suspect{now: now, many: at.Protocol != svc.TCP}
	if old == nil || len(old.endpoints) == 0 || len(old.inside) == 0 {
		s.add(at, at.Addr, relayed)
	}
	if old == nil {
		return s
	}
	s.addAll(at, old.serving, relayed)
	s.addAll(at, old.endpoints, relayed)
	if len(old.inside) > 0 && (len(old.endpoints) == 0 || &old.inside[0] != &old.endpoints[0]) {
		s.addAll(at, old.inside, relayed)
	}
	return s
}

func (s *suspect) addAll(at svc.Frontend, list []table.Endpoint, relayed bool) {
	for i := range list {
		if s.many {
			return
		}
		s.add(at, list[i].Addr, relayed)
	}
}

// add notes an answering address, if its connections are stale now.
func (s *suspect) add(at svc.Frontend, by netip.AddrPort, relayed bool) {
	e := conntrack.Entry{Protocol: at.Protocol, OrigDst: at.Addr, ReplySrc: by}
	switch {
	case s.many, slices.Contains(s.lost, by), !s.now.stale(&e, relayed):
	case len(s.lost) == maxLost:
		s.lost, s.many = nil, true
	default:
		s.lost = append(s.lost, by)
	}
}

// inherit adds what an older suspect of the same frontend had, as far as it is stale
// still.
func (s *suspect) inherit(at svc.Frontend, older *suspect, relayed bool) {
	if older == nil {
		return
	}
	if older.many {
		s.lost, s.many = nil, true
	}
	for _, by := range older.lost {
		s.add(at, by, relayed)
	}
}

// flows returns the connections without an answer that are stale, and whether no others
// can be.
func (s *suspect) flows(at svc.Frontend) ([]conntrack.Flow, bool) {
	if s.many {
		return nil, false
	}
	var out []conntrack.Flow
	for _, by := range s.lost {
		out = append(out, conntrack.Flow{Protocol: at.Protocol, OrigDst: at.Addr, ReplySrc: by})
	}
	return out, true
}

// staleFronts returns the frontends that may have stale connections once the kernel
// follows after instead of before, and the frontends for which pending returns true.
// It only looks at changed. relayed is Options.Relayed.
func staleFronts(before, after *table.Table, changed []table.Key, relayed bool,
	pending func(svc.Frontend) bool) map[svc.Frontend]*suspect {
	was, is := map[svc.Frontend]*served{}, map[svc.Frontend]*served{}
	for _, k := range changed {
		eachServed(before, before.Get(k), was)
		eachServed(after, after.Get(k), is)
	}
	out := map[svc.Frontend]*suspect{}
	for at, now := range is {
		if pending(at) || now.less(was[at], at.Protocol) {
			out[at] = newSuspect(at, was[at], now, relayed)
		}
	}
	for at, old := range was {
		if is[at] == nil {
			out[at] = newSuspect(at, old, nil, relayed)
		}
	}
	return out
}

// eachServed adds the frontends of a port of t, nil for none, by the addresses that
// clients send to.
func eachServed(t *table.Table, p *table.ServicePort, to map[svc.Frontend]*served) {
	if p == nil {
		return
	}
	for i := range p.Frontends {
		s := servedBy(p, &p.Frontends[i])
		for _, at := range t.Destinations(&p.Frontends[i]) {
			to[svc.Frontend{Protocol: p.Protocol, Addr: at}] = s
		}
	}
}

// sweep finds stale entries of the connection tracking table without knowing what
// changed, as at the start: an earlier process may have ended long ago. Only
// connections to frontends of Services count, and to addresses in the ranges of
// ClusterIPs, whose Service is gone.
type sweep struct {
	fronts  map[svc.Frontend]*served
	ranges  []netip.Prefix
	relayed bool
}

func newSweep(t *table.Table, ranges []netip.Prefix, relayed bool) *sweep {
	s := &sweep{fronts: map[svc.Frontend]*served{}, ranges: ranges, relayed: relayed}
	for p := range t.All() {
		eachServed(t, p, s.fronts)
	}
	return s
}

func (s *sweep) stale(e conntrack.Entry) bool {
	front, known := s.fronts[svc.Frontend{Protocol: e.Protocol, Addr: e.OrigDst}]
	if !known && !slices.ContainsFunc(s.ranges, func(r netip.Prefix) bool { return r.Contains(e.OrigDst.Addr()) }) {
		return false
	}
	return front.stale(&e, s.relayed)
}
