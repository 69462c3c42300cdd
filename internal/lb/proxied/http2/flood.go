package http2

import "time"

const (
	// EmptyBurst and emptyRate (each second) bound frames other than DATA, as PING, SETTINGS, RST_STREAM, and HEADERS of
	// requests that are reset, beside emptyEach for every answer or part of a body that was carried: a client that has
	// answers has reason to ask more, to open windows and to measure round trips. Of DATA there may be as many beside one
	// for each byte that a Pod's request has taken.
	EmptyBurst = 2000
	emptyRate  = 200
	emptyEach  = 8
)

// allowance is how many frames a client may still send.
type allowance struct {
	left float64
	paid time.Time
}

// spend takes a frame into account. earned is what has been carried since the last time, each of which allows for
// so many more.
func (a *allowance) spend(each float64, earned *int64) bool {
	if a.left--; a.left >= 0 {
		return true
	}
	now := time.Now()
	a.left = min(EmptyBurst, a.left+emptyRate*min(1, now.Sub(a.paid).Seconds())+each*float64(*earned))
	a.paid, *earned = now, 0
	return a.left >= 0
}
