package capture

import "time"

// budget decides how many of the reported connections are recorded, and estimates how many were not.
type budget struct {
	rate, burst float64
	tokens      float64
	at          time.Time
	// what was reported since the last pause
	began    time.Time
	reported uint64
	over     uint64 // of them, not recorded
}

func newBudget(rate, burst int, now time.Time) *budget {
	return &budget{rate: float64(rate), burst: float64(burst), tokens: float64(burst), at: now, began: now}
}

// take reports whether a connection is recorded.
func (b *budget) take(now time.Time) bool {
	b.reported++
	b.tokens = min(b.burst, b.tokens+b.rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.tokens < 1 {
		b.over++
		return false
	}
	b.tokens--
	return true
}

// empty reports whether a pause is due.
func (b *budget) empty() bool { return b.tokens < 1 }

// missed counts connections that no one received.
func (b *budget) missed(n uint64) {
	b.reported += n
	b.over += n
}

// skipped ends a pause: it returns about how many connections were not recorded since the pause before, one at least. During a
// pause there were as many as before it.
func (b *budget) skipped(pausedAt, now time.Time) uint64 {
	out := max(b.over, 1)
	if active := pausedAt.Sub(b.began).Seconds(); active > 0 {
		// At the start, earlier reports are already queued: a window is no shorter than a millisecond.
		out += uint64(float64(b.reported) / max(active, 0.001) * now.Sub(pausedAt).Seconds())
	}
	b.began, b.reported, b.over = now, 0, 0
	return out
}
