// Package proxy is the node's control loop for Services: the API's objects become a
// table.Table, and a dataplane.Applier makes the kernel carry it out. What is the same
// for every mode lives here and only here: debounce, retry, audit, stale
// connection tracking entries, health check ports, events, metrics and status.
//
//	watches ─► feed ─► table.Builder ─► plane.Apply ─► stale conntrack entries
//	                                        └─► health check ports, metrics, status
//
// Everything from the feed on is one goroutine, so that nothing but the feed
// and the status needs a lock.
package proxy

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/tracing"
)

// Proxy keeps the kernel of one node in step with the Services of the API.
type Proxy struct {
	opts    Options
	log     *slog.Logger
	feed    *feed
	ranges  *ranges
	status  *status
	metrics *metrics
	health  *proxyHealth
	events  *recorder
	owners  *dataplane.OwnerIndex

	looks   chan look // asks the loop what the node has
	history history

	// Only the loop uses the fields below.

	builder  *table.Builder
	pace     pace
	machine  []netip.Addr
	waiting  bool // the feed has, or had, changes that are not applied
	audit    bool // a full comparison is due
	wanted   *table.Table
	applied  *table.Table // what the kernel has as far as known, nil before the first Apply
	changed  map[table.Key]struct{}
	rejected map[table.Key]string // not applied, with the reasons; retried when pace.retry says so
	settled  *table.Table         // the last wanted one that was applied, but for rejected
	arrived  [2]uint64            // the versions of Services and EndpointSlices that wanted has
	failed   bool                 // the last Apply failed, so that a full comparison is due
	triggers []time.Time
	overlaps []string // ranges of ClusterIPs that the wanted Table leaves out, with the reasons
	checks   *healthPorts
	taken    *takenPorts
	cleaner  *cleaner // nil: stale connections stay
}

// New returns a Proxy for Run. It has no effect yet.
func New(opts Options) (*Proxy, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	p := &Proxy{
		opts: opts, log: opts.Log, feed: newFeed(), metrics: newMetrics(opts.Mode, socket.UsableFamilies()),
		status:   newStatus(opts.NodeName, opts.Mode),
		health:   &proxyHealth{timeout: opts.HealthTimeout},
		builder:  table.NewBuilder(opts.tableConfig()),
		pace:     pace{minInterval: opts.MinInterval, maxInterval: opts.MaxInterval, retryMin: opts.RetryMin, retryMax: opts.RetryMax},
		changed:  map[table.Key]struct{}{},
		rejected: map[table.Key]string{},
		taken:    &takenPorts{taken: opts.PortTaken},
		looks:    make(chan look),
	}
	p.status.s.ConnectTime, p.status.s.ConnectTimeCgroup = opts.ConnectTime, opts.ConnectTimeCgroup
	p.owners = dataplane.NewOwnerIndex(p.Table)
	if c, ok := opts.Dataplane.(dataplane.Counter); ok {
		p.metrics.registry.MustRegister(newDropMetrics(c, p.owners, opts.Log))
	}
	if c, ok := opts.Dataplane.(dataplane.Carrier); ok {
		p.metrics.registry.MustRegister(newCarried(c))
	}
	p.metrics.registry.MustRegister(opts.Collectors...)
	p.ranges = newRanges(opts.ServiceCIDRs, opts.Log, p.feed.wakeUp)
	p.events = newRecorder(opts.Client, opts.NodeName, opts.Log)
	p.checks = newHealthPorts(p.health.serving, opts.NodePortAddresses.Everywhere())
	return p, nil
}

// Run watches the API and keeps the kernel in step with it until ctx ends, and
// until everything it started has ended. What it wrote to the kernel stays.
func (p *Proxy) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer p.events.Start()()
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for _, serve := range []func(context.Context) error{p.serveHealth, p.serveMetrics} {
		wg.Go(func() {
			if err := serve(ctx); err != nil {
				failed.Store(&err)
				stop()
			}
		})
	}
	wg.Go(func() { p.feed.run(ctx, &p.opts) })
	wg.Go(func() { p.ranges.run(ctx, p.opts.Client) })
	if p.opts.FallbackReason != "" {
		p.events.node("ProxyModeFallback", p.opts.FallbackReason)
	}
	if tracker := p.openTracker(); tracker != nil {
		p.cleaner = newCleaner(tracker, &p.opts, &p.metrics.conntrack)
		wg.Go(func() {
			p.cleaner.run(ctx)
			_ = tracker.Close()
		})
	}
	addresses, unwatch := p.watchAddresses()
	defer unwatch()
	p.loop(ctx, addresses)
	p.checks.close()
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// openTracker returns nil where there is no connection tracking.
func (p *Proxy) openTracker() Tracker {
	if p.opts.Conntrack == nil {
		return nil
	}
	t, err := p.opts.Conntrack()
	if err != nil {
		p.log.Warn("cannot read connection tracking; connections to endpoints that are gone end when they time out", "err", err)
		return nil
	}
	return t
}

