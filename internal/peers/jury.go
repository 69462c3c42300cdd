package peers

import (
	"maps"
	"slices"
)

// Jury judges by the reports of all watchers which members are unreachable. It is for one
// goroutine.
type Jury struct {
	ring    Ring
	total   int                 // members, those that are down included
	reports map[string][]string // whom a machine reports, by its name
}

// maxReported bounds how many members a report may name: as many as one watches.
const maxReported = Watchers

// smallest is the least number of members of which no more than half may be suspects at a time.
const smallest = 3

// Suspect is a member that most of its watchers report.
type Suspect struct {
	Name string
	By   []string // those that report it
	Of   int      // how many watchers it has
}

// SetMembers sets the members that are up, and how many there are with those that are down. The
// latter neither watch nor are watched.
func (j *Jury) SetMembers(up []string, total int) { j.ring, j.total = NewRing(up), total }

// Report replaces what a machine reports.
func (j *Jury) Report(by string, names []string) {
	if len(names) == 0 {
		delete(j.reports, by)
		return
	}
	if j.reports == nil {
		j.reports = map[string][]string{}
	}
	j.reports[by] = slices.Clone(names[:min(len(names), maxReported)])
}

// Suspects returns the members that most of their watchers report, by name. Reports of those that
// are not fresh do not count, but they are watchers. If the suspects and those that are down are more
// than half of three or more members, mass is true: then it is likelier that the watchers err,
// or are the smaller part of a cluster that has come apart.
func (j *Jury) Suspects(fresh func(watcher string) bool) (list []Suspect, mass bool) {
	reporters := map[string][]string{}
	for _, by := range slices.Sorted(maps.Keys(j.reports)) {
		if !fresh(by) {
			continue
		}
		for _, name := range j.reports[by] {
			if watchers := j.ring.WatchersOf(name); slices.Contains(watchers, by) && !slices.Contains(reporters[name], by) {
				reporters[name] = append(reporters[name], by)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(reporters)) {
		if s := (Suspect{name, reporters[name], len(j.ring.WatchersOf(name))}); 2*len(s.By) > s.Of {
			list = append(list, s)
		}
	}
	down := j.total - j.ring.Len()
	return list, j.total >= smallest && len(list) > 0 && 2*(len(list)+down) > j.total
}
