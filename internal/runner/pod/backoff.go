package pod

import "time"

// backoff is an exponential delay: none before the first restart, then base,
// doubled up to maxBackoff; a long run resets it.
type backoff struct {
	base    time.Duration
	current time.Duration
	used    bool
}

const (
	maxBackoff = 5 * time.Minute
	// longRun is how long a container must run for its next crash to count as
	// the first one, that of kubelet.
	longRun = 10 * time.Minute
)

// next returns the delay after a run of the given length.
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
