package acme

import (
	"fmt"
	"time"
)

// retries is how long an order waits after it has failed once, twice and so on; the last one goes on
// (https://letsencrypt.org/docs/integration-guide/#retrying-failures).
var retries = [...]time.Duration{time.Minute, 10 * time.Minute, 100 * time.Minute, 12 * time.Hour}

// retryAfter returns how long an order waits that has failed this many times.
func retryAfter(failures int) time.Duration {
	return retries[min(max(failures, 1), len(retries))-1]
}

// Orders of a namespace cost orderCost, and failed ones failureCost; it has budgetSize at first and gets as much in an hour.
// A tenant whose orders fail for ever new names, or who deletes the Secrets of successful orders, uses up its own budget first. All
// namespaces together have a ledger.
const (
	budgetSize  = 60
	orderCost   = 1
	failureCost = 10
)

// budget is what a namespace has used up.
type budget struct {
	used float64
	at   time.Time
}

// wait returns how long the next order waits.
func (b *budget) wait(now time.Time) time.Duration {
	over := b.decay(now) + orderCost - budgetSize
	return time.Duration(max(over, 0) / budgetSize * float64(time.Hour))
}

// decay returns what is used up now.
func (b *budget) decay(now time.Time) float64 {
	b.used, b.at = max(b.used-now.Sub(b.at).Hours()*budgetSize, 0), now
	return b.used
}

// spend counts an order that has ended.
func (b *budget) spend(now time.Time, failed bool) {
	b.used = b.decay(now) + orderCost
	if failed {
		b.used += failureCost - orderCost
	}
}

// pauseError is an authority that is not asked at present, by any order.
type pauseError struct {
	until time.Time
	why   error
}

func (e *pauseError) Error() string {
	return fmt.Sprintf("the authority is not asked before %s: %v", e.until.UTC().Format(time.RFC3339), e.why)
}

func (e *pauseError) Unwrap() error { return e.why }
