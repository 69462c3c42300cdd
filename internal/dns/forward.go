package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fairlead/fairlead/internal/zone"
)

const (
	// budget is the time for all attempts at one question.
	budget = 5 * time.Second
	// probeEvery is the time between questions to an unhealthy upstream.
	probeEvery = 500 * time.Millisecond
	// maxWaiters bounds the clients that wait for the same answer.
	maxWaiters = 1000
	// staleAfter is how long a client waits for an upstream while there is a
	// stale answer (RFC 8767, section 5).
	staleAfter = 1800 * time.Millisecond
	// retryStale is how long, in seconds, a stale answer is served before the
	// upstreams are tried again.
	retryStale = 10
	// failureTTL is how long, in seconds, a failure is cached (RFC 9520, 3.2).
	failureTTL = 1
)

// forwarder resolves questions at upstreams. Questions equal to one in flight
// wait for its answer.
type forwarder struct {
	log     *slog.Logger
	cache   *cache
	mixCase bool
	inOrder bool
	timeout time.Duration
	groups  []group // stubs, the most specific first
	overTLS []*upstream
	main    atomic.Pointer[[]*upstream]
	metrics forwardStats

	ctx context.Context // of run; ends all lookups
	wg  sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	inflight map[string]*lookup // by ask.key
	shares   shares             // of inflight, by the client that asked first
	byAddr   map[netip.AddrPort]*upstream
}

// group is the upstreams of a stub domain.
type group struct {
	domain    []byte
	labels    int
	upstreams []*upstream
}

// lookup is a question in flight.
type lookup struct {
	client  netip.Addr // the one that asked first
	waiters []func(result)
	shares  shares // of waiters, once there is a second one
}

// result is what a lookup found; e is nil if it found nothing.
type result struct {
	e     *entry
	age   uint32
	stale bool
}

func newForwarder(o Options) (*forwarder, error) {
	f := &forwarder{
		log:      o.Logger,
		cache:    newCache(o.CacheSize, int64(o.Stale/time.Second)),
		mixCase:  !o.PlainCase,
		inOrder:  o.Sequential,
		timeout:  o.Timeout,
		inflight: map[string]*lookup{},
		shares:   newShares(o.MaxInFlight),
		byAddr:   map[netip.AddrPort]*upstream{},
	}
	for _, t := range o.TLSUpstream {
		if !t.Addr.IsValid() {
			return nil, errors.New("dns: an upstream over TLS has no address")
		}
		f.overTLS = append(f.overTLS, newTLSUpstream(t))
	}
	f.setMain(o.Upstream)
	for _, s := range o.Stubs {
		var n zone.Name
		if err := n.ParseText(s.Domain); err != nil || len(s.Servers) == 0 {
			return nil, fmt.Errorf("dns: stub domain %q needs a domain name and at least one server", s.Domain)
		}
		g := group{domain: slices.Clone(n.Wire()), labels: n.Labels(), upstreams: f.upstreamsAt(s.Servers)}
		at := 0
		for at < len(f.groups) && f.groups[at].labels >= g.labels {
			at++
		}
		f.groups = slices.Insert(f.groups, at, g)
	}
	return f, nil
}

// setMain replaces the upstreams of all names that are in no stub domain.
func (f *forwarder) setMain(addrs []netip.AddrPort) {
	us := append(slices.Clone(f.overTLS), f.upstreamsAt(addrs)...)
	f.main.Store(&us)
}

// upstreamsAt returns the upstreams at the addresses. The state of each is kept
// as long as the process runs.
func (f *forwarder) upstreamsAt(addrs []netip.AddrPort) []*upstream {
	f.mu.Lock()
	defer f.mu.Unlock()
	us := make([]*upstream, 0, len(addrs))
	for _, a := range addrs {
		if f.byAddr[a] == nil {
			f.byAddr[a] = newUpstream(a)
		}
		if !slices.Contains(us, f.byAddr[a]) {
			us = append(us, f.byAddr[a])
		}
	}
	return us
}

// upstreams returns the upstreams for a name.
func (f *forwarder) upstreams(n *zone.Name) []*upstream {
	for i := range f.groups {
		if g := &f.groups[i]; n.HasSuffix(g.domain, g.labels) {
			return g.upstreams
		}
	}
	return *f.main.Load()
}

// all returns the upstreams of all groups, each once.
func (f *forwarder) all() []*upstream {
	out := slices.Clone(*f.main.Load())
	for _, g := range f.groups {
		for _, u := range g.upstreams {
			if !slices.Contains(out, u) {
				out = append(out, u)
			}
		}
	}
	return out
}

// open allows lookups until ctx ends.
func (f *forwarder) open(ctx context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ctx, f.closed = ctx, false
}

// close ends all lookups and waits for them.
func (f *forwarder) close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.wg.Wait()
	for _, u := range f.overTLS {
		u.idle.closeAll()
	}
}

// spawn runs f on a new goroutine, or not at all after close.
func (f *forwarder) spawn(do func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.wg.Go(do)
	return true
}

// lookup asks for a at the upstreams and calls done once with the result, on
// another goroutine; a.name must not change until then. It returns false, and
// done is never called, when too many questions are in flight or the client has
// its share of them. The invalid client is the server itself.
func (f *forwarder) lookup(a ask, client netip.Addr, upstreams []*upstream, done func(result)) bool {
	key := a.key()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.ctx == nil {
		return false
	}
	if l := f.inflight[key]; l != nil {
		if l.shares.by == nil {
			l.shares = newShares(maxWaiters)
			l.shares.add(l.client)
		}
		if !f.admit(&l.shares, client) {
			return false
		}
		l.waiters = append(l.waiters, done)
		return true
	}
	if !f.admit(&f.shares, client) {
		return false
	}
	f.inflight[key] = &lookup{client: client, waiters: []func(result){done}}
	f.wg.Add(1)
	go f.run(key, a, upstreams)
	return true
}

