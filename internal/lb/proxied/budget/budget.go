// Package budget bounds what requests take: how many are retried, so that retries do not multiply the load of a backend that fails,
// what several count together, and how often a failure is a warning.
package budget

import (
	"sync"
	"sync/atomic"
	"time"
)

// The bounds are the defaults of the Gateway API's retry budget: https://gateway-api.sigs.k8s.io/geps/gep-3388/.
const (
	// share is which part of the requests may be retried, in percent.
	share = 20
	// least is how many retries there may be within the window in any case: 10 a second.
	least = 10 * window
	// window is what is counted, in seconds.
	window = 10
	// warnEvery is how often it is reported at most that the budget is spent.
	warnEvery = time.Minute
)

// Budget is that of a backend. The zero value is ready for use, by several goroutines.
type Budget struct {
	mu     sync.Mutex
	slots  [window]slot // of a second each
	warned time.Time
}

// slot has what was counted within a second.
type slot struct{ second, requests, retries int64 }

// at returns the slot of a time. The caller holds mu.
func (b *Budget) at(now time.Time) *slot {
	second := now.Unix()
	s := &b.slots[second%window]
	if s.second != second {
		*s = slot{second: second}
	}
	return s
}

// Request counts a request that may be retried.
func (b *Budget) Request(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at(now).requests++
}

// Take counts a retry. It reports false if there were too many.
func (b *Budget) Take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	own, requests, retries := b.at(now), int64(0), int64(0)
	for _, s := range b.slots {
		if s.second > own.second-window && s.second <= own.second {
			requests += s.requests
			retries += s.retries
		}
	}
	if retries >= max(least, requests*share/100) {
		return false
	}
	own.retries++
	return true
}

// Warns reports whether a warning about the spent budget is due: one a minute at most.
func (b *Budget) Warns(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.warned.IsZero() && now.Sub(b.warned) < warnEvery {
		return false
	}
	b.warned = now
	return true
}

// AddUpTo adds to a number unless the sum is more than most.
func AddUpTo(n *atomic.Int64, add, most int64) bool {
	if n.Add(add) <= most {
		return true
	}
	n.Add(-add)
	return false
}

// WarnEach is how often a Warning is due.
const WarnEach = time.Minute

// Warning is the time of the last report of a failure as a warning. The zero value has none.
type Warning struct {
	mu   sync.Mutex
	last time.Time
}

// Due reports whether a failure is reported as a warning now, and not only for who looks for it: once in WarnEach.
func (w *Warning) Due() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if now.Sub(w.last) < WarnEach {
		return false
	}
	w.last = now
	return true
}
