// Package clock has clocks that the time package does not offer.
package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Boot returns the time since the machine was started. It is monotonic and, unlike
// the time package's clock, counts the time during which the machine is suspended
// (CLOCK_BOOTTIME, Linux 2.6.39).
func Boot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("clock: CLOCK_BOOTTIME: " + err.Error()) // every kernel that Go runs on has it
	}
	return time.Duration(t.Nano())
}

// Synchronized reports whether something keeps the kernel's clock right (adjtimex(2)).
func Synchronized() (bool, error) {
	state, err := unix.Adjtimex(&unix.Timex{})
	return state != unix.TIME_ERROR, err
}
