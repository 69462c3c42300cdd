package acme

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/publicsuffix"
)

// Limits bound what all namespaces together ask of the authority. 0 is no limit.
type Limits struct {
	// Orders is how many orders there are in 3 hours, and DomainOrders how many certificates in 7 days for names below one
	// registered domain.
	Orders, DomainOrders int
	// Failures is how many orders fail in an hour, and HostFailures how many that have a host.
	Failures, HostFailures int
}

// DefaultLimits leave a part of what Let's Encrypt grants (300, 50, and 5 failures of a name,
// https://letsencrypt.org/docs/rate-limits/) for other clients of the account and of the domain.
func DefaultLimits() Limits {
	return Limits{Orders: 250, DomainOrders: 45, Failures: 60, HostFailures: 4}
}

const (
	ordersTime   = 3 * time.Hour
	domainTime   = 7 * 24 * time.Hour
	failuresTime = time.Hour
)

// bucket is what namespaces have used of a limit. It drains evenly: size within a time.
type bucket struct {
	size   float64
	drains time.Duration
	shares map[string]float64 // by namespaces
	at     time.Time          // as of
}

// drain returns what is used up now.
func (b *bucket) drain(now time.Time) float64 {
	total := 0.0
	for _, used := range b.shares {
		total += used
	}
	gone := b.size * float64(now.Sub(b.at)) / float64(b.drains)
	b.at = now
	if gone >= total {
		clear(b.shares)
		return 0
	}
	if gone > 0 {
		for namespace := range b.shares {
			b.shares[namespace] *= 1 - gone/total
		}
	}
	return total - max(gone, 0)
}

// wait returns how long a namespace waits until it may use one more. If others may use the bucket, too, a namespace never has
// more than it leaves free: one uses half, of two each uses a third, and a namespace that has used nothing always finds room
// unless there are as many greedy ones as the bucket has places.
func (b *bucket) wait(namespace string, only bool, now time.Time) time.Duration {
	total := b.drain(now)
	over := total + 1 - b.size
	if used := b.shares[namespace]; !only && used > 0 {
		over = max(over, (used+over)/(1+used/total))
	}
	return time.Duration(max(over, 0) / b.size * float64(b.drains))
}

// ledger counts what the account has used. It is safe for concurrent use.
type ledger struct {
	limits  Limits
	domains []Domain

	mu      sync.Mutex
	buckets map[string]*bucket // by kind and name
}

func newLedger(limits Limits, domains []Domain) *ledger {
	return &ledger{limits: limits, domains: domains, buckets: map[string]*bucket{}}
}

// use is one unit of a bucket.
type use struct {
	key    string // of the bucket
	limit  int
	drains time.Duration
	what   string // in an Event
	below  string // the domain that all of its names are below, empty for all
	kind   useKind
}

type useKind int

const (
	ofOrders useKind = iota
	ofDomains
	ofFailures
)

// usesOf returns what an order for hosts may use. A renewal that the authority has asked for (RFC 9773) only counts if it fails.
func (l *ledger) usesOf(hosts []string, asked bool) (out []use) {
	add := func(u use) {
		if u.limit > 0 && !slices.ContainsFunc(out, func(o use) bool { return o.key == u.key }) {
			out = append(out, u)
		}
	}
	if !asked {
		add(use{"orders", l.limits.Orders, ordersTime, "%d orders in 3 hours", "", ofOrders})
	}
	add(use{"failures", l.limits.Failures, failuresTime, "%d orders that fail in an hour", "", ofFailures})
	for _, host := range hosts {
		if domain := registered(host); !asked {
			add(use{"domain " + domain, l.limits.DomainOrders, domainTime, "%d certificates below " + domain + " in 7 days", domain, ofDomains})
		}
		add(use{"host " + host, l.limits.HostFailures, failuresTime, "%d orders with " + host + " that fail in an hour", host, ofFailures})
	}
	return out
}

// registered returns the registered domain of a host (https://publicsuffix.org).
func registered(host string) string {
	host = strings.TrimPrefix(host, "*.")
	domain, err := publicsuffix.EffectiveTLDPlusOne(host)
	if err != nil {
		return host
	}
	return domain
}

// take counts an order as if it used all that it may, unless one of the limits is reached: then it counts nothing, and
// returns how long to wait, and for what.
func (l *ledger) take(namespace string, hosts []string, asked bool, now time.Time) (g *grant, wait time.Duration, why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.buckets, func(_ string, b *bucket) bool { return b.drain(now) == 0 })
	uses := l.usesOf(hosts, asked)
	for _, u := range uses {
		if w := l.bucket(u, now).wait(namespace, l.isOnly(namespace, u.below), now); w > wait {
			wait, why = w, fmt.Sprintf(u.what, u.limit)
		}
	}
	if wait > 0 {
		return nil, wait, why
	}
	for _, u := range uses {
		l.bucket(u, now).shares[namespace]++
	}
	return &grant{l, namespace, uses}, 0, ""
}

// grant is an order that may be worked on.
type grant struct {
	ledger    *ledger
	namespace string
	uses      []use
}

// give takes back what the order has not used.
func (g *grant) give(now time.Time, kinds ...useKind) {
	l := g.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range g.uses {
		if slices.Contains(kinds, u.kind) {
			b := l.bucket(u, now)
			b.drain(now)
			if b.shares[g.namespace]--; b.shares[g.namespace] <= 0 {
				delete(b.shares, g.namespace)
			}
		}
	}
}

// found counts a certificate that an earlier process has ordered at a time, within what the namespace may use.
func (l *ledger) found(namespace string, hosts []string, ordered, now time.Time) {
	rest := 1 - float64(now.Sub(ordered))/float64(domainTime)
	if rest <= 0 || rest > 1 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range l.usesOf(hosts, false) {
		if b := l.bucket(u, now); u.kind == ofDomains && b.wait(namespace, l.isOnly(namespace, u.below), now) == 0 {
			b.shares[namespace] += rest
		}
	}
}

func (l *ledger) bucket(u use, now time.Time) *bucket {
	b := l.buckets[u.key]
	if b == nil {
		b = &bucket{size: float64(u.limit), drains: u.drains, shares: map[string]float64{}, at: now}
		l.buckets[u.key] = b
	}
	return b
}

// isOnly reports whether no other namespace may have certificates below a domain, or any for "".
func (l *ledger) isOnly(namespace, domain string) bool {
	for _, d := range l.domains {
		if domain != "" && !within(d.Name, domain) && !within(domain, d.Name) {
			continue
		}
		if len(d.Namespaces) == 0 || slices.ContainsFunc(d.Namespaces, func(n string) bool { return n != namespace }) {
			return false
		}
	}
	return true
}

// within reports whether a host is a domain, or below it.
func within(host, domain string) bool { return host == domain || strings.HasSuffix(host, "."+domain) }
