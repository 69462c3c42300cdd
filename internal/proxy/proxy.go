package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Node is the Service part of one machine: what it knows, what it has
// programmed, and how it does.
type Proxy struct {
	opts    Options
	log     *slog.Logger
	feed    *feed
	status  *status
	metrics *metrics
	health  *proxyHealth
	events  *recorder

	// What follows is used by the loop alone.

	builder  *table.Builder
	pace     pace
	machine  []netip.Addr
	waiting  bool // something was taken from the feed and is not applied
	audit    bool // a full comparison is due
	wanted   *table.Table
	applied  *table.Table // what the kernel has, as far as it is known; nil before the first Apply
	changed  map[table.Key]struct{}
	refused  map[table.Key]struct{} // not applied, and not tried again until it is time
	settled  *table.Table           // the wanted one of which applied has all but refused
	failed   bool                   // the last Apply did, so that a full comparison is due
	triggers []time.Time
	checks   *healthPorts
	taken    *takenPorts
}

// New returns a Proxy for Run. It has no effect yet.
func New(opts Options) (*Proxy, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	n := &Proxy{
		opts: opts, log: opts.Log, feed: newFeed(), metrics: newMetrics(),
		status:  newStatus(opts.NodeName, opts.Mode),
		health:  &proxyHealth{timeout: opts.HealthTimeout, eligible: true},
		builder: table.NewBuilder(opts.tableConfig()),
		pace:    pace{minInterval: opts.MinInterval, maxInterval: opts.MaxInterval, retryMin: opts.RetryMin, retryMax: opts.RetryMax},
		changed: map[table.Key]struct{}{},
		refused: map[table.Key]struct{}{},
		taken:   &takenPorts{taken: opts.PortTaken},
	}
	if c, ok := opts.Plane.(dataplane.Counter); ok {
		n.metrics.registry.MustRegister(newLostPackets(c, n.Table, opts.Log))
	}
	if c, ok := opts.Plane.(dataplane.Carrier); ok {
		n.metrics.registry.MustRegister(newCarried(c))
	}
	n.events = newRecorder(opts.Client, opts.NodeName, opts.Log)
	n.checks = newHealthPorts(n.health.healthy, opts.NodePortAddresses.IsDefault())
	return n, nil
}

// Run watches the API and keeps the kernel in step with it until ctx ends, and
// until everything it started has ended, too. What is in the kernel then stays.
// Its error says why it could not start.
func (n *Proxy) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	servers, err := n.listen(ctx)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, s := range servers {
		wg.Go(func() { s.run(ctx) })
	}
	wg.Go(func() { n.feed.run(ctx, n.opts.Client, n.opts.NodeName) })
	wg.Go(func() { n.events.run(ctx) })
	if n.opts.Instead != "" {
		n.events.node(corev1.EventTypeWarning, "ProxyModeFallback", n.opts.Instead)
	}
	if n.opts.Register != nil {
		r := newRegistrar(n.opts, n.status)
		n.status.changed = r.kick
		wg.Go(func() { r.run(ctx) })
	}
	n.loop(ctx)
	n.checks.close()
	wg.Wait()
	return nil
}

// Status returns how the Node does. It may be called at any time.
func (n *Proxy) Status() Status { return n.status.get() }

// Table returns the Table that is programmed, without the ports that were
// refused; nil if nothing was programmed yet.
func (n *Proxy) Table() *table.Table { return n.status.table.Load() }

// Metrics serves the Node's Prometheus metrics.
func (n *Proxy) Metrics() http.Handler { return n.metrics.handler() }

func (n *Proxy) loop(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-n.feed.synced:
	}
	audit := time.NewTicker(n.opts.AuditPeriod)
	defer audit.Stop()
	addresses := time.NewTicker(n.opts.AddressPeriod)
	defer addresses.Stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	n.readAddresses()
	n.waiting = true
	for ctx.Err() == nil {
		if at, ok := n.pace.due(n.waiting || n.audit); ok {
			timer.Reset(time.Until(at))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
		case <-n.feed.wake:
			n.waiting = true
		case <-audit.C:
			n.audit = true
		case <-addresses.C:
			n.waiting = n.readAddresses() || n.waiting
		case <-timer.C:
			n.sync(ctx)
		}
	}
}

// readAddresses takes over the machine's addresses and says whether they
// changed.
func (n *Proxy) readAddresses() bool {
	addrs, err := n.opts.Addresses()
	if err != nil {
		n.log.Warn("cannot read the machine's addresses; node ports stay on those known", "err", err)
		return false
	}
	if slices.Equal(addrs, n.machine) {
		return false
	}
	n.machine = slices.Clone(addrs)
	n.builder.SetAddresses(n.machine)
	return true
}

// sync takes what the feed has and applies it.
func (n *Proxy) sync(ctx context.Context) {
	b := n.feed.take()
	n.metrics.took(&b)
	if node, seen := b.into(n.builder, n.opts.NodeName); seen {
		n.health.setNode(node)
		n.status.setNode(node)
	}
	if !b.oldest.IsZero() {
		n.health.queued(b.oldest)
	}
	n.triggers = append(n.triggers, b.triggers...)
	if over := len(n.triggers) - maxTriggers; over > 0 {
		n.triggers = n.triggers[over:]
	}
	before := n.wanted
	next, keys := n.builder.Build()
	for _, k := range keys {
		n.changed[k] = struct{}{}
	}
	n.wanted, n.waiting = next, false
	n.report(before, keys)

	audit := n.audit && n.applied != nil && !n.failed
	full := n.applied == nil || n.failed || n.audit
	n.audit = false
	if full || n.pace.retry(time.Now()) {
		for k := range n.refused {
			n.changed[k] = struct{}{}
		}
	}
	if !full && len(n.changed) == 0 && next == n.settled {
		n.health.updated(time.Now())
		return
	}
	n.apply(ctx, full, audit)
}

