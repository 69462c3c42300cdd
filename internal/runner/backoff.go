package runner

import "time"

// backoff is a delay that doubles: none before the first restart, then base up
// to maxBackoff, and none again after a long run.
type backoff struct {
	base    time.Duration
	current time.Duration
	used    bool
}

const (
	maxBackoff = 5 * time.Minute
	// longRun is a run after which a crash counts as the first one.
	longRun = 10 * time.Minute
)

// next is the delay after a run of the given length.
func (b *backoff) next(ran time.Duration) time.Duration {
	if ran >= longRun {
		b.reset()
	}
	switch {
	case !b.used:
		b.used = true
		return 0
	case b.current == 0:
		b.current = b.base
	default:
		b.current = min(2*b.current, maxBackoff)
	}
	return b.current
}

func (b *backoff) reset() { b.current, b.used = 0, false }
