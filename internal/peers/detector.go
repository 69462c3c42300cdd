package peers

import (
	"maps"
	"slices"
)

// Detector judges by the reports of all watchers which members are unreachable. It is for one
// goroutine.
type Detector struct {
	ring    Ring
	total   int                 // members, including dead ones
	reports map[string][]string // whom a machine reports, by its name
}

// maxReported bounds how many members a report may name: as many as one watches.
const maxReported = Watchers

// smallest is the least number of members of which no more than half may be suspects at a time.
const smallest = 3

// Suspect is a member that most of its watchers report.
type Suspect struct {
	Name string
	By   []string // the members that report it
	Of   int      // how many watchers it has
}

// SetMembers sets the members that are up, and how many there are including dead ones. The
// latter neither watch nor are watched.
func (d *Detector) SetMembers(up []string, total int) { d.ring, d.total = NewRing(up), total }

// Report replaces what a machine reports.
func (d *Detector) Report(by string, names []string) {
	if len(names) == 0 {
		delete(d.reports, by)
		return
	}
	if d.reports == nil {
		d.reports = map[string][]string{}
	}
	d.reports[by] = slices.Clone(names[:min(len(names), maxReported)])
}

// Suspects returns the members that most of their watchers report, by name. Reports that
// are not fresh do not count, but they are watchers. If the suspects and those that are down are more
// than half of three or more members, mass is true: then it is likelier that the watchers err,
// or are the smaller part of a cluster that has come apart.
func (d *Detector) Suspects(fresh func(watcher string) bool) (list []Suspect, mass bool) {
	reporters := map[string][]string{}
	for _, by := range slices.Sorted(maps.Keys(d.reports)) {
		if !fresh(by) {
			continue
		}
		for _, name := range d.reports[by] {
			if watchers := d.ring.WatchersOf(name); slices.Contains(watchers, by) && !slices.Contains(reporters[name], by) {
				reporters[name] = append(reporters[name], by)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(reporters)) {
		if s := (Suspect{name, reporters[name], len(d.ring.WatchersOf(name))}); 2*len(s.By) > s.Of {
			list = append(list, s)
		}
	}
	down := d.total - d.ring.Len()
	return list, d.total >= smallest && len(list) > 0 && 2*(len(list)+down) > d.total
}
