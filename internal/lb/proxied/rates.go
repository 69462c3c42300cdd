package proxied

import (
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
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
	due   map[netip.Addr]time.Duration
	began time.Time
	swept time.Duration
}

// allow reports whether a client may have a request at a time, of so many a second, and at once the requests of one second.
func (r *rates) allow(client netip.Addr, perSecond int, at time.Time) bool {
	client = clientOf(client)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due == nil {
		r.due, r.began = map[netip.Addr]time.Duration{}, at
	}
	now, each := at.Sub(r.began), time.Second/time.Duration(perSecond)
	due, known := r.due[client]
	if !known && len(r.due) >= maxRates && !r.sweep(now) {
		return true
	}
	due = max(due, now)
	if due-now > time.Second-each {
		return false
	}
	r.due[client] = due + each
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

// AllowsRequest counts a request of a client. It reports false if the client has too many.
func (c *Config) AllowsRequest(client netip.Addr) bool {
	most := c.Spec.Clients.Requests
	if most == 0 || c.usage.rates.allow(client, most, time.Now()) {
		return true
	}
	c.usage.traffic.Rejected(traffic.ClientLimit)
	return false
}
