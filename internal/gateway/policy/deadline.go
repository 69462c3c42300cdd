package policy

import (
	"strconv"
	"time"
)

// maxDeadlineDigits is how many digits a timeout of gRPC has at most.
const maxDeadlineDigits = 8

// Deadline reads the field grpc-timeout of a call: how long it may take. It returns 0 for an invalid value
// (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
func Deadline(text string) time.Duration {
	if len(text) < 2 || len(text) > maxDeadlineDigits+1 {
		return 0
	}
	units := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': 1}
	digits, unit := text[:len(text)-1], units[text[len(text)-1]]
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil {
		return 0
	}
	if unit == time.Hour { // more would not fit
		n = min(n, 1_000_000)
	}
	return time.Duration(n) * unit //nolint:gosec // of at most eight digits
}

// Over reports whether there is a deadline, not zero, that has passed.
func Over(deadline time.Time) bool { return !deadline.IsZero() && !time.Now().Before(deadline) }

// Within returns how long to wait for something: d, or the time until the deadline if that is shorter, but more than nothing. A zero
// deadline does not count.
func Within(deadline time.Time, d time.Duration) time.Duration {
	if deadline.IsZero() {
		return d
	}
	return max(min(d, time.Until(deadline)), time.Millisecond)
}
