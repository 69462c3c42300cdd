package proxied

import (
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxRates bounds the clients of a Service whose requests are counted. With more at a time, further ones have no bound.
const maxRates = 1 << 16

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
	// due is when each client would have none to its account, since began.
	due   map[rateKey]time.Duration
	began time.Time
	swept time.Duration
}

// rateKey is whose requests are counted: a client's, for a route if it has a name, and one of its limits.
type rateKey struct {
	client netip.Addr
	route  svc.Name
	limit  int
}

// allow reports whether a client may have a request at a time, of so many a second, and at once the requests of one second.
func (r *rates) allow(client netip.Addr, perSecond int, at time.Time) bool {
	return r.take(rateKey{client: clientOf(client)}, filter.Limit{Each: time.Second / time.Duration(perSecond), AtOnce: perSecond}, at)
}

// allowAll reports whether a client may have a request for a route by all of its limits.
func (r *rates) allowAll(client netip.Addr, route svc.Name, limits []filter.Limit, at time.Time) bool {
	for i, l := range limits {
		if !r.take(rateKey{clientOf(client), route, i}, l, at) {
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
	if !known && len(r.due) >= maxRates && !r.sweep(now) {
		return true
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
		for c, due := range r.due {
			if due <= now {
				delete(r.due, c)
			}
		}
	}
	return len(r.due) < maxRates
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
