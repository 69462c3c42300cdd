package peers

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func fresh(string) bool { return true }

// suspected returns the names of the suspects.
func suspected(d *Detector) (out []string) {
	list, _ := d.Suspects(fresh)
	for _, s := range list {
		out = append(out, s.Name)
	}
	return out
}

// Most of the watchers have to report a member, and those that do not watch it do not count, whatever they say.
func TestDetectorWantsMost(t *testing.T) {
	all := names(10)
	r := NewRing(all)
	const victim = "node-4"
	watchers := r.WatchersOf(victim)
	var d Detector
	d.SetMembers(all, len(all))
	want := func(what string, names ...string) {
		t.Helper()
		if got := suspected(&d); !slices.Equal(got, names) {
			t.Errorf("%s: suspects are %v, want %v", what, got, names)
		}
	}
	for _, by := range append([]string{"stranger"}, all...) {
		if !slices.Contains(watchers, by) {
			d.Report(by, []string{victim})
		}
	}
	want("all that do not watch it")
	d.Report(watchers[0], []string{victim})
	want("one that does")
	d.Report(watchers[2], []string{victim})
	want("two", victim)
	if list, _ := d.Suspects(fresh); !slices.Equal(list[0].By, sorted(watchers[0], watchers[2])) || list[0].Of != 3 {
		t.Errorf("the suspect is %v", list[0])
	}
	if list, _ := d.Suspects(func(by string) bool { return by != watchers[0] }); len(list) > 0 {
		t.Error("the report of one that is not heard of counts")
	}
	d.Report(watchers[2], nil)
	want("one of them no longer")
	// A single node that says that all others are dead.
	d = Detector{}
	d.SetMembers(all, len(all))
	d.Report("node-0", all)
	want("one that reports everybody")
}

func sorted(names ...string) []string {
	slices.Sort(names)
	return names
}

// A watcher that is down is replaced by the next member, which has never heard the dead one: the two
// that are left are most of three. One alone never is, but of two members.
func TestDetectorWhenWatchersDie(t *testing.T) {
	all := names(12)
	r := NewRing(all)
	const victim = "node-7"
	w := r.WatchersOf(victim)
	var d Detector
	up := func(without ...string) {
		d.SetMembers(slices.DeleteFunc(slices.Clone(all), func(name string) bool { return slices.Contains(without, name) }), len(all))
	}
	d.Report(w[1], []string{victim, victim})
	d.Report(w[2], []string{victim})
	up(w[0])
	if list, mass := d.Suspects(fresh); len(list) != 1 || list[0].Name != victim || list[0].Of != 3 || mass {
		t.Errorf("reported by the two that are left: %v, %t", list, mass)
	}
	up(w[0], w[1])
	if got := suspected(&d); got != nil {
		t.Errorf("reported by the one that is left: %v", got)
	}
	up(victim)
	if got := suspected(&d); got != nil {
		t.Errorf("one that is down: %v", got)
	}
	d = Detector{}
	d.SetMembers(all[:2], 2)
	d.Report(all[0], all[1:2])
	if got := suspected(&d); !slices.Equal(got, all[1:2]) {
		t.Errorf("reported by the other one of two: %v", got)
	}
}

// More than half of three or more members are not suspected at a time; one of two is.
func TestDetectorStopsAtHalf(t *testing.T) {
	for n := 2; n <= 40; n++ {
		all := names(n)
		r := NewRing(all)
		dead := 1 + rand.IntN(n-1)
		var d Detector
		d.SetMembers(all, n)
		for _, by := range all[dead:] {
			d.Report(by, slices.DeleteFunc(r.WatchedBy(by), func(name string) bool { return slices.Contains(all[dead:], name) }))
		}
		list, mass := d.Suspects(fresh)
		if want := n > 2 && 2*len(list) > n; mass != want {
			t.Errorf("%d of %d suspected, %d dead: mass is %t", len(list), n, dead, mass)
		}
		// Those that are down already count.
		d.SetMembers(all[dead/2:], n)
		list, mass = d.Suspects(fresh)
		if want := n > 2 && len(list) > 0 && 2*(len(list)+dead/2) > n; mass != want {
			t.Errorf("%d of %d suspected, %d down: mass is %t", len(list), n, dead/2, mass)
		}
	}
}
