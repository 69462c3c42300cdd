package node

import "time"

// pace says when the loop may work. It holds no clock and no timer.
type pace struct {
	minInterval, maxInterval time.Duration
	retryMin, retryMax       time.Duration

	ended    time.Time     // of the last Apply; zero before the first
	interval time.Duration // to keep after ended
	backoff  time.Duration // after an error, else 0
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
	case p.backoff == 0:
		p.backoff = p.retryMin
	default:
		p.backoff = min(2*p.backoff, p.retryMax)
	}
}

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
	return p.ended.Add(p.interval), waiting
}