// admit takes a place for a question of the client, or counts its rejection.
func (f *forwarder) admit(s *shares, client netip.Addr) bool {
	full := s.full()
	if s.take(client) {
		return true
	}
	f.metrics.rejects.Add(1)
	if !full {
		f.metrics.clientRejects.Add(1)
	}
	return false
}

// run resolves one question and passes the answer to all who wait for it.
func (f *forwarder) run(key string, a ask, upstreams []*upstream) {
	defer f.wg.Done()
	soon := time.AfterFunc(staleAfter, func() { f.serveStale(key, false) })
	e := f.resolve(f.ctx, a, upstreams)
	soon.Stop()
	now := time.Now().Unix()
	if e != nil && e.rcode != rcodeServFail {
		f.cache.put(key, e, now)
	} else if f.serveStale(key, true) {
		return
	} else if e == nil {
		f.cache.put(key, &entry{rcode: rcodeServFail, ttl: failureTTL, negative: true}, now)
	} else {
		f.cache.put(key, e, now)
	}
	for _, done := range f.takeWaiters(key, true) {
		done(result{e: e})
	}
}

// takeWaiters takes the waiters of a question, which is no longer in flight if
// finish is set.
func (f *forwarder) takeWaiters(key string, finish bool) []func(result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.inflight[key]
	if l == nil {
		return nil
	}
	if finish {
		delete(f.inflight, key)
		f.shares.release(l.client)
	}
	w := l.waiters
	l.waiters, l.shares = nil, shares{}
	return w
}

// serveStale passes an expired answer, if there is one, to all who wait.
func (f *forwarder) serveStale(key string, finish bool) bool {
	now := time.Now().Unix()
	e, age, stale := f.cache.get([]byte(key), now)
	if e == nil || !stale {
		return false
	}
	e.retry.Store(now + retryStale)
	for _, done := range f.takeWaiters(key, finish) {
		f.metrics.stale.Add(1)
		done(result{e, age, true})
	}
	return true
}

// resolve asks one upstream after the other until one answers. An error answer
// (SERVFAIL, REFUSED, NOTIMP, FORMERR) is returned only if no upstream has
// another.
func (f *forwarder) resolve(ctx context.Context, a ask, upstreams []*upstream) *entry {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	var fallback *entry
	for _, u := range f.order(upstreams) {
		e, err := f.try(ctx, u, a)
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			f.log.Debug("no answer from an upstream", "upstream", u.name, "err", err)
			continue
		}
		switch e.rcode {
		case rcodeServFail, rcodeRefused, rcodeNotImp, rcodeFormErr:
			fallback = e
			continue
		}
		return e
	}
	return fallback
}

// order returns the healthy upstreams in the order to ask them. If none is
// healthy, the health checks may be wrong, and it returns a random one.
func (f *forwarder) order(us []*upstream) []*upstream {
	out := make([]*upstream, 0, len(us))
	for _, u := range us {
		if u.healthy() {
			out = append(out, u)
		}
	}
	if len(out) == 0 {
		for _, u := range us {
			if !u.looped.Load() {
				out = append(out, u)
			}
		}
		if len(out) == 0 {
			return nil
		}
		f.metrics.broken.Add(1)
		i := rand.IntN(len(out))
		return out[i : i+1]
	}
	if n := len(out); n > 1 && !f.inOrder {
		first := rand.IntN(n)
		out = append(out[first:n:n], out[:first]...)
	} else if n == 1 {
		// One lost packet must not fail the question.
		out = append(out, out[0])
	}
	return out
}

// try asks u and updates its health.
func (f *forwarder) try(ctx context.Context, u *upstream, a ask) (*entry, error) {
	start := time.Now()
	e, err := u.exchange(ctx, a, f.mixCase, f.timeout)
	if err == nil && (e.rcode == rcodeFormErr || e.rcode == rcodeNotImp) && !u.noEDNS.Load() {
		// RFC 6891, section 7: it may not support EDNS.
		u.noEDNS.Store(true)
		if e2, err2 := u.exchange(ctx, a, f.mixCase, f.timeout); err2 == nil && e2.rcode != e.rcode {
			e = e2
		} else {
			u.noEDNS.Store(false)
		}
	}
	if err != nil {
		if errors.Is(err, errBadReply) {
			f.metrics.malformed.Add(1)
		}
		if ctx.Err() == nil || time.Since(start) >= f.timeout {
			if u.fails.Add(1) == maxFails {
				f.log.Warn("upstream does not answer; it is asked last until it does", "upstream", u.name, "err", err)
			}
			u.stats.failures.Add(1)
		}
		return nil, err
	}
	u.fails.Store(0)
	u.stats.observe(int(e.rcode), time.Since(start))
	return e, nil
}

// probe asks unhealthy upstreams until they answer, and ends with ctx.
func (f *forwarder) probe(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		for _, u := range f.all() {
			if u.fails.Load() < maxFails || u.looped.Load() || !u.stats.probing.CompareAndSwap(false, true) {
				continue
			}
			wg.Go(func() {
				defer u.stats.probing.Store(false)
				// Any answer at all makes it healthy.
				_, err := u.exchange(ctx, ask{name: []byte{0}, typ: typeNS}, false, f.timeout)
				if err == nil || errors.Is(err, errTruncated) {
					f.log.Info("upstream is healthy again", "upstream", u.name)
					u.fails.Store(0)
				} else {
					u.stats.failures.Add(1)
				}
			})
		}
	}, probeEvery)
}