// watchAddresses returns a channel that holds a token after the machine's
// addresses have changed, until stop is called. Without notifications they are
// still read every AddressPeriod.
func (p *Proxy) watchAddresses() (changed <-chan struct{}, stop func()) {
	if p.opts.WatchAddresses == nil {
		return nil, func() {}
	}
	c := dataplane.NewChanges()
	stop, err := p.opts.WatchAddresses(c.Notify)
	if err != nil {
		p.log.Warn("cannot watch the machine's addresses; reading them periodically", "err", err, "period", p.opts.AddressPeriod)
		return nil, func() {}
	}
	return c.Changed(), stop
}

// Status returns what the proxy has done and what is wrong. It is safe for
// concurrent use, as are Serving, Node, Changed, Table and Metrics.
func (p *Proxy) Status() Status { return p.status.get() }

// Serving reports whether the kernel answers for Services as the API says, as far as
// known, and the node is to stay: what /healthz answers.
func (p *Proxy) Serving() bool {
	s := p.health.state(time.Now())
	return s.serving && s.eligible
}

// Table returns the Table that is programmed, without the service ports that
// were rejected; nil before the first Apply.
func (p *Proxy) Table() *table.Table { return p.status.table.Load() }

// OwnersOf returns the index of the Service ports in the Table of p, by where clients send to.
func OwnersOf(p *Proxy) *dataplane.OwnerIndex { return p.owners }

// Node returns this machine's Node as last seen, nil if there is none.
func (p *Proxy) Node() *corev1.Node { return p.status.ownNode() }

// Changed holds a token when Node, or the condition of Status, may have changed
// since the last receive. It is for one receiver.
func (p *Proxy) Changed() <-chan struct{} { return p.status.changed }

// PodsChanged has Options.HostPorts and OwnPods called again. It is safe for concurrent use.
func (p *Proxy) PodsChanged() { p.feed.wakeUp() }

// Metrics serves the proxy's Prometheus metrics.
func (p *Proxy) Metrics() http.Handler { return p.metrics.handler() }

// repairInterval is the least time between two repairs that notifications ask for:
// another program that rewrites the rules again and again does not take all of
// the processor.
const repairInterval = 500 * time.Millisecond

// settleTime is how long addresses may go on changing before they are read: a
// device that appears gets several.
const settleTime = 20 * time.Millisecond

func (p *Proxy) loop(ctx context.Context, addressChanged <-chan struct{}) {
	select {
	case <-ctx.Done():
		return
	case <-p.feed.synced:
	}
	if !p.ranges.await(ctx) {
		return
	}
	var tampered <-chan struct{}
	if w, ok := p.opts.Dataplane.(dataplane.Watcher); ok {
		tampered = w.Changed()
	}
	checks := newChecks(p.opts.Dataplane, p.opts.AuditPeriod, p.log)
	defer checks.timer.Stop()
	audit := time.NewTicker(p.opts.AuditPeriod)
	defer audit.Stop()
	addresses := time.NewTicker(p.opts.AddressPeriod)
	defer addresses.Stop()
	timer, repair, settled := newStoppedTimer(), newStoppedTimer(), newStoppedTimer()
	defer timer.Stop()
	defer repair.Stop()
	defer settled.Stop()
	var repaired time.Time
	settling := false
	p.readAddresses()
	p.waiting = true
	for ctx.Err() == nil {
		if at, ok := p.pace.due(p.waiting || p.audit); ok {
			timer.Reset(time.Until(at))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
		case <-p.feed.wake:
			p.waiting = true
		case <-tampered:
			p.health.setTampered(true)
			repair.Reset(time.Until(repaired.Add(repairInterval)))
		case <-checks.timer.C:
			if !checks.intact() {
				repair.Reset(time.Until(repaired.Add(repairInterval)))
			}
		case repaired = <-repair.C:
			p.audit = true
		case <-audit.C:
			p.audit = true
		case <-addressChanged:
			if !settling {
				settling = true
				settled.Reset(settleTime)
			}
		case <-settled.C:
			settling = false
			p.waiting = p.readAddresses() || p.waiting
		case <-addresses.C:
			p.waiting = p.readAddresses() || p.waiting
			p.warn(p.checks.retry())
		case l := <-p.looks:
			l.serve(p)
		case <-timer.C:
			p.sync(ctx)
		}
	}
}

func newStoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// readAddresses reads the machine's addresses and reports whether they changed.
func (p *Proxy) readAddresses() bool {
	addrs, err := p.opts.Addresses()
	if err != nil {
		p.log.Warn("cannot read the machine's addresses; keeping the current ones for node ports", "err", err)
		return false
	}
	if slices.Equal(addrs, p.machine) {
		return false
	}
	p.machine = slices.Clone(addrs)
	p.builder.SetAddresses(p.machine)
	return true
}

// sync takes what the feed has and applies it.
func (p *Proxy) sync(ctx context.Context) {
	b := p.feed.take()
	p.metrics.received(&b)
	if node, seen := b.into(p.builder, p.opts.NodeName); seen {
		p.setNode(ctx, node)
	}
	if !b.oldest.IsZero() {
		p.health.queued(b.oldest)
	}
	p.triggers = append(p.triggers, b.triggers...)
	if over := len(p.triggers) - maxTriggers; over > 0 {
		p.triggers = p.triggers[over:]
	}
	if p.opts.Servers != nil {
		p.builder.SetServers(p.opts.Servers())
	}
	if p.opts.HostPorts != nil {
		p.builder.SetHostPorts(p.opts.HostPorts())
	}
	if p.opts.OwnPods != nil {
		p.builder.SetOwnPods(p.opts.OwnPods())
	}
	if p.opts.Unreached != nil {
		p.builder.SetUnreached(p.opts.Unreached())
	}
	p.builder.SetServiceCIDRs(p.ranges.get())
	p.arrived = [2]uint64{b.services.version, b.slices.version}
	before := p.wanted
	direct := p.builder.ForwardsDirectly()
	if direct {
		p.builder.SetNextHops(p.opts.NextHops())
	}
	next, keys := p.builder.Build()
	if !direct && p.builder.ForwardsDirectly() { // the first Service that asks for it
		if p.feed.wakeUp(); p.applied == nil && p.feed.awaitNextHops(ctx, &p.opts) {
			p.builder.SetNextHops(p.opts.NextHops())
			again, more := p.builder.Build()
			next, keys = again, append(keys, more...)
		}
		if ctx.Err() != nil {
			return
		}
	}
	for _, k := range keys {
		p.changed[k] = struct{}{}
	}
	p.wanted, p.waiting = next, false
	p.report(before, keys)

	audit := p.audit && p.applied != nil && !p.failed
	full := p.applied == nil || p.failed || p.audit
	p.audit = false
	if full || p.pace.retry(time.Now()) {
		for k := range p.rejected {
			p.changed[k] = struct{}{}
		}
	}
	if !full && len(p.changed) == 0 && next == p.settled {
		p.health.updated(time.Now())
		p.reached(time.Time{}, time.Now())
		return
	}
	p.apply(ctx, full, audit)
}

// setNode takes in that the Node has changed, or does not exist, which is logged at its first time: at once, but an agent makes
// its Node itself.
func (p *Proxy) setNode(ctx context.Context, node *corev1.Node) {
	if node == nil && !p.health.state(time.Now()).missing {
		level := slog.LevelError
		if p.opts.OwnPods != nil {
			level = slog.LevelDebug
		}
		p.log.Log(ctx, level, noNodeMessage(p.opts.NodeName))
	}
	p.health.setNode(node)
	p.status.setNode(node)
}

