// Package cache is the step that keeps answers, as CoreDNS's plugin cache does.
package cache

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// Cache keeps the answers of the steps behind it.
type Cache struct {
	c                *corefile.Cache
	next             plugin.Handler
	success, denials *store
	now              func() time.Time
	Stats            Stats

	ctx context.Context // of Run; ends fetches in the background
	mu  sync.Mutex
	wg  sync.WaitGroup
	sem chan struct{} // bounds the fetches in the background
}

// Stats are the counters of a Cache.
type Stats struct {
	Requests, Misses, HitsSuccess, HitsDenial, Stale, Prefetch, Drops atomic.Uint64
}

// maxBackground is how many answers are fetched in the background at once.
const maxBackground = 100

// New returns the step. Fetches in the background begin with Run.
func New(c *corefile.Cache, next plugin.Handler) *Cache {
	return &Cache{
		c: c, next: next, success: newStore(c.Success.Capacity), denials: newStore(c.Denial.Capacity), now: time.Now,
		sem: make(chan struct{}, maxBackground),
	}
}

// Run allows fetches in the background until ctx ends, and waits for them.
func (c *Cache) Run(ctx context.Context) {
	c.mu.Lock()
	c.ctx = ctx
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	c.ctx = nil
	c.mu.Unlock()
	c.wg.Wait()
}

// Entries returns the number of kept answers and denials, Evictions how many gave way to others.
func (c *Cache) Entries() (success, denials int) { return c.success.len(), c.denials.len() }

// Evictions returns the number of answers and denials that gave way to others.
func (c *Cache) Evictions() (success, denials uint64) {
	return c.success.evictions.Load(), c.denials.evictions.Load()
}

// Zones returns the zones of the cache, for the label of its metrics.
func (c *Cache) Zones() string { return strings.Join(c.c.Zones, ",") }

// Answer answers from the cache, or keeps the answer of the next step.
func (c *Cache) Answer(ctx context.Context, q *plugin.Query) plugin.Reply {
	name := q.Name()
	if q.Msg.Opcode != mdns.OpcodeQuery || corefile.LongestZone(name, c.c.Zones) == "" {
		return c.next.Answer(ctx, q)
	}
	c.Stats.Requests.Add(1)
	now := c.now()
	k := keyOf(q, name)
	e := c.find(k, now)
	if e == nil {
		c.Stats.Misses.Add(1)
		return c.fetch(ctx, q, k)
	}
	left := e.left(now)
	if left > 0 {
		c.prefetch(q, k, e, now, left)
	} else {
		if r, ok := c.refresh(ctx, q, k, e); ok {
			return r
		}
		c.Stats.Stale.Add(1)
		left = time.Duration(c.c.StaleTTL) * time.Second
	}
	if c.c.KeepTTL && e.left(now) > 0 {
		left = e.ttl
	}
	return plugin.Reply{Msg: e.reply(q, left), Plugin: "cache"}
}

// find returns the usable entry of a key. A positive answer is preferred to a kept failure.
func (c *Cache) find(k key, now time.Time) *entry {
	usable := func(e *entry) bool {
		left := e.left(now)
		return left > 0 || c.c.StaleFor > 0 && -left < c.c.StaleFor
	}
	success, denial := c.success.get(k), c.denials.get(k)
	if success != nil && !usable(success) {
		success = nil
	}
	if denial != nil && !usable(denial) {
		denial = nil
	}
	switch {
	case denial != nil && (success == nil || denial.msg.Rcode != mdns.RcodeServerFailure):
		c.Stats.HitsDenial.Add(1)
		return denial
	case success != nil:
		c.Stats.HitsSuccess.Add(1)
	}
	return success
}

// fetch asks the next step and keeps its answer.
func (c *Cache) fetch(ctx context.Context, q *plugin.Query, k key) plugin.Reply {
	do, ad := q.DO(), q.Msg.AuthenticatedData
	// The flag AD asks for the flag AD in the answer, which is kept for others (RFC 6840, 5.7).
	q.Msg.AuthenticatedData = true
	r := c.next.Answer(ctx, q)
	q.Msg.AuthenticatedData = ad
	switch {
	case r.Msg != nil:
		c.keep(k, q, r.Msg)
		if !do && !ad {
			r.Msg.AuthenticatedData = false
		}
	case r.Rcode == mdns.RcodeServerFailure && r.Err != nil && !errors.Is(r.Err, plugin.ErrNotReady) && ctx.Err() == nil && !r.Drop:
		c.keep(k, q, new(mdns.Msg).SetRcode(q.Msg, r.Rcode))
	}
	return r
}

