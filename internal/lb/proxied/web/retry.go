package web

import (
	"errors"
	"math/rand/v2"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
)

// Bounds of the bodies that are kept until the answer, to be sent again, in bytes.
const (
	maxRepeatBody = 64 << 10 // of a request
	repeatMemory  = 16 << 20 // of all requests together
)

// errRepeat means that an answer is dropped, and the request goes to a Pod again.
var errRepeat = errors.New("the request is retried for its answer")

// retrying is a request whose rule has a retry. Its methods do nothing for nil. Only the goroutine of the upload calls add and wants,
// and what looks at the body comes after its end.
type retrying struct {
	x     *exchange
	rule  *policy.Retry
	n     int           // retries so far
	delay time.Duration // before the next one
	until time.Time     // for the head of the answer
	safe  bool          // the method is idempotent
	first *http1.Request
	head  *http1.Request // the bytes of first end with its head
	body  []byte         // what was uploaded
	kept  int            // of head and body, counted
	lost  bool           // not all of it is kept
}

func newRetrying(x *exchange, rule *policy.Retry) *retrying {
	within := rule.Within
	if within == 0 {
		within = x.config.Spec.IdleTimeout.Std()
	}
	transportOf(x.to).retries.Request(x.began)
	return &retrying{x: x, rule: rule, until: x.began.Add(within), first: x.req, safe: x.req.Idempotent() && !x.upgrades && !rule.Never()}
}

// never reports whether the rule forbids to send a request again.
func (r *retrying) never() bool { return r != nil && r.rule.Never() }

// late reports whether the time for all attempts is over. The first one may take as long as without a retry.
func (r *retrying) late() bool { return r != nil && r.n > 0 && !time.Now().Before(r.until) }

// within shortens a wait for a head so that it ends with the time for all attempts.
func (r *retrying) within(d time.Duration) time.Duration {
	if r == nil || r.n == 0 {
		return d
	}
	return policy.Within(r.until, d)
}

// keep begins to keep the request while its body is uploaded. It returns nil for one that is not kept.
func (r *retrying) keep() *retrying {
	if r == nil || !r.safe || r.x.req.Length > maxRepeatBody || !r.count(sizeOf(r.x.req)) {
		return nil
	}
	r.head = r.x.req.Clone()
	return r
}

// count counts memory. It reports false if there is none left.
func (r *retrying) count(n int) bool {
	if !budget.AddUpTo(&r.x.engine.repeats, int64(n), repeatMemory) {
		return false
	}
	r.kept += n
	return true
}

// add keeps a part of the body.
func (r *retrying) add(data []byte) {
	switch {
	case !r.wants():
	case len(r.body)+len(data) > maxRepeatBody || !r.count(len(data)):
		r.lost = true
	default:
		r.body = append(r.body, data...)
	}
}

// wants reports whether it gets what is carried of the body.
func (r *retrying) wants() bool { return r != nil && !r.lost }

// end is the last call.
func (r *retrying) end() {
	r.x.engine.repeats.Add(-int64(r.kept))
	r.x.req, r.body, r.head = r.first, nil, nil
}

// repeats decides whether the request goes to a Pod again after a failure.
func repeats(x *exchange, err error) bool {
	r := x.again
	switch {
	case r == nil, err == nil, x.answering, x.drained.Load(), x.conn.malformed.Load(), errors.Is(err, errLeft), errors.Is(err, pods.ErrNone),
		errors.Is(err, errReplaced):
		return false
	case errors.Is(err, errRepeat): // see takes
		return true
	}
	unsent := isUndialed(err) && x.upload == nil
	return (unsent || r.repeatable()) && r.allow()
}

// takes decides whether the request goes to a Pod again for the status of an answer.
func (r *retrying) takes(status int) bool {
	return r != nil && r.rule.Has(status) && !r.x.drained.Load() && r.repeatable() && r.allow()
}

// repeatable reports whether a request that was sent may be sent again, and all of it is kept.
func (r *retrying) repeatable() bool {
	x := r.x
	if !r.safe {
		return false
	}
	up := x.upload
	if up == nil { // it went out with the head, or has not been read
		return true
	}
	if !up.came.Load() || !up.endsWithin(pollInterval) {
		return false
	}
	return up.err == nil && r.head != nil && !r.lost && len(x.client.source().trailers()) == 0
}

// endsWithin waits for the end of an upload whose body has come: a Pod may answer a moment before it.
func (u *upload) endsWithin(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-u.done:
		return true
	case <-timer.C:
		return false
	}
}

// allow decides whether there is another attempt, and counts it.
func (r *retrying) allow() bool {
	x, now := r.x, time.Now()
	r.delay = r.rule.Wait(r.n, rand.Uint64())
	if r.n >= r.rule.Attempts || !now.Add(r.delay).Before(r.until) {
		return false
	}
	if of := &transportOf(x.to).retries; !of.Take(now) {
		x.config.Traffic().RetryDenied()
		if of.Warns(now) {
			x.engine.host.Log().Warn("too many requests fail to retry them all", "service", x.config.Service, "backend", x.to.Service)
		}
		return false
	}
	r.n++
	return true
}

// wait waits before the next attempt. It fails if that is not wanted any more.
func (r *retrying) wait() error {
	x, end := r.x, time.Now().Add(r.delay)
	for {
		if x.client.left() {
			return errLeft
		}
		left := time.Until(end)
		if left <= 0 {
			x.touch()
			return nil
		}
		timer := time.NewTimer(min(left, pollInterval))
		select {
		case <-timer.C:
		case <-x.engine.host.Context().Done():
			timer.Stop()
			return pods.ErrNone
		}
	}
}

// rewind makes the request ready to be sent again, and returns its body if that goes out with the head. whole is the one of the first
// time.
func (r *retrying) rewind(whole []byte) []byte {
	x := r.x
	if x.upload == nil {
		return whole
	}
	x.upload, x.req = nil, r.head
	x.req.Chunked, x.req.Length, x.req.Continue = false, int64(len(r.body)), false
	return r.body
}

// maxSkipped is how much of an answer that is dropped is read, in bytes.
const maxSkipped = 256 << 10

// skip drops the answer of a Pod. Its connection is of use if the rest of the answer has come, and is not long. Not while the Pod waits
// for a body that it has not asked for: it would take the next request for that.
func skip(x *exchange, b pod, waits bool) {
	x.reusable = !waits
	body := b.source(x)
	for n := 0; n < maxSkipped && !body.done(); {
		data, _, err := body.next()
		if err != nil || len(data) == 0 {
			break
		}
		n += len(data)
		body.take()
	}
	x.reusable = x.reusable && body.done()
}
