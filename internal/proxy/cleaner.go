package proxy

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Tracker is the connection tracking table of one network namespace. A
// conntrack.Conn is one.
type Tracker interface {
	// Sweep removes the entries in scope for which stale returns true, and returns how
	// many there were.
	Sweep(ctx context.Context, scope conntrack.Scope, stale func(conntrack.Entry) bool) (int, error)
	// Forget removes the connections of flows that had no answer yet, at less cost, and
	// reports whether it could.
	Forget(ctx context.Context, flows []conntrack.Flow) (bool, error)
	Close() error
}

// cleaner removes stale connections beside the Proxy's loop: a table of many
// connections takes long to read, and no change of a Service waits for that.
// What waits to be looked at is bounded by maxStaleFronts; beyond that it becomes
// one look at everything. What fails is retried.
type cleaner struct {
	tracker Tracker
	relayed bool
	metrics *cleanerMetrics
	log     *slog.Logger
	wake    loop.Signal

	mu    sync.Mutex
	table *table.Table // the newest
	// pending wait for a look, cleaning are looked at now, all reports that
	// everything else must be looked at, too.
	pending, cleaning map[svc.Frontend]*suspect
	all               bool
	// hasty reports that something of pending does not wait for cleanGather.
	hasty bool
}

// cleanerMetrics are what a cleaner counts.
type cleanerMetrics struct {
	// removed counts entries. The kernel does not tell how many Forget removed.
	removed prometheus.Counter
	// filtered counts the passes in which the kernel compared, read those in which the
	// table was read.
	filtered, read prometheus.Counter
	// took has the time of each look, and deleted the entries by family; both as kube-proxy has them.
	took    observers
	deleted *prometheus.CounterVec
}

// maxStaleFronts bounds cleaner.pending.
const maxStaleFronts = 50_000

// The times of the cleaner.
const (
	cleanTimeout  = time.Minute
	cleanRetryMin = time.Second
	cleanRetryMax = time.Minute
	// cleanGather is how long changes are gathered of which only TCP connections can be
	// stale: a client tries again 1 s after its first SYN (RFC 6298). A flow of UDP loses
	// what it sends in the meantime, and does not wait.
	cleanGather = 100 * time.Millisecond
	// cleanPause is how many times as long as it took to read the table the next
	// time waits, so that endpoints which change without pause do not cost a
	// processor.
	cleanPause = 4
)

func newCleaner(t Tracker, o *Options, m *cleanerMetrics) *cleaner {
	return &cleaner{
		tracker: t, relayed: o.Relayed, metrics: m, log: o.Log,
		wake: loop.NewSignal(), pending: map[svc.Frontend]*suspect{},
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
		c.add(staleFronts(before, now, keys, c.relayed, func(at svc.Frontend) bool {
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

// add is called with mu held, with what is newer than pending.
func (c *cleaner) add(fronts map[svc.Frontend]*suspect) {
	for at, s := range fronts {
		s.inherit(at, c.pending[at], c.relayed)
		c.pending[at] = s
		c.hasty = c.hasty || at.Protocol != svc.TCP
	}
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
		c.gather(ctx)
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

// gather waits cleanGather, or until something is pending that does not wait.
func (c *cleaner) gather(ctx context.Context) {
	enough := time.NewTimer(cleanGather)
	defer enough.Stop()
	for !c.urgent() {
		select {
		case <-ctx.Done():
			return
		case <-enough.C:
			return
		case <-c.wake:
		}
	}
}

// urgent reports whether other connections than TCP may be stale.
func (c *cleaner) urgent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all || c.hasty
}

// clean looks at what is pending once. After an error that is pending again.
func (c *cleaner) clean(ctx context.Context) error {
	c.mu.Lock()
	fronts, all, hasty, now := c.pending, c.all, c.hasty, c.table
	c.pending, c.cleaning, c.all, c.hasty = map[svc.Frontend]*suspect{}, fronts, false, false
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, cleanTimeout)
	defer cancel()
	var err error
	start := time.Now()
	if all {
		err = c.sweep(ctx, fronts, conntrack.Scope{}, newSweep(now, now.ServiceCIDRs, c.relayed))
	} else if len(fronts) > 0 {
		err = c.look(ctx, fronts)
	}
	c.metrics.took.observe(time.Since(start))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cleaning = nil
	if err == nil {
		return nil
	}
	c.all, c.hasty = c.all || all, c.hasty || hasty
	newer := c.pending
	c.pending = fronts
	c.add(newer)
	c.wake.Set()
	return err
}

// look removes what is stale of fronts, in the way that costs least.
func (c *cleaner) look(ctx context.Context, fronts map[svc.Frontend]*suspect) error {
	var flows []conntrack.Flow
	few := true
	for at, s := range fronts {
		f, all := s.flows(at)
		flows = append(flows, f...)
		if few = all && len(flows) <= maxLost; !few {
			break
		}
	}
	if few {
		if len(flows) == 0 {
			return nil
		}
		done, err := c.tracker.Forget(ctx, flows)
		if done {
			c.metrics.filtered.Inc()
		}
		if done || err != nil {
			return err
		}
	}
	return c.sweep(ctx, fronts, scopeOf(fronts), &sweep{relayed: c.relayed})
}

// sweep reads the table for what is stale of fronts and of others.
func (c *cleaner) sweep(ctx context.Context, fronts map[svc.Frontend]*suspect, scope conntrack.Scope, others *sweep) error {
	udpTimeout := conntrack.UDPTimeout()
	c.metrics.read.Inc()
	isStale := func(e conntrack.Entry) bool {
		if s, concerned := fronts[svc.Frontend{Protocol: e.Protocol, Addr: e.OrigDst}]; concerned {
			return s.now.stale(&e, c.relayed) || !c.relayed && s.now.spent(&e, udpTimeout)
		}
		return others.stale(e)
	}
	families := map[svc.Family]int{}
	removed, err := c.tracker.Sweep(ctx, scope, func(e conntrack.Entry) bool {
		stale := isStale(e)
		if stale {
			families[svc.FamilyOf(e.OrigDst.Addr())]++
		}
		return stale
	})
	c.metrics.removed.Add(float64(removed))
	for f, n := range families {
		c.metrics.deleted.WithLabelValues(familyName(f)).Add(float64(n))
	}
	if removed > 0 {
		c.log.Debug("removed stale connection tracking entries", "entries", removed)
	}
	return err
}

// scopeOf returns the least scope with all connections to fronts that can be stale.
func scopeOf(fronts map[svc.Frontend]*suspect) conntrack.Scope {
	scope := conntrack.Scope{Unreplied: true}
	first := true
	for at := range fronts {
		f := svc.FamilyOf(at.Addr.Addr())
		if first {
			scope.Family, scope.Protocol, first = f, at.Protocol, false
		}
		if scope.Family != f {
			scope.Family = 0
		}
		if scope.Protocol != at.Protocol {
			scope.Protocol = 0
		}
		scope.Unreplied = scope.Unreplied && at.Protocol == svc.TCP
	}
	return scope
}
