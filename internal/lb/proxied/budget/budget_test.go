package budget

import (
	"testing"
	"time"
)

// A backend that fails gets a fifth more requests at most, and 10 a second if it has few. What was long ago does not count.
func TestBudget(t *testing.T) {
	for _, c := range []struct{ requests, want int }{{0, 100}, {1, 100}, {500, 100}, {1000, 200}, {50_000, 10_000}} {
		b, now := &Budget{}, time.Unix(1_000_000, 0)
		for n := range c.requests { // within the window
			b.Request(now.Add(time.Duration(n%window) * time.Second))
		}
		now = now.Add((window - 1) * time.Second)
		got := 0
		for b.Take(now) {
			got++
		}
		if got != c.want {
			t.Errorf("%d requests: %d retries, want %d", c.requests, got, c.want)
		}
		if b.Take(now.Add((window - 1) * time.Second)) {
			t.Errorf("%d requests: a retry within the window", c.requests)
		}
		if got := b.Take(now.Add(window * time.Second)); !got {
			t.Errorf("%d requests: no retry after the window", c.requests)
		}
	}
}

// A clock that is set back gives no more than a new budget.
func TestBudgetClock(t *testing.T) {
	b, now := &Budget{}, time.Unix(1_000_000, 0)
	for b.Take(now) {
	}
	got := 0
	for now = now.Add(-time.Hour); b.Take(now); {
		got++
	}
	if got != least {
		t.Errorf("%d retries", got)
	}
}

func TestBudgetWarns(t *testing.T) {
	b, now := &Budget{}, time.Unix(1_000_000, 0)
	if !b.Warns(now) || b.Warns(now.Add(warnEvery-1)) || !b.Warns(now.Add(warnEvery)) {
		t.Error("want one warning a minute")
	}
}

func BenchmarkRequest(b *testing.B) {
	x, now := &Budget{}, time.Unix(1_000_000, 0)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			x.Request(now)
		}
	})
}
