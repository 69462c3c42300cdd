package volumes

import (
	"testing"
	"time"
)

// Measuring volumes takes a hundredth of a processor, and a slow one is not forgotten.
func TestPauseAfterMeasuring(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		0: time.Second, 5 * time.Millisecond: time.Second, time.Second: 100 * time.Second, maxMeasure: 10 * time.Minute,
	} {
		if got := PauseAfter(took); got != want {
			t.Errorf("after %v it is %v, want %v", took, got, want)
		}
	}
}
