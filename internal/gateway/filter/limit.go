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
