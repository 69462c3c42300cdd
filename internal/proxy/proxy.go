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

// Proxy keeps the kernel of one node in step with the Services of the API.
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
	p := &Proxy{
		opts: opts, log: opts.Log, feed: newFeed(), metrics: newMetrics(),
		status:  newStatus(opts.NodeName, opts.Mode),
		health:  &proxyHealth{timeout: opts.HealthTimeout, eligible: true},
		builder: table.NewBuilder(opts.tableConfig()),
		pace:    pace{minInterval: opts.MinInterval, maxInterval: opts.MaxInterval, retryMin: opts.RetryMin, retryMax: opts.RetryMax},
		changed: map[table.Key]struct{}{},
		refused: map[table.Key]struct{}{},
		taken:   &takenPorts{taken: opts.PortTaken},
	}
	if c, ok := opts.Dataplane.(dataplane.Counter); ok {
		p.metrics.registry.MustRegister(newLostPackets(c, p.Table, opts.Log))
	}
	if c, ok := opts.Dataplane.(dataplane.Carrier); ok {
		p.metrics.registry.MustRegister(newCarried(c))
	}
	p.events = newRecorder(opts.Client, opts.NodeName, opts.Log)
	p.checks = newHealthPorts(p.health.healthy, opts.NodePortAddresses.IsDefault())
	return p, nil
}

// Run watches the API and keeps the kernel in step with it until ctx ends, and
// until everything it started has ended, too. What is in the kernel then stays.
// Its error says why it could not start.
func (p *Proxy) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	servers, err := p.listen(ctx)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, s := range servers {
		wg.Go(func() { s.run(ctx) })
	}
	wg.Go(func() { p.feed.run(ctx, p.opts.Client, p.opts.NodeName) })
	defer p.events.Start()()
	if p.opts.FallbackReason != "" {
		p.events.node(corev1.EventTypeWarning, "ProxyModeFallback", p.opts.FallbackReason)
	}
	p.loop(ctx)
	p.checks.close()
	wg.Wait()
	return nil
}

// Status returns what the proxy has done and what is wrong. It is safe for
// concurrent use, as are Node, Changed, Table and Metrics.
func (p *Proxy) Status() Status { return p.status.get() }

// Table returns the Table that is programmed, without the ports that were
// refused; nil if nothing was programmed yet.
func (p *Proxy) Table() *table.Table { return p.status.table.Load() }

// Node returns this machine's Node as last seen, nil if there is none.
func (p *Proxy) Node() *corev1.Node { return p.status.ownNode() }

// Changed holds a token when Node, or the condition of Status, may have changed
// since the last receive. It is for one receiver.
func (p *Proxy) Changed() <-chan struct{} { return p.status.changed }

// Metrics serves the proxy's Prometheus metrics.
func (p *Proxy) Metrics() http.Handler { return p.metrics.handler() }

func (p *Proxy) loop(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-p.feed.synced:
	}
	audit := time.NewTicker(p.opts.AuditPeriod)
	defer audit.Stop()
	addresses := time.NewTicker(p.opts.AddressPeriod)
	defer addresses.Stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
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
		case <-audit.C:
			p.audit = true
		case <-addresses.C:
			p.waiting = p.readAddresses() || p.waiting
		case <-timer.C:
			p.sync(ctx)
		}
	}
}

