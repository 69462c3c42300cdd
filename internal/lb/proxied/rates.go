package proxied

import (
	"cmp"
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxRates bounds the clients of a Service whose requests are counted. With more at a time, further ones count as one client: who has
// many addresses must not end what protects.
const maxRates = 1 << 16

// maxRouteRates is the same for a route, each client once for each limit.
const maxRouteRates = 1 << 13

// clientOf returns what counts as one client: an IPv4 address, or an IPv6 network of 64 bits, of which a client has all.
func clientOf(a netip.Addr) netip.Addr {
	if a = a.Unmap().WithZone(""); a.Is4() {
		return a
	}
	p, _ := a.Prefix(64)
	return p.Addr()
}

// rates counts the requests of clients (GCRA: https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm).
type rates struct {
	mu sync.Mutex
	// share is how many are counted, and further ones count as one. If it is 0, maxRates are.
	share int
	// due is when each client would have none to its account, since began.
	due   map[rateKey]time.Duration
	began time.Time
	swept time.Duration
}

// rateKey is whose requests are counted: a client's, or further clients' if it is zero, and by which of the limits.
type rateKey struct {
	client netip.Addr
	limit  int
}

// routeRates count the requests of clients for routes with limits.
type routeRates struct {
	mu    sync.Mutex
	of    map[svc.Name]*rates
	swept time.Time
}

// route returns what counts the requests for a route. Each minute at most, a new one has it forget the ones without clients.
func (r *routeRates) route(name svc.Name, at time.Time) *rates {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of[name] == nil {
		if at.Sub(r.swept) >= time.Minute {
			r.swept = at
			maps.DeleteFunc(r.of, func(_ svc.Name, each *rates) bool { return each.idle(at) })
		}
		if r.of == nil {
			r.of = map[svc.Name]*rates{}
		}
		r.of[name] = &rates{share: maxRouteRates, due: map[rateKey]time.Duration{}, began: at}
	}
	return r.of[name]
}

// idle reports whether no client has anything to its account.
func (r *rates) idle(at time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(at.Sub(r.began))
	return len(r.due) == 0
}

// allow reports whether a client may have a request at a time, of so many a second, and at once the requests of one second.
func (r *rates) allow(client netip.Addr, perSecond int, at time.Time) bool {
	return r.take(rateKey{client: clientOf(client)}, filter.Limit{Each: time.Second / time.Duration(perSecond), AtOnce: perSecond}, at)
}

// allowAll reports whether a client may have a request for a route by all of its limits.
func (r *routeRates) allowAll(client netip.Addr, route svc.Name, limits []filter.Limit, at time.Time) bool {
	counted := r.route(route, at)
	for i, l := range limits {
		if !counted.take(rateKey{clientOf(client), i}, l, at) {
			return false
		}
	}
	return true
}

// take counts a request at a time. It reports false for one too many.
func (r *rates) take(key rateKey, l filter.Limit, at time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due == nil {
		r.due, r.began = map[rateKey]time.Duration{}, at
	}
	now := at.Sub(r.began)
	due, known := r.due[key]
	if !known && len(r.due) >= cmp.Or(r.share, maxRates) && !r.sweep(now) {
		key.client = netip.Addr{}
		due = r.due[key]
	}
	due = max(due, now)
	if due-now > l.Each*time.Duration(l.AtOnce-1) {
		return false
	}
	r.due[key] = due + l.Each
	return true
}

// sweep forgets clients that have nothing to their account, each second at most. It reports whether there is room. The caller
// holds mu.
func (r *rates) sweep(now time.Duration) bool {
	if now-r.swept >= time.Second {
		r.swept = now
		r.forget(now)
	}
	return len(r.due) < cmp.Or(r.share, maxRates)
}

// forget forgets clients that have nothing to their account. The caller holds mu.
func (r *rates) forget(now time.Duration) {
	maps.DeleteFunc(r.due, func(_ rateKey, due time.Duration) bool { return due <= now })
}

// allowsBy counts a request of a client by the limits of a route. It reports false if the client has too many.
func (u *usage) allowsBy(client netip.Addr, route svc.Name, limits []filter.Limit) bool {
	if len(limits) == 0 || u.routes.allowAll(client, route, limits, time.Now()) {
		return true
	}
	u.traffic.Rejected(traffic.ClientLimit)
	return false
}

// AllowsRequest counts a request of a client. It reports false if the client has too many.
func (c *Config) AllowsRequest(client netip.Addr) bool {
	most := c.Spec.Clients.Requests
	if most == 0 || c.usage.rates.allow(client, most, time.Now()) {
		return true
	}
	c.usage.traffic.Rejected(traffic.ClientLimit)
	return false
}

// heldRequests counts the requests that clients wait for, for routes that bound them: at most as many as there are requests.
type heldRequests struct {
	mu sync.Mutex
	of map[heldKey]int
}

// heldKey is whose requests are counted.
type heldKey struct {
	route  svc.Name
	client netip.Addr
}

// hold counts a request of a client for a route until the function that it returns is called once. It returns nil if the client has
// as many as most.
func (u *usage) hold(client netip.Addr, route svc.Name, most int) (done func()) {
	key, h := heldKey{route, clientOf(client)}, &u.held
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of[key] >= most {
		u.traffic.Rejected(traffic.ClientLimit)
		return nil
	}
	if h.of == nil {
		h.of = map[heldKey]int{}
	}
	h.of[key]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.of[key]--; h.of[key] == 0 {
			delete(h.of, key)
		}
	}
}
