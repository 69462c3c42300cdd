package filter

import (
	"net/netip"
	"slices"
	"time"
)

// Limits bound the requests of each client.
type Limits struct {
	All []Limit
	// AtATime is how many a client may have at a time, 0 without a bound.
	AtATime int
	Exempt  []netip.Prefix
}

// Limit is one request in a time, and some at once.
type Limit struct {
	Each   time.Duration
	AtOnce int
}

// For returns the limits for a client. nil has none.
func (l *Limits) For(client netip.Addr) []Limit {
	if l == nil || l.exempts(client) {
		return nil
	}
	return l.All
}

// AtATimeFor returns how many requests a client may have at a time, 0 without a bound.
func (l *Limits) AtATimeFor(client netip.Addr) int {
	if l == nil || l.AtATime == 0 || l.exempts(client) {
		return 0
	}
	return l.AtATime
}

func (l *Limits) exempts(client netip.Addr) bool {
	client = client.Unmap().WithZone("")
	return slices.ContainsFunc(l.Exempt, func(p netip.Prefix) bool { return p.Contains(client) })
}

// NewLimits returns bounds of requests a second, a minute and at a time, 0 for no bound, with times as many at once as in
// ingress-nginx.
func NewLimits(perSecond, perMinute, times, atATime int, exempt []netip.Prefix) *Limits {
	out := &Limits{AtATime: atATime, Exempt: exempt}
	add := func(n int, in time.Duration) {
		if n > 0 {
			out.All = append(out.All, Limit{Each: in / time.Duration(n), AtOnce: n*times + 1})
		}
	}
	add(perSecond, time.Second)
	add(perMinute, time.Minute)
	return out
}
