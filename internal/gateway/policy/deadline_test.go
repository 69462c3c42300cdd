package policy

import (
	"testing"
	"time"
)

func TestDeadline(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"100m": 100 * time.Millisecond, "1S": time.Second, "2M": 2 * time.Minute, "3H": 3 * time.Hour, "5u": 5 * time.Microsecond,
		"99999999n": 99999999, "99999999H": 1_000_000 * time.Hour, "0S": 0,
		"": 0, "1": 0, "S": 0, "-1S": 0, "+1S": 0, "1s": 0, "999999999m": 0, "1 S": 0, "0x1S": 0, "1.5S": 0, "1_0S": 0,
	} {
		if got := Deadline(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
