package podnet

import "time"

// Intervals between comparisons of the kernel with the plan.
const (
	resyncInterval = time.Minute
	// retryMin is when what failed is tried again. The interval doubles up to retryInterval,
	// and begins again when a device comes up or a route appears.
	retryMin      = 50 * time.Millisecond
	retryInterval = 5 * time.Second
	// reportAfter is how long another node cannot be reached before an Event says so: not
	// for the moment in which a link is down.
	reportAfter = time.Second
	// settleInterval is how long routes may go on being deleted before they are put back.
	settleInterval = 200 * time.Millisecond
	// linkSettle is how long to wait for what follows a device that comes up, its addresses
	// and routes. It doubles up to linkSettleMax while such events do not end, so that a
	// machine that makes devices all the time compares four times a second.
	linkSettle    = 50 * time.Millisecond
	linkSettleMax = 250 * time.Millisecond
	// calm is after which time without events the next one is the first again.
	calm = time.Second
)

// pace decides when the kernel is compared with the plan. It reads no clock.
type pace struct {
	due    time.Time // zero: now
	retry  time.Duration
	settle time.Duration
	event  time.Time // the last one about a device
	failed bool      // the last one
}

// deleted takes in that one of our routes was deleted.
func (p *pace) deleted(now time.Time) { p.sooner(now.Add(settleInterval)) }

// linked takes in that a device came up, or another event after which what failed may
// work.
func (p *pace) linked(now time.Time) {
	if p.settle == 0 || now.Sub(p.event) > calm {
		p.settle = linkSettle
	}
	p.event, p.retry = now, retryMin
	p.sooner(now.Add(p.settle))
}

func (p *pace) sooner(t time.Time) {
	if t.Before(p.due) {
		p.due = t
	}
}

// compared takes in the outcome of a comparison, after which nothing is due but the next
// one. permanent failures end with an event outside of the network.
func (p *pace) compared(now time.Time, failed, permanent bool) {
	p.settle = min(2*p.settle, linkSettleMax)
	p.due = now.Add(resyncInterval)
	p.written(now, failed, permanent)
}

// written takes in the outcome of a write of a new plan, without a comparison.
func (p *pace) written(now time.Time, failed, permanent bool) {
	if failed && !p.failed {
		p.retry = retryMin
	}
	p.failed = failed
	if failed && !permanent {
		p.sooner(now.Add(p.retry))
		p.retry = min(2*p.retry, retryInterval)
	}
}

// wait is how long nothing has to be done.
func (p *pace) wait(now time.Time) time.Duration { return max(p.due.Sub(now), 0) }
