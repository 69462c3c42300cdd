package peers

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// How others are asked.
const (
	// Period is how often a machine that answers is asked, Retry how soon after a question without
	// an answer it is asked again.
	Period = time.Second
	Retry  = Period / 2
	// Silence is how long after its last answer a machine is unreachable, if it has left the last
	// unanswered questions without an answer.
	Silence    = 5 * Period / 2
	unanswered = 3
	// missed is how many questions in a row without an answer make a machine lost to this one, and regained is how many answers
	// in a row end that. Both take Retry for each but the first.
	missed, regained = 2, 2
	// Step is how often Tick is to be called. maxPause is the longest time between two calls after which
	// the silence of others means something: this machine may have been suspended.
	Step     = Period / 4
	maxPause = Step + Period
)

// Watch is what one machine knows of the machines it watches. Times come from one clock that counts
// while the machine is suspended. It is for one goroutine.
type Watch struct {
	targets map[string]*target
	ticked  time.Duration // the last call of Tick
	begun   bool          // there was one
}

type target struct {
	seen  bool          // it has answered ever
	heard time.Duration // its last answer, or when its silence began to count
	back  time.Duration // when it began to answer, or answered again after two questions or more
	asked time.Duration // the last question
	open  int           // questions since the last answer
	first time.Duration // the first of these
	lost  bool          // as Lost has it
	good  int           // questions in a row that were answered since it is lost
	kept  bool          // as Set has it
	// suspect is set if it is watched because of Suspect.
	suspect bool
}

// Question is one to ask now. Again is true if the one before had no answer.
type Question struct {
	Name  string
	Again bool
}

// Set replaces the machines to watch. Nothing is known of new ones. The kept ones are asked only to find out when they answer
// again: they can be Lost, but never Unreachable, and their silence says nothing about this machine's own link.
func (w *Watch) Set(names []string, kept ...string) {
	next := make(map[string]*target, len(names)+len(kept))
	for i, name := range slices.Concat(names, kept) {
		if next[name] == nil {
			next[name] = cmp.Or(w.targets[name], &target{})
			next[name].kept, next[name].suspect = i >= len(names), false
		}
	}
	w.targets = next
}

// Suspect replaces the machines that are asked as well because connections to them have no answer, although they have answered this
// machine before. They are like kept ones. Those that are Lost stay until they answer, or until Set leaves them out.
func (w *Watch) Suspect(names []string) {
	for name, t := range w.targets {
		if t.suspect && !t.lost && !slices.Contains(names, name) {
			delete(w.targets, name)
		}
	}
	for _, name := range names {
		if w.targets[name] == nil {
			w.targets[name] = &target{seen: true, kept: true, suspect: true}
		}
	}
}

// Forget forgets what is known of a machine, as when its address changes.
func (w *Watch) Forget(name string) {
	if w.targets[name] != nil {
		w.targets[name] = &target{}
	}
}

// Heard records an answer.
func (w *Watch) Heard(now time.Duration, name string) {
	t := w.targets[name]
	if t == nil {
		return
	}
	if t.open > 0 {
		t.good++
	}
	if !t.seen || t.open > 1 {
		t.back = now
	}
	t.seen, t.heard, t.open = true, now, 0
}

// Tick returns whom to ask now, by name.
func (w *Watch) Tick(now time.Duration) []Question {
	if w.begun && now-w.ticked > maxPause {
		for _, t := range w.targets { // start over: they may have answered meanwhile
			t.heard, t.open = now, 0
		}
	}
	w.ticked, w.begun = now, true
	doubt := w.doubt()
	var out []Question
	for _, name := range slices.Sorted(maps.Keys(w.targets)) {
		t := w.targets[name]
		wait := Period
		if t.open > 0 || t.lost || doubt {
			wait = Retry
		}
		if t.asked != 0 && now-t.asked < wait-Step/2 { // calls of Tick may be a little early
			continue
		}
		if t.open == 0 {
			t.first = now
		} else {
			t.good = 0
		}
		t.open++
		t.asked = now
		out = append(out, Question{Name: name, Again: t.open > 1})
	}
	return out
}

// doubt reports whether a machine has just become silent: then the others are asked sooner, to find out whether it is that
// machine or this one.
func (w *Watch) doubt() bool {
	for _, t := range w.targets {
		if t.seen && !t.lost && t.open > 0 && t.open <= missed {
			return true
		}
	}
	return false
}

// Lost returns the machines that this one does not reach, sorted: they answered once and have left the last questions
// without an answer, until they answer again and again. It finds them sooner than Unreachable, because little depends on
// it. If none of several others answers either, none becomes lost: this machine's own link is likelier to be bad.
func (w *Watch) Lost(now time.Duration) []string {
	var out []string
	for name, t := range w.targets {
		switch {
		case !t.lost:
			t.lost = t.seen && t.open > missed && w.othersAnswer(now, t)
			t.good = 0
		case t.good >= regained:
			t.lost = false
		}
		if t.lost {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// othersAnswer reports whether a machine other than one that is silent has answered since that did not, or that there is no
// other one. One that has just begun to answer again is no witness: this machine's own link may have come back, and the silent
// one was not asked since.
func (w *Watch) othersAnswer(now time.Duration, silent *target) bool {
	others := false
	for _, t := range w.targets {
		if t == silent || !t.seen || t.kept {
			continue
		}
		if t.heard >= silent.first+Retry/2 && now-t.back >= Retry+Step {
			return true
		}
		others = true
	}
	return !others
}

// Unreachable returns the machines that answered once and do so no more, sorted. A machine that
// hears none of several others suspects its own link: it reports one only if another one has
// answered since this one fell silent. That of a single one is left to the judgement of others.
func (w *Watch) Unreachable(now time.Duration) []string {
	known := 0
	var heard time.Duration // the last answer of any
	for _, t := range w.targets {
		if t.seen && !t.kept {
			known++
			heard = max(heard, t.heard)
		}
	}
	var out []string
	for name, t := range w.targets {
		silent := t.seen && !t.kept && t.open >= unanswered && now-t.heard >= Silence
		if silent && (known == 1 || heard >= t.first+Retry) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Answered returns the machines that have answered since they are watched, sorted.
func (w *Watch) Answered() []string {
	var out []string
	for name, t := range w.targets {
		if t.seen {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
