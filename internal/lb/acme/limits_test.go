package acme

import (
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
