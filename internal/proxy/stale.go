package proxy

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// staleFlows returns the connection tracking entries that are wrong once the
// kernel follows after instead of before (nil: not known). Only what is in
// changed is looked at.
//
// A translation is chosen for the first packet of a flow and kept as long as
// packets come. TCP ends by itself when its endpoint goes; UDP and SCTP clients
// do not notice and go on sending to
//
//   - an endpoint that the frontend may not use any more,
//   - a frontend that is gone, or has no endpoint left,
//   - a frontend that had no endpoint when the flow began: that flow is not
//     translated at all, and endpoints that appear later never see it
//     (kubernetes/kubernetes#139628).
//
// No other entry is ever named: an untranslated flow is recognised by its reply
// source, which is the frontend itself.
func staleFlows(before, after *table.Table, changed []table.Key) []conntrack.Flow {
	var out []conntrack.Flow
	for _, k := range changed {
		var old *table.ServicePort
		if before != nil {
			old = before.Get(k)
		}
		next := after.Get(k)
		if old != nil && old.Protocol != svc.TCP {
			for i := range old.Frontends {
				f := &old.Frontends[i]
				out = leaveFrontend(out, before, old.Protocol, f, frontendOf(next, old.Protocol, f))
			}
		}
		if next != nil && next.Protocol != svc.TCP {
			for i := range next.Frontends {
				f := &next.Frontends[i]
				had := frontendOf(old, next.Protocol, f)
				if opened(had, f) {
					for _, at := range addresses(after, f) {
						out = append(out, conntrack.Flow{Protocol: next.Protocol, OrigDst: at, ReplySrc: at})
					}
				}
			}
		}
	}
	return out
}

// leaveFrontend adds the flows of f, a frontend of before, that next (nil: it is
// gone) does not continue.
func leaveFrontend(out []conntrack.Flow, before *table.Table, proto svc.Protocol, f, next *table.Frontend) []conntrack.Flow {
	keep := map[netip.AddrPort]bool{}
	if next != nil {
		for _, e := range next.Endpoints {
			keep[e.Addr] = true
		}
		for _, e := range next.LocalClients {
			keep[e.Addr] = true
		}
	}
	var gone []netip.AddrPort
	if len(keep) == 0 {
		gone = []netip.AddrPort{{}} // any reply source
	} else {
		for _, list := range [][]table.Endpoint{f.Endpoints, f.LocalClients} {
			for _, e := range list {
				if !keep[e.Addr] {
					keep[e.Addr] = true // name it once
					gone = append(gone, e.Addr)
				}
			}
		}
	}
	for _, at := range addresses(before, f) {
		for _, g := range gone {
			out = append(out, conntrack.Flow{Protocol: proto, OrigDst: at, ReplySrc: g})
		}
	}
	return out
}

// opened reports whether f has endpoints for clients for which had (nil: there was no
// such frontend) had none.
func opened(had, f *table.Frontend) bool {
	if had == nil {
		return len(f.Endpoints)+len(f.LocalClients) > 0
	}
	return len(had.Endpoints) == 0 && len(f.Endpoints) > 0 || len(localClients(had)) == 0 && len(localClients(f)) > 0
}

func localClients(f *table.Frontend) []table.Endpoint {
	if f.LocalClients != nil {
		return f.LocalClients
	}
	return f.Endpoints
}

func frontendOf(p *table.ServicePort, proto svc.Protocol, like *table.Frontend) *table.Frontend {
	if p == nil || p.Protocol != proto {
		return nil
	}
	for i := range p.Frontends {
		if f := &p.Frontends[i]; f.Addr == like.Addr {
			return f
		}
	}
	return nil
}

// removeStale removes the connection tracking entries that are stale under now.
// What fails here is not retried: the entries time out, and a later change of the
// same frontends names them again.
func (p *Proxy) removeStale(ctx context.Context, now *table.Table, changed []table.Key) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var removed int
	var err error
	switch {
	case p.opts.Conntrack == nil:
		return
	case p.applied == nil && p.opts.SweepConntrack != nil:
		s := newSweep(now, now.ServiceCIDRs)
		removed, err = p.opts.SweepConntrack(ctx, s.stale)
	default:
		flows := staleFlows(p.applied, now, changed)
		if len(flows) == 0 {
			return
		}
		removed, err = p.opts.Conntrack(ctx, flows)
	}
	p.metrics.conntrack.Add(float64(removed))
	if err != nil {
		p.log.Warn("cannot remove stale connection tracking entries; they time out", "err", err)
	} else if removed > 0 {
		p.log.Debug("removed stale connection tracking entries", "entries", removed)
	}
}

// sweep finds stale entries of the connection tracking table without knowing what
// changed, as at the start: an earlier process may have ended long ago. Only
// connections to frontends of Services count, and to addresses in the ranges of
// ClusterIPs, whose Service is gone. TCP ends by itself, see staleFlows.
type sweep struct {
	// replies are the reply sources allowed for each frontend.
	replies map[svc.Frontend]map[netip.AddrPort]bool
	ranges  []netip.Prefix
}

func newSweep(t *table.Table, ranges []netip.Prefix) *sweep {
	s := &sweep{replies: map[svc.Frontend]map[netip.AddrPort]bool{}, ranges: ranges}
	for p := range t.All() {
		if p.Protocol == svc.TCP {
			continue
		}
		for i := range p.Frontends {
			f := &p.Frontends[i]
			allowed := map[netip.AddrPort]bool{}
			for _, list := range [][]table.Endpoint{f.Endpoints, f.LocalClients} {
				for _, e := range list {
					allowed[e.Addr] = true
				}
			}
			for _, at := range addresses(t, f) {
				s.replies[svc.Frontend{Protocol: p.Protocol, Addr: at}] = allowed
			}
		}
	}
	return s
}

// stale reports whether a connection that a client opened to dst must not be
// answered by replySrc.
func (s *sweep) stale(p svc.Protocol, dst, replySrc netip.AddrPort) bool {
	if p == svc.TCP {
		return false
	}
	translated := dst != replySrc
	allowed, known := s.replies[svc.Frontend{Protocol: p, Addr: dst}]
	switch {
	case known && translated:
		return !allowed[replySrc]
	case known:
		return len(allowed) > 0 // the flow began when there was no endpoint
	}
	return translated && slices.ContainsFunc(s.ranges, func(r netip.Prefix) bool { return r.Contains(dst.Addr()) })
}

// addresses returns where clients send to f: a node port answers on several
// addresses of the node. They are named one by one, since packets to the
// same port of a foreign address may pass through this machine.
func addresses(t *table.Table, f *table.Frontend) []netip.AddrPort {
	if f.Kind != table.NodePort {
		return []netip.AddrPort{f.Addr}
	}
	var out []netip.AddrPort
	for _, a := range t.NodePortAddrs {
		if a.Is4() == f.Addr.Addr().Is4() {
			out = append(out, netip.AddrPortFrom(a, f.Addr.Port()))
		}
	}
	return out
}
