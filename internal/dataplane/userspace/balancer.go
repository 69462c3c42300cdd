package userspace

import (
	"container/list"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/table"
)

const (
	// maxAvoid bounds for how many times Config.Avoid an endpoint is avoided.
	maxAvoid = 16
	// maxClients bounds the clients that a balancer remembers: a flood of sources
	// must not fill the machine's memory. The one that was silent for the
	// longest time is forgotten first.
	maxClients = 1 << 16
)

// balancer is the endpoints of a listener, and how one is chosen: a relay.Target.
type balancer struct {
	random bool
	avoid  time.Duration

	mu        sync.Mutex
	endpoints []netip.AddrPort // sorted
	kept      []netip.AddrPort // sorted: UDP clients may stay there, too
	next      int
	affinity  time.Duration
	sticky    map[netip.Addr]*list.Element // of *client
	recent    *list.List                   // of *client, the latest first
	failing   map[netip.AddrPort]failure
	// allFailing counts the entries of failing in all targets, counted are those
	// of this one in it. A balancer that is retired counts no more.
	allFailing *atomic.Int64
	counted    int
	retired    bool
}

// client is one with affinity.
type client struct {
	addr     netip.Addr
	endpoint netip.AddrPort
	last     time.Time
}

// failure is what is remembered of an endpoint that did not answer.
type failure struct {
	until time.Time // it is avoided
	avoid time.Duration
	trial bool // a connection tries it since
}

func newBalancer(cfg *Config, allFailing *atomic.Int64) *balancer {
	return &balancer{
		random: cfg.Random, avoid: cfg.Avoid, allFailing: allFailing,
		sticky: map[netip.Addr]*list.Element{}, recent: list.New(), failing: map[netip.AddrPort]failure{},
	}
}

// set replaces the endpoints, the ones that UDP clients may keep, and the time of
// affinity.
func (b *balancer) set(endpoints, kept []table.Endpoint, affinity time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.endpoints, b.kept = sorted(endpoints), sorted(kept)
	for ep := range b.failing {
		if !b.serves(ep) {
			delete(b.failing, ep)
		}
	}
	b.count()
	if b.affinity = affinity; affinity == 0 {
		clear(b.sticky)
		b.recent.Init()
	}
}

func sorted(endpoints []table.Endpoint) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(endpoints))
	for _, e := range endpoints {
		out = append(out, e.Addr)
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// Pick is relay.Target's: the endpoint that the client had last, or the next
// one in turn. Those that lately did not answer come after all others.
func (b *balancer) Pick(from netip.Addr, tried []netip.AddrPort) (ep netip.AddrPort, others bool) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	ep, known := b.known(from, tried, now)
	if !known {
		if ep = b.choose(tried, now); !ep.IsValid() {
			return ep, false
		}
	}
	if f, failed := b.failing[ep]; failed && !now.Before(f.until) {
		// One connection finds out whether it answers again; the others need
		// not wait for that.
		f.until, f.trial = now.Add(f.avoid), true
		b.failing[ep] = f
	}
	if b.affinity > 0 {
		b.remember(from, ep, now)
	}
	return ep, slices.ContainsFunc(b.endpoints, func(o netip.AddrPort) bool { return o != ep && !slices.Contains(tried, o) })
}

// known is the endpoint that a client with affinity stays at.
func (b *balancer) known(from netip.Addr, tried []netip.AddrPort, now time.Time) (netip.AddrPort, bool) {
	e := b.sticky[from]
	if e == nil {
		return netip.AddrPort{}, false
	}
	c := e.Value.(*client)
	stays := now.Sub(c.last) < b.affinity && b.serves(c.endpoint) && !slices.Contains(tried, c.endpoint) && !b.avoided(c.endpoint, now)
	return c.endpoint, stays
}

func (b *balancer) choose(tried []netip.AddrPort, now time.Time) netip.AddrPort {
	n := len(b.endpoints)
	if n == 0 {
		return netip.AddrPort{}
	}
	first := b.next
	if b.random {
		first = rand.IntN(n)
	}
	var second netip.AddrPort
	for i := range n {
		at := (first + i) % n
		ep := b.endpoints[at]
		switch {
		case slices.Contains(tried, ep):
		case b.avoided(ep, now):
			if !second.IsValid() {
				second = ep
			}
		default:
			b.next = (at + 1) % n
			return ep
		}
	}
	return second
}

func (b *balancer) avoided(ep netip.AddrPort, now time.Time) bool {
	return len(b.failing) > 0 && now.Before(b.failing[ep].until)
}

func (b *balancer) remember(from netip.Addr, ep netip.AddrPort, now time.Time) {
	if e := b.sticky[from]; e != nil {
		c := e.Value.(*client)
		c.endpoint, c.last = ep, now
		b.recent.MoveToFront(e)
		return
	}
	for oldest := b.recent.Back(); oldest != nil; oldest = b.recent.Back() {
		c := oldest.Value.(*client)
		if len(b.sticky) < maxClients && now.Sub(c.last) < b.affinity {
			break
		}
		b.recent.Remove(oldest)
		delete(b.sticky, c.addr)
	}
	b.sticky[from] = b.recent.PushFront(&client{from, ep, now})
}

// Answered is relay.Target's.
func (b *balancer) Answered(ep netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.failing) > 0 {
		delete(b.failing, ep)
		b.count()
	}
}

// Failed is relay.Target's: the endpoint is avoided for a while.
func (b *balancer) Failed(ep netip.AddrPort) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.serves(ep) {
		return
	}
	f, again := b.failing[ep]
	switch {
	case !again:
		f.avoid = b.avoid
	case !f.trial:
		return // under way when the first one failed, or without a choice
	default:
		f.avoid = min(2*f.avoid, maxAvoid*b.avoid)
	}
	f.until, f.trial = now.Add(f.avoid), false
	b.failing[ep] = f
	b.count()
}

// count brings allFailing up to date.
func (b *balancer) count() {
	n := len(b.failing)
	if b.retired {
		n = 0
	}
	b.allFailing.Add(int64(n - b.counted))
	b.counted = n
}

// retire takes the balancer out of allFailing. Connections that are waiting
// already still find their endpoints by it.
func (b *balancer) retire() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.retired = true
	b.count()
}

// Serves is relay.Target's.
func (b *balancer) Serves(ep netip.AddrPort) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, kept := slices.BinarySearchFunc(b.kept, ep, netip.AddrPort.Compare)
	return kept || b.serves(ep)
}

func (b *balancer) serves(ep netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(b.endpoints, ep, netip.AddrPort.Compare)
	return found
}

// String names the endpoints.
func (b *balancer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Sprint(b.endpoints)
}
