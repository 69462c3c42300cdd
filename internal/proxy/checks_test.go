package proxy

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// looks is a dataplane.Checker that takes its time and says what it is told.
type looks struct {
	*fakeDataplane
	takes  time.Duration
	intact bool
	err    error
}

func (l *looks) Intact() (bool, error) {
	time.Sleep(l.takes)
	return l.intact, l.err
}

// A look that is dear happens seldom, as does one that raises alarm again and again.
func TestLooksAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &looks{takes: time.Millisecond, intact: true}
		c := newChecks(l, 30*time.Second, slog.New(slog.DiscardHandler))
		defer c.timer.Stop()
		start := time.Now()
		want := func(what string, pause time.Duration, intact bool) {
			t.Helper()
			<-c.timer.C
			if got := time.Since(start); got != pause {
				t.Errorf("%s: after %s, want %s", what, got, pause)
			}
			if got := c.intact(); got != intact {
				t.Errorf("%s: intact %v, want %v", what, got, intact)
			}
			start = time.Now()
		}
		want("first", checkInterval, true)
		l.takes = 200 * time.Millisecond
		want("cheap before", checkInterval, true)
		l.takes, l.intact = 0, false
		want("dear before", checkShare*200*time.Millisecond, false)
		for _, pause := range []time.Duration{1, 2, 4, 8, 16, 30} {
			want("alarm before", pause*time.Second, false)
		}
		l.intact = true
		want("alarm before", 30*time.Second, true)
		l.intact = false
		want("quiet between two alarms", checkInterval, false)
		l.intact = true
		want("alarm before", 30*time.Second, true)
		want("quiet", checkInterval, true) // more than 30 s after the last alarm
		l.intact = false
		want("quiet for long", checkInterval, false)
		l.intact = true
		want("first alarm before", checkInterval, true)
		l.err = errors.New("no buffer space available")
		want("quiet again", checkInterval, true)
		want("failed before", 30*time.Second, true)
	})
}
