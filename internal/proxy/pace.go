package proxy

import "time"

// pace says when the loop may work. It holds no clock and no timer.
type pace struct {
	minInterval, maxInterval time.Duration
	retryMin, retryMax       time.Duration

	ended    time.Time     // of the last Apply; zero before the first
	interval time.Duration // to keep after ended
	backoff  time.Duration // after an error, else 0
	// again is when refused ports are tried again, zero if there are none; hold
	// is how long they wait.
	again time.Time
	hold  time.Duration
}

// maxHold is how long a change waits at most while another one keeps failing.
const maxHold = time.Second

// done notes that an Apply ended, after having taken took.
func (p *pace) done(now time.Time, took time.Duration, failed bool) {
	p.ended = now
	// At most half of the time is spent applying, and a slow mode gets more
	// changes at once; but nobody waits for long because a full pass was slow.
	p.interval = min(max(took, p.minInterval), p.maxInterval)
	switch {
	case !failed:
		p.backoff = 0
	default:
		p.backoff = p.longer(p.backoff)
	}
}

func (p *pace) longer(d time.Duration) time.Duration {
	if d == 0 {
		return p.retryMin
	}
	return min(2*d, p.retryMax)
}

// refused notes whether there are refused ports, and whether one was just
// tried.
func (p *pace) refused(now time.Time, any, tried bool) {
	switch {
	case !any:
		p.again, p.hold = time.Time{}, 0
	case tried || p.again.IsZero():
		p.hold = p.longer(p.hold)
		p.again = now.Add(p.hold)
	}
}

// retry says that refused ports are to be tried again.
func (p *pace) retry(now time.Time) bool { return !p.again.IsZero() && !now.Before(p.again) }

// due returns when to work next; false means not before something happens.
// waiting says that there are changes or an audit to do.
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
	if !waiting && !p.again.IsZero() {
		if p.again.After(next) {
			next = p.again
		}
		return next, true
	}
	return next, waiting
}
