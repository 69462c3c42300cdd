package podnet

import (
	"slices"
	"testing"
	"time"
)

// A link that is down for a moment is noticed 50 ms after it is up, whatever failed before;
// what goes on failing is tried less and less often.
func TestPace(t *testing.T) {
	start := time.Unix(1000, 0)
	now := start
	p := pace{due: now}
	compare := func(failed bool) {
		t.Helper()
		now = now.Add(p.wait(now))
		p.compared(now, failed, false)
	}
	due := func(what string, want time.Duration) {
		t.Helper()
		if got := p.wait(now); got != want {
			t.Errorf("%s: the next comparison is in %v, want %v", what, got, want)
		}
	}
	compare(false)
	due("all is well", resyncInterval)
	now = now.Add(time.Second)
	p.deleted(now)
	due("a route is deleted", settleInterval)
	now = now.Add(100 * time.Millisecond)
	p.deleted(now)
	due("and another one", settleInterval-100*time.Millisecond)
	compare(true)
	for _, want := range []time.Duration{50, 100, 200, 400} {
		due("the link is down", want*time.Millisecond)
		compare(true)
	}
	p.linked(now)
	due("the link is up", linkSettle)
	compare(true)
	due("its route is not there yet", retryMin)
	compare(false)
	due("all is well again", resyncInterval)
	now = now.Add(10 * time.Second)
	p.written(now, true, false)
	due("a Node has come that cannot be reached", retryMin)
	for range 12 {
		compare(true)
	}
	due("for long", retryInterval)
	p.compared(now, true, true)
	due("for as long as the kernel is the same", resyncInterval)
	p.compared(now, false, false)
	now = now.Add(10 * time.Second)
	for range 100 { // devices without end
		p.linked(now)
		if w := p.wait(now); w > linkSettleMax {
			t.Fatalf("waits %v", w)
		}
		compare(false)
	}
	p.linked(now)
	due("among many events", linkSettleMax)
}

// An Event names what lasts, once, and again if it is another problem or returns.
func TestSightings(t *testing.T) {
	s := sightings{}
	now := time.Unix(1000, 0)
	var reports []string
	after := func(d time.Duration, problems map[string]string, want ...string) {
		t.Helper()
		now, reports = now.Add(d), nil
		s.follow(now, problems, func(node, problem string) { reports = append(reports, node+" "+problem) })
		if !slices.Equal(reports, want) {
			t.Errorf("reported %q, want %q", reports, want)
		}
	}
	down := map[string]string{"b": "no route"}
	after(0, down)
	after(reportAfter/2, down)
	after(0, nil)
	after(reportAfter/2, down)
	after(reportAfter/2, down)
	after(reportAfter/2, down, "b no route")
	after(time.Minute, down)
	after(0, map[string]string{"b": "no key"})
	after(reportAfter, map[string]string{"b": "no key"}, "b no key")
}
