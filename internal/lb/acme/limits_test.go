package acme

import (
	"fmt"
	"maps"
	"testing"
	"time"
)

// An order that goes on failing is tried three times more in two hours, and then twice a day.
func TestRetries(t *testing.T) {
	var at time.Duration
	first := 0
	for n := 1; n < 40; n++ {
		wait := retryAfter(n)
		if at += wait; at <= 2*time.Hour {
			first++
		}
		if n > 3 && wait != 12*time.Hour {
			t.Errorf("after %d failures: %v", n, wait)
		}
	}
	if first != 3 {
		t.Errorf("%d retries in two hours", first)
	}
}

// A namespace whose orders fail by ever other names has six in the first hour, and as many in each that follows; sixty that do
// not fail are worked on at once.
func TestBudget(t *testing.T) {
	count := func(failed bool, hours time.Duration) (n int) {
		now := time.Now()
		b, end := &budget{at: now}, now.Add(hours*time.Hour)
		for now.Before(end) {
			if wait := b.wait(now); wait > 0 {
				now = now.Add(wait + time.Second)
				continue
			}
			b.spend(now, failed)
			if n++; n > 10_000 {
				t.Fatal("without end")
			}
		}
		return n
	}
	if n := count(true, 1); n < 6 || n > 12 {
		t.Errorf("%d orders fail in an hour", n)
	}
	if n := count(true, 24); n < 6*23 || n > 6*25+1 {
		t.Errorf("%d orders fail in a day", n)
	}
	if n := count(false, 1); n < 60 || n > 120 {
		t.Errorf("%d orders in an hour", n)
	}
}

// One namespace uses half of a limit of the account, and others find room beside it; what it has used comes back with time. A
// namespace that no other can be hurt by uses all.
func TestLedger(t *testing.T) {
	began := time.Now()
	limits := Limits{Orders: 12, DomainOrders: 6, Failures: 100, HostFailures: 4}
	shared := []Domain{{Name: "shop.example"}, {Name: "own.example", Namespaces: []string{"greedy"}}}
	n := 0
	ordered := func(l *ledger, namespace, domain string, now time.Time) (got int, why string) {
		for range 1000 {
			n++
			g, wait, because := l.take(namespace, []string{fmt.Sprintf("h%d.%s", n, domain)}, false, now)
			if g == nil {
				if wait <= 0 {
					t.Fatalf("%s waits for %v", namespace, wait)
				}
				if l.next(namespace, domain, now.Add(wait-time.Second)) || !l.next(namespace, domain, now.Add(wait+time.Second)) {
					t.Errorf("%s does not go on after %v: %s", namespace, wait, because)
				}
				return got, because
			}
			got++
			g.give(now, ofFailures)
		}
		return got, ""
	}
	l := newLedger(limits, shared)
	for _, c := range []struct {
		namespace, domain string
		want              int
		why               string
	}{
		{"greedy", "shop.example", 3, "6 certificates below shop.example in 7 days"},
		{"greedy", "other.shop.example", 0, "6 certificates below shop.example in 7 days"},
		{"second", "shop.example", 2, "6 certificates below shop.example in 7 days"},
		{"third", "shop.example", 1, "6 certificates below shop.example in 7 days"},
		{"greedy", "own.example", 2, "12 orders in 3 hours"},
	} {
		if got, why := ordered(l, c.namespace, c.domain, began); got != c.want || why != c.why {
			t.Errorf("%s has %d of %s, then: %s; want %d, then: %s", c.namespace, got, c.domain, why, c.want, c.why)
		}
	}
	if got, why := ordered(l, "greedy", "shop.example", began.Add(domainTime)); got != 3 || len(l.buckets) > 40 {
		t.Errorf("a week later: %d, then %s; %d buckets", got, why, len(l.buckets))
	}
	l = newLedger(Limits{DomainOrders: 6}, shared)
	if got, _ := ordered(l, "greedy", "own.example", began); got != 6 {
		t.Errorf("%d of a domain for one namespace", got)
	}
}

// next reports whether a namespace could order now, and counts nothing.
func (l *ledger) next(namespace, domain string, now time.Time) bool {
	was := map[string]bucket{}
	for key, b := range l.buckets {
		c := *b
		c.shares = maps.Clone(b.shares)
		was[key] = c
	}
	g, _, _ := l.take(namespace, []string{"next." + domain}, false, now)
	l.buckets = map[string]*bucket{}
	for key, b := range was {
		l.buckets[key] = &b
	}
	return g != nil
}

// Orders with a name fail four times in an hour, of whichever namespaces, and two of them do not lock the third out. Orders that
// the authority asks for use nothing else; an order that has not failed, or that was not made, gives back what it did not use.
func TestLedgerOfFailures(t *testing.T) {
	now := time.Now()
	l := newLedger(DefaultLimits(), []Domain{{Name: "shop.example"}})
	fails := func(namespace string) (n int) {
		for {
			g, _, _ := l.take(namespace, []string{"a.shop.example"}, false, now)
			if g == nil {
				return n
			}
			n++
			g.give(now, ofOrders, ofDomains)
		}
	}
	if a, b := fails("a"), fails("b"); a != 2 || b != 1 {
		t.Errorf("%d and %d failures", a, b)
	}
	l = newLedger(Limits{Orders: 2, DomainOrders: 2, Failures: 2, HostFailures: 2}, []Domain{{Name: "shop.example"}})
	for i := range 100 {
		g, _, why := l.take("a", []string{"*.shop.example", "shop.example"}, i%2 == 0, now)
		if g == nil {
			t.Fatal(why)
		}
		g.give(now, ofOrders, ofDomains, ofFailures)
	}
	l.found("a", []string{"a.shop.example"}, now.Add(-time.Hour), now)
	l.found("a", []string{"a.shop.example"}, now.Add(-2*domainTime), now)
	l.found("a", []string{"a.shop.example"}, now.Add(-time.Hour), now) // a namespace's Secrets do not use up what others may have
	if used := l.buckets["domain shop.example"].drain(now); used < 0.9 || used > 1 {
		t.Errorf("an earlier process has ordered %v", used)
	}
}