func (p *Proxy) apply(ctx context.Context, full, audit bool) {
	changed := make([]table.Key, 0, len(p.changed))
	for k := range p.changed {
		changed = append(changed, k)
	}
	start := time.Now()
	err := p.applyWanted(ctx, changed, full)
	took := time.Since(start)
	if err != nil && ctx.Err() != nil {
		return // on the way out
	}
	var rejected *dataplane.Rejected
	failed := err != nil && !errors.As(err, &rejected)
	p.pace.done(time.Now(), took, failed)
	p.metrics.applied(took, full, failed)
	if failed {
		p.status.applied(start, took, audit, err, 0)
		if !p.failed {
			p.events.node("FailedToProgramServices", err.Error())
		}
		p.failed = true
		p.log.Error("cannot program services; retrying", "err", err, "backoff", p.pace.backoff)
		p.opts.Traces.Failed(err)
		// Most of it may be done. Each retry repeats the follow-up.
		p.follow(p.wanted, changed)
		return
	}
	if p.failed || p.applied == nil {
		p.log.Info("services are programmed", "service-ports", p.wanted.Len(), "took", took)
	}
	p.failed = false
	if full {
		p.health.setTampered(false)
	}
	p.reject(rejected, changed)
	p.status.applied(start, took, audit, err, len(p.rejected))
	if audit {
		p.reportRepairs()
	}
	now := p.wanted
	if len(p.rejected) > 0 {
		now = now.WithPortsFrom(p.applied, maps.Keys(p.rejected))
	}
	p.history.note(time.Now(), p.applied, now, changed)
	p.follow(now, changed)
	for _, t := range p.triggers {
		p.metrics.latency.observe(time.Since(t))
	}
	p.triggers = nil
	p.health.updated(time.Now())
	p.applied, p.settled = now, p.wanted
	p.status.table.Store(p.applied)
	clear(p.changed)
	p.reached(start, start.Add(took))
}

// reached records that the kernel has everything that has arrived, but for rejected ports: accepted at a time, in a transaction
// that began at another unless there was none.
func (p *Proxy) reached(began, accepted time.Time) {
	names := make([]string, 0, len(p.rejected))
	for k := range p.rejected {
		names = append(names, k.ID.Name.String())
	}
	p.opts.Progress.Rejected(names)
	p.opts.Progress.Reached(barrier.ProxyServices, p.arrived[0])
	p.opts.Progress.Reached(barrier.ProxySlices, p.arrived[1])
	if p.opts.Traces == nil {
		return
	}
	r := tracing.Reached{Services: p.arrived[0], Slices: p.arrived[1], Begun: began, Accepted: accepted}
	if len(p.rejected) > 0 {
		r.Rejected = make(map[string]string, len(p.rejected))
		for k, why := range p.rejected {
			r.Rejected[k.ID.Name.String()] = why
		}
	}
	p.opts.Traces.Reached(r)
}

// reject records which of the service ports that were tried the Applier has
// rejected. They do not keep the others from being programmed, and are retried
// with backoff, or when they change.
func (p *Proxy) reject(r *dataplane.Rejected, tried []table.Key) {
	retried := false
	before := maps.Clone(p.rejected)
	for _, k := range tried {
		_, was := before[k]
		retried = retried || was
		delete(p.rejected, k)
	}
	if r != nil {
		for k, why := range r.Ports {
			p.rejected[k] = why.Error()
			if _, was := before[k]; was {
				continue
			}
			p.log.Error("cannot program a service port; retrying", "port", k.ID, "family", k.Family, "err", why)
			p.events.service(k.ID.Name, p.builder.UID(k.ID.Name), corev1.EventTypeWarning, "FailedToProgramService", why.Error())
		}
	}
	p.metrics.rejected.Set(float64(len(p.rejected)))
	p.pace.rejected(time.Now(), len(p.rejected) > 0, retried)
}

// follow does what comes after an Apply of now: it has stale connections removed,
// opens and closes health check ports, and warns of node ports that another
// process has bound.
func (p *Proxy) follow(now *table.Table, changed []table.Key) {
	p.cleaner.changed(p.applied, now, changed)
	p.checks.update(now, changed)
	p.warn(p.checks.sync(now.NodePortAddrs))
	p.warn(p.taken.find(p.applied, now, changed))
}

func (p *Proxy) applyWanted(ctx context.Context, changed []table.Key, full bool) error {
	ctx, cancel := context.WithTimeout(ctx, p.opts.ApplyTimeout)
	defer cancel()
	if full {
		changed = nil
	}
	return p.opts.Dataplane.Apply(ctx, p.wanted, changed)
}
