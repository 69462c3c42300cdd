package clock

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// Boot is the time since the start of the machine, which is never set: not the time of day.
func TestBoot(t *testing.T) {
	uptime := func() time.Duration {
		b, err := os.ReadFile("/proc/uptime")
		if err != nil {
			t.Fatal(err)
		}
		var seconds float64
		if _, err := fmt.Sscan(string(b), &seconds); err != nil {
			t.Fatal(err)
		}
		return time.Duration(seconds * float64(time.Second))
	}
	const digits = 10 * time.Millisecond // of /proc/uptime
	before := uptime()
	now := Boot()
	if after := uptime(); now < before-digits || now > after+digits {
		t.Errorf("%s, want it between %s and %s", now, before, after)
	}
}