func (n *Proxy) apply(ctx context.Context, full, audit bool) {
	changed := make([]table.Key, 0, len(n.changed))
	for k := range n.changed {
		changed = append(changed, k)
	}
	start := time.Now()
	err := n.applyPlane(ctx, changed, full)
	took := time.Since(start)
	if err != nil && ctx.Err() != nil {
		return // on the way out
	}
	var refused *dataplane.Refused
	failed := err != nil && !errors.As(err, &refused)
	n.pace.done(time.Now(), took, failed)
	n.metrics.applied(took, full, failed)
	if failed {
		n.status.applied(start, took, audit, err, 0)
		if !n.failed {
			n.events.node(corev1.EventTypeWarning, "FailedToProgramServices", err.Error())
		}
		n.failed = true
		n.log.Error("programming services failed", "err", err, "retry in", n.pace.backoff)
		// Most of it may be done. Until all is well each retry does again what
		// follows.
		n.follow(ctx, n.wanted, changed)
		return
	}
	if n.failed || n.applied == nil {
		n.log.Info("services are programmed", "service ports", n.wanted.Len(), "took", took)
	}
	n.failed = false
	n.refuse(refused, changed)
	n.status.applied(start, took, audit, err, len(n.refused))
	if audit {
		n.reportRepairs()
	}
	now := n.wanted
	if len(n.refused) > 0 {
		now = now.Instead(n.applied, maps.Keys(n.refused))
	}
	n.follow(ctx, now, changed)
	for _, t := range n.triggers {
		n.metrics.latency.Observe(time.Since(t).Seconds())
	}
	n.triggers = nil
	n.health.updated(time.Now())
	first := n.applied == nil
	n.applied, n.settled = now, n.wanted
	n.status.table.Store(n.applied)
	clear(n.changed)
	if first && now.Len() > muchToLoad {
		// The lists that all this was made from were several times as large.
		debug.FreeOSMemory()
	}
}

// muchToLoad is the number of service ports from which on it is worth tens of
// milliseconds to give the memory of the load back.
const muchToLoad = 500

// refuse takes over which of the ports that were tried the Plane did not take.
// They do not keep the others from being programmed, and are tried again when it
// is time, or when they change.
func (n *Proxy) refuse(r *dataplane.Refused, tried []table.Key) {
	again := false
	was := n.refused
	n.refused = maps.Clone(was)
	for _, k := range tried {
		delete(n.refused, k)
		_, before := was[k]
		again = again || before
	}
	if r != nil {
		for k, why := range r.Ports {
			n.refused[k] = struct{}{}
			if _, told := was[k]; told {
				continue
			}
			n.log.Error("programming a service port failed", "port", k.ID, "family", k.Family, "err", why)
			n.events.service(k.ID.Name, n.builder.UID(k.ID.Name), corev1.EventTypeWarning, "FailedToProgramService", why.Error())
		}
	}
	n.metrics.refused.Set(float64(len(n.refused)))
	n.pace.refused(time.Now(), len(n.refused) > 0, again)
}

// follow does what comes after an Apply that made the kernel answer as now says:
// stale connections, health check ports, and a word about ports of this node
// that somebody else has.
func (n *Proxy) follow(ctx context.Context, now *table.Table, changed []table.Key) {
	n.removeStale(ctx, now, changed)
	n.checks.update(now, changed)
	for _, problem := range append(n.checks.sync(now.NodePortAddrs), n.taken.look(n.applied, now, changed)...) {
		n.events.service(problem.service, n.builder.UID(problem.service), corev1.EventTypeWarning, problem.reason, problem.err.Error())
	}
}

func (n *Proxy) applyPlane(ctx context.Context, changed []table.Key, full bool) error {
	ctx, cancel := context.WithTimeout(ctx, n.opts.ApplyTimeout)
	defer cancel()
	if full {
		changed = nil
	}
	return n.opts.Plane.Apply(ctx, n.wanted, changed)
}

// report brings counts and problems up to date, and makes an Event of each
// problem that is new.
func (n *Proxy) report(before *table.Table, keys []table.Key) {
	n.status.built(before, n.wanted, keys)
	n.metrics.built(before, n.wanted, keys)
	n.metrics.servicePorts.Set(float64(n.wanted.Len()))
	for name, now := range n.builder.NewProblems() {
		told := n.status.problem(name, now)
		for _, p := range now {
			if !slices.Contains(told, p) {
				n.events.service(p.Service, n.builder.UID(p.Service), corev1.EventTypeWarning, p.Reason, p.Message)
			}
		}
	}
}

// maxListed bounds how many repairs an Event names.
const maxListed = 10

func (n *Proxy) reportRepairs() {
	r, ok := n.opts.Plane.(Repairer)
	if !ok {
		return
	}
	repaired := r.Repaired()
	n.status.repaired(repaired)
	if len(repaired) == 0 {
		return
	}
	n.metrics.repairs.Add(float64(len(repaired)))
	text := strings.Join(repaired[:min(len(repaired), maxListed)], "; ")
	if more := len(repaired) - maxListed; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	n.log.Warn("somebody removed or altered what was programmed; it is back", "what", text)
	n.events.node(corev1.EventTypeWarning, "ServiceRulesRepaired", "removed or altered by somebody else, now back: "+text)
}

// serviceProblem is something about a Service that only this node can know.
type serviceProblem struct {
	service svc.Name
	reason  string
	err     error
}
