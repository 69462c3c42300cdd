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
	// maxClients bounds the clients that a target remembers: a flood of sources
	// must not fill the machine's memory. The one that was silent for the
	// longest time is forgotten first.
	maxClients = 1 << 16
)

// target is the endpoints of a listener, and how one is chosen: a relay.Target.
type target struct {
	random bool
	avoid  time.Duration

	mu        sync.Mutex
	endpoints []netip.AddrPort // sorted
	next      int
	affinity  time.Duration
	sticky    map[netip.Addr]*list.Element // of *client
	recent    *list.List                   // of *client, the latest first
	failing   map[netip.AddrPort]failure
	// allFailing counts the entries of failing in all targets, counted are those
	// of this one in it. A target that is retired counts no more.
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

func newTarget(cfg *Config, allFailing *atomic.Int64) *target {
	return &target{
		random: cfg.Random, avoid: cfg.Avoid, allFailing: allFailing,
		sticky: map[netip.Addr]*list.Element{}, recent: list.New(), failing: map[netip.AddrPort]failure{},
	}
}

// set replaces the endpoints and the time of affinity.
func (t *target) set(endpoints []table.Endpoint, affinity time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endpoints = make([]netip.AddrPort, 0, len(endpoints))
	for _, e := range endpoints {
		t.endpoints = append(t.endpoints, e.Addr)
	}
	slices.SortFunc(t.endpoints, netip.AddrPort.Compare)
	t.endpoints = slices.Compact(t.endpoints)
	for ep := range t.failing {
		if !t.serves(ep) {
			delete(t.failing, ep)
		}
	}
	t.count()
	if t.affinity = affinity; affinity == 0 {
		clear(t.sticky)
		t.recent.Init()
	}
}

// Pick is relay.Target's: the endpoint that the client had last, or the next
// one in turn. Those that lately did not answer come after all others.
func (t *target) Pick(from netip.Addr, tried []netip.AddrPort) (ep netip.AddrPort, others bool) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	ep, known := t.known(from, tried, now)
	if !known {
		if ep = t.choose(tried, now); !ep.IsValid() {
			return ep, false
		}
	}
	if f, failed := t.failing[ep]; failed && !now.Before(f.until) {
		// One connection finds out whether it answers again; the others need
		// not wait for that.
		f.until, f.trial = now.Add(f.avoid), true
		t.failing[ep] = f
	}
	if t.affinity > 0 {
		t.remember(from, ep, now)
	}
	return ep, slices.ContainsFunc(t.endpoints, func(o netip.AddrPort) bool { return o != ep && !slices.Contains(tried, o) })
}

// known is the endpoint that a client with affinity stays at.
func (t *target) known(from netip.Addr, tried []netip.AddrPort, now time.Time) (netip.AddrPort, bool) {
	e := t.sticky[from]
	if e == nil {
		return netip.AddrPort{}, false
	}
	c := e.Value.(*client)
	stays := now.Sub(c.last) < t.affinity && t.serves(c.endpoint) && !slices.Contains(tried, c.endpoint) && !t.avoided(c.endpoint, now)
	return c.endpoint, stays
}

func (t *target) choose(tried []netip.AddrPort, now time.Time) netip.AddrPort {
	n := len(t.endpoints)
	if n == 0 {
		return netip.AddrPort{}
	}
	first := t.next
	if t.random {
		first = rand.IntN(n)
	}
	var second netip.AddrPort
	for i := range n {
		at := (first + i) % n
		ep := t.endpoints[at]
		switch {
		case slices.Contains(tried, ep):
		case t.avoided(ep, now):
			if !second.IsValid() {
				second = ep
			}
		default:
			t.next = (at + 1) % n
			return ep
		}
	}
	return second
}

func (t *target) avoided(ep netip.AddrPort, now time.Time) bool {
	return len(t.failing) > 0 && now.Before(t.failing[ep].until)
}

func (t *target) remember(from netip.Addr, ep netip.AddrPort, now time.Time) {
	if e := t.sticky[from]; e != nil {
		c := e.Value.(*client)
		c.endpoint, c.last = ep, now
		t.recent.MoveToFront(e)
		return
	}
	for oldest := t.recent.Back(); oldest != nil; oldest = t.recent.Back() {
		c := oldest.Value.(*client)
		if len(t.sticky) < maxClients && now.Sub(c.last) < t.affinity {
			break
		}
		t.recent.Remove(oldest)
		delete(t.sticky, c.addr)
	}
	t.sticky[from] = t.recent.PushFront(&client{from, ep, now})
}

// Answered is relay.Target's.
func (t *target) Answered(ep netip.AddrPort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.failing) > 0 {
		delete(t.failing, ep)
		t.count()
	}
}

// Failed is relay.Target's: the endpoint is avoided for a while.
func (t *target) Failed(ep netip.AddrPort) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.serves(ep) {
		return
	}
	f, again := t.failing[ep]
	switch {
	case !again:
		f.avoid = t.avoid
	case !f.trial:
		return // under way when the first one failed, or without a choice
	default:
		f.avoid = min(2*f.avoid, maxAvoid*t.avoid)
	}
	f.until, f.trial = now.Add(f.avoid), false
	t.failing[ep] = f
	t.count()
}

// count brings allFailing up to date.
func (t *target) count() {
	n := len(t.failing)
	if t.retired {
		n = 0
	}
	t.allFailing.Add(int64(n - t.counted))
	t.counted = n
}

// retire takes the target out of allFailing. Connections that are waiting
// already still find their endpoints by it.
func (t *target) retire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.retired = true
	t.count()
}

// Serves is relay.Target's.
func (t *target) Serves(ep netip.AddrPort) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.serves(ep)
}

func (t *target) serves(ep netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(t.endpoints, ep, netip.AddrPort.Compare)
	return found
}

// String names the endpoints.
func (t *target) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprint(t.endpoints)
}