// keep bounds the TTLs of an answer by the time it is kept, and keeps it.
func (c *Cache) keep(k key, q *plugin.Query, m *mdns.Msg) {
	kind := plugin.KindOf(m)
	to, limits := c.success, &c.c.Success
	ttl := time.Duration(0)
	switch kind {
	case plugin.NoName, plugin.NoData:
		to, limits = c.denials, &c.c.Denial
		ttl = clamp(plugin.TTL(m, limits.MaxTTL), limits)
	case plugin.Failure:
		to, limits = c.denials, &c.c.Denial
		ttl = c.c.ServFail
	case plugin.Positive:
		ttl = clamp(plugin.TTL(m, limits.MaxTTL), limits)
	default:
		// As in CoreDNS, whose shortest TTL stands for all others.
		ttl = clamp(limits.MinTTL, limits)
	}
	m.Extra = withoutOPT(m.Extra)
	plugin.EachRR(m, func(rr mdns.RR) { rr.Header().Ttl = uint32(ttl / time.Second) })
	if ttl <= 0 || !c.keepable(kind, q, m) || corefile.LongestZone(q.Name(), limits.Except) != "" {
		return
	}
	to.put(k, &entry{msg: m.Copy(), ttl: ttl, stored: c.now()})
	if to == c.success {
		c.denials.remove(k)
	}
}

// keepable reports whether an answer may be kept: it is whole, it answers the question, and
// a denial has the SOA record that bounds it (RFC 2308, 5).
func (c *Cache) keepable(kind plugin.Kind, q *plugin.Query, m *mdns.Msg) bool {
	switch {
	case m.Truncated, kind == plugin.Unkeepable, len(m.Question) != 1, kind == plugin.NoName && !plugin.HasSOA(m):
		return false
	case kind == plugin.Positive && len(m.Answer) > 0 && !plugin.HasSOA(m) && !ends(q, m):
		return false
	}
	asked := m.Question[0]
	if !strings.EqualFold(asked.Name, q.Question().Name) || asked.Qtype != q.Type() || asked.Qclass != q.Question().Qclass {
		c.Stats.Drops.Add(1)
		return false
	}
	return true
}

// ends reports whether the CNAME records of an answer lead to a record of the type.
func ends(q *plugin.Query, m *mdns.Msg) bool {
	typ := q.Type()
	for _, rr := range m.Answer {
		if t := rr.Header().Rrtype; t == typ || typ == mdns.TypeANY || t == mdns.TypeDNAME && typ != mdns.TypeCNAME {
			return true
		}
	}
	return false
}

func clamp(d time.Duration, l *corefile.CacheLimits) time.Duration {
	return min(max(d, l.MinTTL), l.MaxTTL)
}

// refresh asks the next step for an expired answer: in the background, or with StaleVerify
// first, and then reports whether there is an answer in time.
func (c *Cache) refresh(ctx context.Context, q *plugin.Query, k key, e *entry) (plugin.Reply, bool) {
	again := q.With(q.Msg.Copy())
	if !c.c.StaleVerify {
		c.background(again, k, e, func(plugin.Reply) {})
		return plugin.Reply{}, false
	}
	if c.c.StaleWait == 0 {
		r := c.fetch(ctx, again, k)
		return r, fresh(r)
	}
	done := make(chan plugin.Reply, 1)
	if !c.background(again, k, e, func(r plugin.Reply) { done <- r }) {
		return plugin.Reply{}, false
	}
	wait := time.NewTimer(c.c.StaleWait)
	defer wait.Stop()
	select {
	case r := <-done:
		return r, fresh(r)
	case <-wait.C:
	case <-ctx.Done():
	}
	return plugin.Reply{}, false
}

// fresh reports whether a reply is better than an expired one.
func fresh(r plugin.Reply) bool {
	return r.Msg != nil && r.Msg.Rcode != mdns.RcodeServerFailure && !r.Msg.Truncated
}

// prefetch fetches an answer in frequent use again before it expires.
func (c *Cache) prefetch(q *plugin.Query, k key, e *entry, now time.Time, left time.Duration) {
	if c.c.PrefetchHits == 0 {
		return
	}
	if e.used(now, c.c.PrefetchWithin) < int64(c.c.PrefetchHits) || left*100 > e.ttl*time.Duration(c.c.PrefetchPercent) {
		return
	}
	if c.background(q.With(q.Msg.Copy()), k, e, func(plugin.Reply) {}) {
		c.Stats.Prefetch.Add(1)
	}
}

// fetchTimeout bounds a fetch in the background.
const fetchTimeout = 10 * time.Second

// background fetches an answer without a client that waits, once for each entry at a time.
func (c *Cache) background(q *plugin.Query, k key, e *entry, done func(plugin.Reply)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx == nil || !e.fetching.CompareAndSwap(false, true) {
		return false
	}
	select {
	case c.sem <- struct{}{}:
	default:
		e.fetching.Store(false)
		return false
	}
	ctx := c.ctx
	c.wg.Go(func() {
		defer func() { <-c.sem }()
		defer e.fetching.Store(false)
		ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
		defer cancel()
		done(c.fetch(ctx, q, k))
	})
	return true
}
