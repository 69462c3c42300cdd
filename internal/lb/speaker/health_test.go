package speaker

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A proxy that is unhealthy for less than three seconds is healthy. What it says first counts at once.
func TestHealthIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := []bool{false, true, true, false, true,
			false, false, false, false, false, false, true, false, false, false, false, false, false,
			false, false, true}
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
		// Of the twenty pauses those are short while it is in doubt: after one answer, after six, and after six of eight. After the
		// seventh, 3 s later, it is unhealthy.
		if took, want := time.Since(begin), 7*healthPeriod+13*confirmAfter; took != want {
			t.Errorf("it took %s, want %s", took, want)
		}
	})
}
