package filter

import (
	"net/netip"
	"slices"
	"time"
)

// Limits bound the requests of each client.
type Limits struct {
	All    []Limit
	Exempt []netip.Prefix
}

// Limit is one request in a time, and some at once.
type Limit struct {
	Each   time.Duration
	AtOnce int
}

// For returns the limits for a client. nil has none.
func (l *Limits) For(client netip.Addr) []Limit {
	if l == nil {
		return nil
	}
	client = client.Unmap().WithZone("")
	if slices.ContainsFunc(l.Exempt, func(p netip.Prefix) bool { return p.Contains(client) }) {
		return nil
	}
	return l.All
}

// NewLimits returns bounds of requests a second and a minute, 0 for no bound, with times as many at once as in ingress-nginx.
func NewLimits(perSecond, perMinute, times int, exempt []netip.Prefix) *Limits {
	out := &Limits{Exempt: exempt}
	add := func(n int, in time.Duration) {
		if n > 0 {
			out.All = append(out.All, Limit{Each: in / time.Duration(n), AtOnce: n*times + 1})
		}
	}
	add(perSecond, time.Second)
	add(perMinute, time.Minute)
	return out
}
