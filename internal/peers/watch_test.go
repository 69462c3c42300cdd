package peers

import (
	"slices"
	"testing"
	"time"
)

// link is one watcher whose questions are answered at once by those that up reports.
type link struct {
	watch     Watch
	now       time.Duration
	questions int
	up        func(name string) bool
}

func newLink(names ...string) *link {
	l := &link{now: time.Hour, up: func(string) bool { return true }}
	l.watch.Set(names)
	return l
}

// pass lets time pass in steps.
func (l *link) pass(d time.Duration) {
	for end := l.now + d; l.now < end; {
		l.now += Step
		for _, q := range l.watch.Tick(l.now) {
			l.questions++
			if l.up(q.Name) {
				l.watch.Heard(l.now, q.Name)
			}
		}
	}
}

func (l *link) down(names ...string) {
	l.up = func(name string) bool { return !slices.Contains(names, name) }
}

func (l *link) want(t *testing.T, what string, names ...string) {
	t.Helper()
	if got := l.watch.Unreachable(l.now); !slices.Equal(got, names) {
		t.Errorf("%s: unreachable are %v, want %v", what, got, names)
	}
}

// One that is silent is reported within Silence and one more Period, not before, and not when it answers again.
func TestWatchReportsTheSilent(t *testing.T) {
	l := newLink("a", "b", "c")
	l.pass(10 * Period)
	if l.questions > 3*11 {
		t.Errorf("%d questions in 10 periods to 3 that answer", l.questions)
	}
	l.down("b")
	l.pass(Silence - Period)
	l.want(t, "silent for a moment")
	l.pass(2 * Period)
	l.want(t, "silent", "b")
	l.down("b", "a")
	l.pass(2*Period + Silence)
	l.want(t, "another one, too", "a", "b")
	l.down()
	l.pass(Period)
	l.want(t, "all answer again")
}

// One that never answered, as behind a firewall, is never reported; neither is one whose address has changed.
func TestWatchReportsNoneItNeverHeard(t *testing.T) {
	l := newLink("a", "b")
	l.down("b")
	l.pass(time.Minute)
	l.want(t, "never heard")
	l.down()
	l.pass(2 * Period)
	l.watch.Forget("b")
	l.down("b")
	l.pass(time.Minute)
	l.want(t, "never heard at its new address")
	l.watch.Set([]string{"a"})
	l.watch.Set([]string{"a", "b"})
	l.pass(time.Minute)
	l.want(t, "never heard since it is watched again")
}

// A watcher that hears no answer reports no node, however its questions are spread over time; one that
// has reported one before goes on.
func TestWatchSuspectsItsOwnLink(t *testing.T) {
	for offset := time.Duration(0); offset < 2*Period; offset += Step {
		l := newLink("a")
		l.pass(10*Period + offset)
		l.watch.Set([]string{"a", "b", "c"}) // asked at other times than a
		l.pass(5*Period + offset)
		l.down("a", "b", "c")
		for range 40 {
			l.pass(Step)
			l.want(t, "its link is down")
		}
		l.down()
		l.pass(5 * Period)
		l.down("c")
		l.pass(5 * Period)
		l.want(t, "a dead one", "c")
		l.down("a", "b", "c")
		l.pass(time.Minute)
		l.want(t, "its link is down, and one was dead before", "c")
	}
	one := newLink("a")
	one.pass(5 * Period)
	one.down("a")
	one.pass(5 * Period)
	one.want(t, "the only one, which others have to judge", "a")
}

// A watcher that was suspended, or was not run for some seconds, does not take its own silence for that of others.
func TestWatchStartsOverAfterAPause(t *testing.T) {
	l := newLink("a", "b")
	l.pass(5 * Period)
	for _, pause := range []time.Duration{2 * Period, Silence, time.Hour} {
		l.now += pause
		l.want(t, "before the first step after a pause")
		l.down("a")
		l.pass(Silence - Step)
		l.want(t, "right after a pause")
		l.down()
		l.pass(Period)
	}
	l.down("a")
	l.pass(5 * Period)
	l.want(t, "later", "a")
}
