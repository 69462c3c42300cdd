package speaker

import (
	"log/slog"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
)

// unused has this node refuse packets to addresses of load balancers that are for no Service. Only the loop uses it.
type unused struct {
	filter   *filter.Unused
	known    *Known
	forwards *forwarding
	log      *slog.Logger
	// waiting are addresses that the node does not forward to yet: a port of theirs that soon is a Service's is not refused.
	waiting map[netip.Addr]struct{}
	failed  string
}

// set follows the changed addresses, and the networks that are announced as a whole, but for networks of the node itself.
func (u *unused) set(changed []address, networks []netip.Prefix, links []link.Interface) {
	for i := range changed {
		u.setOne(&changed[i])
	}
	for addr := range u.waiting {
		a := u.known.one(addr)
		u.setOne(&a)
	}
	networks = slices.DeleteFunc(networks, func(p netip.Prefix) bool {
		return slices.ContainsFunc(links, func(l link.Interface) bool { return slices.ContainsFunc(l.Networks, p.Overlaps) })
	})
	failure := ""
	if err := u.filter.Write(networks); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != u.failed {
		u.log.Warn("cannot refuse packets to unused ports of load balancers; until a retry succeeds, clients wait for an answer there",
			"err", failure)
	}
	u.failed = failure
}

func (u *unused) setOne(a *address) {
	delete(u.waiting, a.addr)
	switch {
	case len(a.services) == 0:
		u.filter.Delete(a.addr)
	case !u.forwards.has(a), u.forwards.programmed == nil && a.fresh:
		u.waiting[a.addr] = struct{}{}
	default:
		u.filter.Add(a.addr)
	}
}

// close ends it. The rules of a process that is restarted stay.
func (u *unused) close(restarts bool) {
	var err error
	if restarts {
		err = u.filter.Leave()
	} else {
		err = u.filter.Close()
	}
	if err != nil {
		u.log.Warn("cannot remove the rules for unused ports of load balancers", "err", err)
	}
}
