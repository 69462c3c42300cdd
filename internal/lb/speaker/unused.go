package speaker

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/loop"
)

// unused has this node refuse packets to addresses of load balancers that are for no Service. The loop decides, and run writes:
// a transaction of nf_tables waits for those of other programs, up to 30 s, and the loop has promises to keep.
type unused struct {
	known    *Known
	forwards *forwarding
	log      *slog.Logger
	// waiting are addresses that the node does not forward to yet: a port of theirs that soon is a Service's is not refused.
	// refused are the others. Only the loop uses both.
	waiting, refused map[netip.Addr]struct{}

	wake     loop.Signal // there is something to write
	mu       sync.Mutex
	changes  map[netip.Addr]bool // addresses to add or remove
	networks []netip.Prefix

	// run is the only user of what follows.

	rules  unusedRules
	failed string
}

// unusedRules are the rules in the kernel, of filter.Unused.
type unusedRules interface {
	Add(netip.Addr)
	Delete(netip.Addr)
	Write(networks []netip.Prefix) error
	Close() error
}

// unusedRetry is the time between two tries to write the rules.
const unusedRetry = 5 * time.Second

// newUnused returns an unused without addresses. The first thing that run does is to remove what a process that was killed
// has left.
func newUnused(known *Known, forwards *forwarding, log *slog.Logger) *unused {
	u := &unused{
		known: known, forwards: forwards, log: log, waiting: map[netip.Addr]struct{}{}, refused: map[netip.Addr]struct{}{},
		wake: loop.NewSignal(), changes: map[netip.Addr]bool{},
	}
	u.rules = filter.NewUnused(u.wake.Set)
	u.wake.Set()
	return u
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
	slices.SortFunc(networks, netip.Prefix.Compare)
	u.mu.Lock()
	defer u.mu.Unlock()
	if !slices.Equal(networks, u.networks) {
		u.networks = networks
		u.wake.Set()
	}
}

func (u *unused) setOne(a *address) {
	waits := len(a.services) > 0 && (!u.forwards.hasAll(a) || u.forwards.programmed == nil && a.fresh)
	delete(u.waiting, a.addr)
	if waits {
		u.waiting[a.addr] = struct{}{}
	}
	refuse := len(a.services) > 0 && !waits
	if _, refused := u.refused[a.addr]; refused == refuse {
		return
	}
	delete(u.refused, a.addr)
	if refuse {
		u.refused[a.addr] = struct{}{}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.changes[a.addr] = refuse
	u.wake.Set()
}

// run writes the rules until ctx ends, and removes them then: another process may begin with other addresses, or none.
func (u *unused) run(ctx context.Context) {
	defer func() {
		if err := u.rules.Close(); err != nil {
			u.log.Warn("cannot remove the rules for unused ports of load balancers", "err", err)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-u.wake:
		}
		if u.write() {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(unusedRetry):
			u.wake.Set()
		}
	}
}

// write writes what has changed, and reports whether it could.
func (u *unused) write() bool {
	u.mu.Lock()
	changes, networks := u.changes, u.networks
	u.changes = map[netip.Addr]bool{}
	u.mu.Unlock()
	for addr, refuse := range changes {
		if refuse {
			u.rules.Add(addr)
		} else {
			u.rules.Delete(addr)
		}
	}
	failure := ""
	if err := u.rules.Write(networks); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != u.failed {
		u.log.Warn("cannot refuse packets to unused ports of load balancers; until a retry succeeds, clients wait for an answer there",
			"err", failure)
	}
	u.failed = failure
	return failure == ""
}