// readAddresses takes over the machine's addresses and says whether they
// changed.
func (p *Proxy) readAddresses() bool {
	addrs, err := p.opts.Addresses()
	if err != nil {
		p.log.Warn("cannot read the machine's addresses; node ports stay on those known", "err", err)
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
	p.metrics.took(&b)
	if node, seen := b.into(p.builder, p.opts.NodeName); seen {
		p.health.setNode(node)
		p.status.setNode(node)
	}
	if !b.oldest.IsZero() {
		p.health.queued(b.oldest)
	}
	p.triggers = append(p.triggers, b.triggers...)
	if over := len(p.triggers) - maxTriggers; over > 0 {
		p.triggers = p.triggers[over:]
	}
	before := p.wanted
	next, keys := p.builder.Build()
	for _, k := range keys {
		p.changed[k] = struct{}{}
	}
	p.wanted, p.waiting = next, false
	p.report(before, keys)

	audit := p.audit && p.applied != nil && !p.failed
	full := p.applied == nil || p.failed || p.audit
	p.audit = false
	if full || p.pace.retry(time.Now()) {
		for k := range p.refused {
			p.changed[k] = struct{}{}
		}
	}
	if !full && len(p.changed) == 0 && next == p.settled {
		p.health.updated(time.Now())
		return
	}
	p.apply(ctx, full, audit)
}

func (p *Proxy) apply(ctx context.Context, full, audit bool) {
	changed := make([]table.Key, 0, len(p.changed))
	for k := range p.changed {
		changed = append(changed, k)
	}
	start := time.Now()
	err := p.applyPlane(ctx, changed, full)
	took := time.Since(start)
	if err != nil && ctx.Err() != nil {
		return // on the way out
	}
	var refused *dataplane.Rejected
	failed := err != nil && !errors.As(err, &refused)
	p.pace.done(time.Now(), took, failed)
	p.metrics.applied(took, full, failed)
	if failed {
		p.status.applied(start, took, audit, err, 0)
		if !p.failed {
			p.events.node(corev1.EventTypeWarning, "FailedToProgramServices", err.Error())
		}
		p.failed = true
		p.log.Error("programming services failed", "err", err, "retry in", p.pace.backoff)
		// Most of it may be done. Until all is well each retry does again what
		// follows.
		p.follow(ctx, p.wanted, changed)
		return
	}
	if p.failed || p.applied == nil {
		p.log.Info("services are programmed", "service ports", p.wanted.Len(), "took", took)
	}
	p.failed = false
	p.refuse(refused, changed)
	p.status.applied(start, took, audit, err, len(p.refused))
	if audit {
		p.reportRepairs()
	}
	now := p.wanted
	if len(p.refused) > 0 {
		now = now.WithPortsFrom(p.applied, maps.Keys(p.refused))
	}
	p.follow(ctx, now, changed)
	for _, t := range p.triggers {
		p.metrics.latency.Observe(time.Since(t).Seconds())
	}
	p.triggers = nil
	p.health.updated(time.Now())
	first := p.applied == nil
	p.applied, p.settled = now, p.wanted
	p.status.table.Store(p.applied)
	clear(p.changed)
	if first && now.Len() > muchToLoad {
		// The lists that all this was made from were several times as large.
		debug.FreeOSMemory()
	}
}

// muchToLoad is the number of service ports from which on it is worth tens of
// milliseconds to give the memory of the load back.
const muchToLoad = 500

// refuse takes over which of the ports that were tried the Applier did not take.
// They do not keep the others from being programmed, and are tried again when it
// is time, or when they change.
func (p *Proxy) refuse(r *dataplane.Rejected, tried []table.Key) {
	again := false
	was := p.refused
	p.refused = maps.Clone(was)
	for _, k := range tried {
		delete(p.refused, k)
		_, before := was[k]
		again = again || before
	}
	if r != nil {
		for k, why := range r.Ports {
			p.refused[k] = struct{}{}
			if _, told := was[k]; told {
				continue
			}
			p.log.Error("programming a service port failed", "port", k.ID, "family", k.Family, "err", why)
			p.events.service(k.ID.Name, p.builder.UID(k.ID.Name), corev1.EventTypeWarning, "FailedToProgramService", why.Error())
		}
	}
	p.metrics.refused.Set(float64(len(p.refused)))
	p.pace.refused(time.Now(), len(p.refused) > 0, again)
}

// follow does what comes after an Apply that made the kernel answer as now says:
// stale connections, health check ports, and a word about ports of this node
// that somebody else has.
func (p *Proxy) follow(ctx context.Context, now *table.Table, changed []table.Key) {
	p.removeStale(ctx, now, changed)
	p.checks.update(now, changed)
	for _, problem := range append(p.checks.sync(now.NodePortAddrs), p.taken.look(p.applied, now, changed)...) {
		p.events.service(problem.service, p.builder.UID(problem.service), corev1.EventTypeWarning, problem.reason, problem.err.Error())
	}
}

func (p *Proxy) applyPlane(ctx context.Context, changed []table.Key, full bool) error {
	ctx, cancel := context.WithTimeout(ctx, p.opts.ApplyTimeout)
	defer cancel()
	if full {
		changed = nil
	}
	return p.opts.Dataplane.Apply(ctx, p.wanted, changed)
}

// report brings counts and problems up to date, and makes an Event of each
// problem that is new.
func (p *Proxy) report(before *table.Table, keys []table.Key) {
	p.status.built(before, p.wanted, keys)
	p.metrics.built(before, p.wanted, keys)
	p.metrics.servicePorts.Set(float64(p.wanted.Len()))
	for name, now := range p.builder.NewProblems() {
		told := p.status.problem(name, now)
		for _, problem := range now {
			if !slices.Contains(told, problem) {
				p.events.service(problem.Service, p.builder.UID(problem.Service), corev1.EventTypeWarning, problem.Reason, problem.Message)
			}
		}
	}
}

// maxListed bounds how many repairs an Event names.
const maxListed = 10

func (p *Proxy) reportRepairs() {
	r, ok := p.opts.Dataplane.(Repairer)
	if !ok {
		return
	}
	repaired := r.Repaired()
	p.status.repaired(repaired)
	if len(repaired) == 0 {
		return
	}
	p.metrics.repairs.Add(float64(len(repaired)))
	text := strings.Join(repaired[:min(len(repaired), maxListed)], "; ")
	if more := len(repaired) - maxListed; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	p.log.Warn("somebody removed or altered what was programmed; it is back", "what", text)
	p.events.node(corev1.EventTypeWarning, "ServiceRulesRepaired", "removed or altered by somebody else, now back: "+text)
}

// serviceProblem is something about a Service that only this node can know.
type serviceProblem struct {
	service svc.Name
	reason  string
	err     error
}
