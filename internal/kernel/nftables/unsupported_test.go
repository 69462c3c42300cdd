package nftables

import (
	"testing"
	"time"
)

// What the kernel lacked is tried again after a minute, then more and more seldom, and at least
// twice an hour.
func TestRetry(t *testing.T) {
	var r Retry
	now := time.Now()
	if r.Waits(now) {
		t.Error("the first attempt waits")
	}
	for i, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		r.Lacked(now)
		at := now.Add(want * time.Minute)
		if !r.Waits(at.Add(-1)) || r.Waits(at) {
			t.Errorf("attempt %d is not due after %d minutes", i+1, want)
		}
		now = at
	}
}
