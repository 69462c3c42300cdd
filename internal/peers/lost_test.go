package peers

import (
	"maps"
	"slices"
	"testing"
	"time"
)

// lost passes time until the lost machines are as given, and returns how long that took; up to limit.
func (l *link) lost(limit time.Duration, names ...string) (took time.Duration, ok bool) {
	for begin := l.now; l.now-begin <= limit; l.pass(Step) {
		if slices.Equal(l.watch.Lost(l.now), names) {
			return l.now - begin, true
		}
	}
	return limit, false
}

// A machine that falls silent is lost within 2.25 s, whenever that happens between two questions, and regained within
// 1.5 s, but not by single answers.
func TestLost(t *testing.T) {
	var slowest, back time.Duration
	for offset := range 4 {
		for _, all := range [][]string{{"a", "b"}, {"a", "b", "c", "d", "e", "f"}, {"b"}} {
			l := newLink(all...)
			l.pass(10*Period + time.Duration(offset)*Step)
			if _, ok := l.lost(0); !ok {
				t.Fatal("lost before anything happened")
			}
			l.down("b")
			took, ok := l.lost(9*Period/4, "b")
			if !ok {
				t.Errorf("%v: b is not lost after %s", all, took)
			}
			slowest = max(slowest, took)
			l.pass(10 * Period)
			if _, ok := l.lost(0, "b"); !ok {
				t.Errorf("%v: b is not lost any more", all)
			}
			l.down()
			l.pass(Step)
			l.down("b")
			for range 8 { // single answers
				l.pass(Period)
				l.down()
				l.pass(Retry)
				l.down("b")
				if got := l.watch.Lost(l.now); !slices.Equal(got, []string{"b"}) {
					t.Fatalf("%v: after a single answer lost are %v", all, got)
				}
			}
			l.down()
			if took, ok = l.lost(3 * Period / 2); !ok {
				t.Errorf("%v: b is lost %s after it answers again", all, took)
			}
			back = max(back, took)
		}
	}
	t.Logf("lost after at most %s, regained after at most %s", slowest, back)
}

// A machine that none of several others answers loses none of them: its own link is likelier to be bad. One that falls
// silent afterwards, or was never heard, or while this machine was suspended, is not lost either.
func TestNothingLostByItself(t *testing.T) {
	l := newLink("a", "b", "c", "never")
	l.down("never")
	l.pass(10 * Period)
	if _, ok := l.lost(0); !ok {
		t.Error("one that was never heard is lost")
	}
	l.down("a", "b", "c", "never")
	for range 20 {
		l.pass(Period)
		if got := l.watch.Lost(l.now); len(got) > 0 {
			t.Fatalf("none answers, and lost are %v", got)
		}
	}
	l.down("never")
	l.pass(5 * Period)
	l.down("a", "never")
	if _, ok := l.lost(3*Period, "a"); !ok {
		t.Error("a is not lost")
	}
	l.down("a", "b", "c", "never")
	for range 20 {
		l.pass(Period)
		if got := l.watch.Lost(l.now); !slices.Equal(got, []string{"a"}) {
			t.Fatalf("the others went as well, and lost are %v", got)
		}
	}
	l.down("never")
	l.pass(5 * Period)
	l.now += time.Hour // suspended; the answers of then are missing
	if _, ok := l.lost(0); !ok {
		t.Error("a suspended machine loses others")
	}
	l.pass(5 * Period)
	if _, ok := l.lost(0); !ok {
		t.Error("a suspended machine loses others later")
	}
}

// When this machine's own link comes back, the machines are asked at different times, and answers come only after a step has
// judged: the first one that answers does not make the others lost. One that stays silent is lost soon.
func TestNothingLostWhenTheLinkComesBack(t *testing.T) {
	var l *link
	step := func(up func(string) bool) []string {
		l.now += Step
		asked := l.watch.Tick(l.now)
		lost := l.watch.Lost(l.now)
		for _, q := range asked {
			if up(q.Name) {
				l.watch.Heard(l.now+Step/8, q.Name)
			}
		}
		return lost
	}
	all := func(string) bool { return true }
	none := func(string) bool { return false }
	for offset := range 4 {
		for down := 4; down <= 16; down++ {
			l = newLink("a")
			for range 9 + offset {
				step(all)
			}
			l.watch.Set([]string{"a", "b", "c", "d"}) // asked at other times than a
			for range 20 {
				step(all)
			}
			for range down {
				if lost := step(none); len(lost) > 0 {
					t.Fatalf("offset %d: none answers, and lost are %v", offset, lost)
				}
			}
			for i := range 12 {
				if lost := step(all); len(lost) > 0 {
					t.Errorf("offset %d: %d steps after a link that was down for %d comes back, lost are %v", offset, i, down, lost)
				}
			}
			for range down {
				step(none)
			}
			var lost []string
			for range 9 {
				lost = step(func(name string) bool { return name != "c" })
			}
			if !slices.Equal(lost, []string{"c"}) {
				t.Errorf("offset %d: all but c are back, and lost are %v", offset, lost)
			}
		}
	}
}

// Every member asks all others of a small cluster, and in a large one so many that the cost is bounded, first those it
// watches.
func TestAskedBy(t *testing.T) {
	for _, n := range []int{1, 2, 10, MaxAsked + 1, 1000} {
		r := NewRing(names(n))
		asked := r.AskedBy("node-0")
		if len(asked) != min(n-1, MaxAsked) || slices.Contains(asked, "node-0") {
			t.Errorf("%d members: one asks %d", n, len(asked))
		}
		if watched := r.WatchedBy("node-0"); !slices.Equal(watched, asked[:len(watched)]) {
			t.Errorf("%d members: watched are %v, asked %v", n, watched, asked)
		}
	}
}

// A suspect that does not answer while others do is lost, until its machine is no more. One that answers stays only while it is suspected.
func TestSuspectsAreLost(t *testing.T) {
	var w Watch
	now := time.Hour
	pass := func(d time.Duration, answering ...string) {
		for end := now + d; now < end; now += Step {
			w.Tick(now)
			w.Lost(now)
			for _, name := range answering {
				w.Heard(now, name)
			}
		}
	}
	w.Set([]string{"a", "b"})
	pass(5*Period, "a", "b")
	w.Suspect([]string{"dead", "well"})
	pass(2*Period, "a", "b", "well")
	if got := w.Lost(now); !slices.Equal(got, []string{"dead"}) {
		t.Errorf("lost are %v", got)
	}
	w.Suspect(nil)
	if got := slices.Sorted(maps.Keys(w.targets)); !slices.Equal(got, []string{"a", "b", "dead"}) {
		t.Errorf("asked are %v", got)
	}
	w.Set([]string{"a", "b"})
	pass(Period, "a", "b")
	if got := w.Lost(now); len(got) != 0 {
		t.Errorf("lost are %v, whose Nodes are no more", got)
	}
}
