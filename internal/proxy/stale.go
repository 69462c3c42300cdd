package proxy

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Tracker is the connection tracking table of one network namespace. A
// conntrack.Conn is one.
type Tracker interface {
	// Sweep removes the entries for which stale returns true, and returns how many
	// there were; with unreplied it need not look at others than those without an
	// answer.
	Sweep(ctx context.Context, unreplied bool, stale func(conntrack.Entry) bool) (int, error)
	Close() error
}

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

// staleFronts returns the frontends that may have stale connections once the kernel
// follows after instead of before, with what they are now, and the frontends for which
// pending returns true. It only looks at changed.
func staleFronts(before, after *table.Table, changed []table.Key, pending func(svc.Frontend) bool) map[svc.Frontend]*served {
	was, is := map[svc.Frontend]*served{}, map[svc.Frontend]*served{}
	for _, k := range changed {
		eachServed(before, before.Get(k), was)
		eachServed(after, after.Get(k), is)
	}
	out := map[svc.Frontend]*served{}
	for at, now := range is {
		if pending(at) || now.less(was[at], at.Protocol) {
			out[at] = now
		}
	}
	for at := range was {
		if is[at] == nil {
			out[at] = nil
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
		for _, at := range addresses(t, &p.Frontends[i]) {
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

// cleaner removes stale connections beside the Proxy's loop: a table of many
// connections takes long to read, and no change of a Service waits for that.
// What waits to be looked at is bounded by maxStaleFronts; beyond that it becomes
// one look at everything. What fails is retried.
type cleaner struct {
	tracker Tracker
	relayed bool
	swept   func(took time.Duration, removed int, families map[svc.Family]int)
	log     *slog.Logger
	wake    loop.Signal

	mu    sync.Mutex
	table *table.Table // the newest
	// pending wait for a look, cleaning are looked at now, all reports that
	// everything else must be looked at, too.
	pending, cleaning map[svc.Frontend]*served
	all               bool
}

// maxStaleFronts bounds cleaner.pending.
const maxStaleFronts = 50_000

// Retries of the cleaner.
const (
	cleanTimeout  = time.Minute
	cleanRetryMin = time.Second
	cleanRetryMax = time.Minute
	// cleanPause is how many times as long as it took to read the table the next
	// time waits, so that endpoints which change without pause do not cost a
	// processor.
	cleanPause = 4
)

func newCleaner(t Tracker, o *Options, swept func(time.Duration, int, map[svc.Family]int)) *cleaner {
	return &cleaner{
		tracker: t, relayed: o.Relayed, swept: swept, log: o.Log,
		wake: loop.NewSignal(), pending: map[svc.Frontend]*served{},
	}
}

// changed notes that the kernel follows now instead of before (nil: it is not
// known what it followed). It does not wait. A nil cleaner does nothing.
func (c *cleaner) changed(before, now *table.Table, keys []table.Key) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.table = now
	if before == nil {
		c.all = true
	} else {
		c.add(staleFronts(before, now, keys, func(at svc.Frontend) bool {
			_, waits := c.pending[at]
			_, cleans := c.cleaning[at]
			return waits || cleans
		}))
	}
	if !c.all && len(c.pending) == 0 {
		return
	}
	c.wake.Set()
}

// add is called with mu held.
func (c *cleaner) add(fronts map[svc.Frontend]*served) {
	maps.Copy(c.pending, fronts)
	if len(c.pending) > maxStaleFronts {
		c.all = true
		clear(c.pending)
	}
}

// run cleans until ctx ends.
func (c *cleaner) run(ctx context.Context) {
	retry := cleanRetryMin
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		start := time.Now()
		err := c.clean(ctx)
		pause := cleanPause * time.Since(start)
		if err != nil && ctx.Err() == nil {
			pause = retry
			retry = min(2*retry, cleanRetryMax)
			c.log.Warn("cannot remove stale connection tracking entries; retrying", "err", err, "backoff", pause)
		} else {
			retry = cleanRetryMin
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// clean looks at what is pending once. After an error that is pending again.
func (c *cleaner) clean(ctx context.Context) error {
	c.mu.Lock()
	fronts, all, now := c.pending, c.all, c.table
	c.pending, c.cleaning, c.all = map[svc.Frontend]*served{}, fronts, false
	c.mu.Unlock()
	udpTimeout := conntrack.UDPTimeout()
	unreplied := !all
	for at := range fronts {
		unreplied = unreplied && at.Protocol == svc.TCP
	}
	everything := &sweep{relayed: c.relayed}
	if all {
		everything = newSweep(now, now.ServiceCIDRs, c.relayed)
	}
	ctx, cancel := context.WithTimeout(ctx, cleanTimeout)
	defer cancel()
	isStale := func(e conntrack.Entry) bool {
		if s, concerned := fronts[svc.Frontend{Protocol: e.Protocol, Addr: e.OrigDst}]; concerned {
			return s.stale(&e, c.relayed) || !c.relayed && s.spent(&e, udpTimeout)
		}
		return everything.stale(e)
	}
	families, start := map[svc.Family]int{}, time.Now()
	removed, err := c.tracker.Sweep(ctx, unreplied, func(e conntrack.Entry) bool {
		stale := isStale(e)
		if stale {
			families[svc.FamilyOf(e.OrigDst.Addr())]++
		}
		return stale
	})
	c.swept(time.Since(start), removed, families)
	if removed > 0 {
		c.log.Debug("removed stale connection tracking entries", "entries", removed)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cleaning = nil
	if err == nil {
		return nil
	}
	c.all = c.all || all
	maps.Copy(fronts, c.pending) // the newer ones
	c.add(fronts)
	c.wake.Set()
	return err
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
