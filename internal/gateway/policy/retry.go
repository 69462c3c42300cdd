package policy

import (
	"fmt"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// What a retry has without a value. The specification leaves both open.
const (
	defaultAttempts = 2
	defaultBackoff  = 25 * time.Millisecond
)

// NoTimeout is the timeout of a rule that asks for none: its backends may be silent for as long as connections may be idle.
const NoTimeout time.Duration = -1

// The statuses that a rule can name.
const leastCode, mostCode = 400, 599

// maxDoublings bounds how often the backoff doubles, and maxBackoff how long it is: no request waits for as long.
const (
	maxDoublings = 3
	maxBackoff   = 24 * time.Hour
)

// Retry is when a request goes to a backend again.
type Retry struct {
	// Attempts is how often at most, beside the first time.
	Attempts int
	// Backoff is how long is waited at least before the first of them.
	Backoff time.Duration
	// Within bounds the time of all attempts together; 0 is how long the front lets a backend be silent.
	Within time.Duration
	codes  [mostCode + 1 - leastCode]bool
}

// ReadRetry reads the retry of a rule whose requests may take a time, 0 without a bound. wrong names the first invalid field.
func ReadRetry(spec *gwv1.HTTPRouteRetry, within time.Duration) (r *Retry, wrong string) {
	r = &Retry{Attempts: defaultAttempts, Backoff: defaultBackoff, Within: within}
	if spec.Attempts != nil {
		if r.Attempts = *spec.Attempts; r.Attempts < 0 {
			return nil, "attempts: want 0 or more"
		}
	}
	if spec.Backoff != nil {
		d, ok := duration(spec.Backoff)
		if !ok {
			return nil, "backoff: want a duration, for example 100ms or 1s"
		}
		r.Backoff = min(d, maxBackoff)
	}
	for i, code := range spec.Codes {
		if code < leastCode || code > mostCode {
			return nil, fmt.Sprintf("codes[%d]: want 400 to 599", i)
		}
		r.codes[code-leastCode] = true
	}
	return r, ""
}

// duration reads a duration of the Gateway API.
func duration(d *gwv1.Duration) (time.Duration, bool) {
	v, err := time.ParseDuration(string(*d))
	return v, err == nil && v >= 0
}

// Never reports whether no request goes to a backend again.
func (r *Retry) Never() bool { return r.Attempts == 0 }

// Has reports whether a request is retried that a backend has answered with a status.
func (r *Retry) Has(status int) bool {
	return status >= leastCode && status <= mostCode && r.codes[status-leastCode]
}

// Wait returns how long to wait before a further attempt, after n of them: the backoff, doubled each time up to eightfold, and up
// to half of that more, so that the requests of one outage do not come back at the same time. random is any number.
func (r *Retry) Wait(n int, random uint64) time.Duration {
	wait := r.Backoff << min(n, maxDoublings)
	return wait + time.Duration(random%uint64(wait/2+1)) //nolint:gosec // neither is negative
}
