package proxy

import "time"

// pace decides when the loop may work. It has no clock and no timer.
type pace struct {
	minInterval, maxInterval time.Duration
	retryMin, retryMax       time.Duration

	ended    time.Time     // of the last Apply; zero before the first
	interval time.Duration // to keep after ended
	backoff  time.Duration // after an error, else 0
	// retryAt is when rejected ports are retried, zero if there are none;
	// rejectBackoff is how long they wait.
	retryAt       time.Time
	rejectBackoff time.Duration
}

// maxHold is how long a change waits at most while another one keeps failing.
const maxHold = time.Second

// done records the end of an Apply that took that long.
func (p *pace) done(now time.Time, took time.Duration, failed bool) {
	p.ended = now
	// At most half of the time is spent applying, and a slow mode gets more
	// changes at once; maxInterval bounds the wait after a slow full pass.
	p.interval = min(max(took, p.minInterval), p.maxInterval)
	if failed {
		p.backoff = p.longer(p.backoff)
	} else {
		p.backoff = 0
	}
}

func (p *pace) longer(d time.Duration) time.Duration {
	if d == 0 {
		return p.retryMin
	}
	return min(2*d, p.retryMax)
}

// rejected records whether there are rejected ports, and whether one of them was
// just retried.
func (p *pace) rejected(now time.Time, any, retried bool) {
	switch {
	case !any:
		p.retryAt, p.rejectBackoff = time.Time{}, 0
	case retried || p.retryAt.IsZero():
		p.rejectBackoff = p.longer(p.rejectBackoff)
		p.retryAt = now.Add(p.rejectBackoff)
	}
}

// retry reports whether rejected ports are due.
func (p *pace) retry(now time.Time) bool { return !p.retryAt.IsZero() && !now.Before(p.retryAt) }

// due returns when to work next; false means not before something happens.
// waiting is set if there are changes, or an audit, to do.
func (p *pace) due(waiting bool) (time.Time, bool) {
	if p.ended.IsZero() {
		return time.Time{}, waiting
	}
	if p.backoff > 0 {
		hold := p.backoff
		if waiting {
			hold = min(hold, max(maxHold, p.interval))
		}
		return p.ended.Add(hold), true
	}
	next := p.ended.Add(p.interval)
	if !waiting && !p.retryAt.IsZero() {
		if p.retryAt.After(next) {
			next = p.retryAt
		}
		return next, true
	}
	return next, waiting
}
