package speaker

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A proxy that is unhealthy for a moment is healthy; one that says so twice is not, a second and a half later at most. What it says
// first counts at once.
func TestHealthIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := []bool{false, true, true, false, true, false, false, false, true}
		var h health
		var seen []bool
		begin, asked := time.Now(), 0
		ctx, cancel := context.WithCancel(t.Context())
		h.run(ctx, func(context.Context) (bool, string) {
			asked++
			if asked == len(answers) {
				cancel()
			}
			return answers[asked-1], ""
		}, func() {
			ok, _ := h.get()
			seen = append(seen, ok)
		})
		if want := []bool{false, true, false, true}; !slices.Equal(seen, want) {
			t.Errorf("healthy was %v, want %v", seen, want)
		}
		// Of the eight pauses the ones after the first and the second moment of doubt are short.
		if took, want := time.Since(begin), 6*healthPeriod+2*confirmAfter; took != want {
			t.Errorf("it took %s, want %s", took, want)
		}
	})
}
