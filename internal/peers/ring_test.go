package peers

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func names(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("node-%d", i))
	}
	return out
}

// Every member is watched by as many others as it watches, and by Watchers of them where there are as many;
// one that comes or goes changes that of its neighbours alone.
func TestRing(t *testing.T) {
	for range 200 {
		all := names(1 + rand.IntN(40))
		r := NewRing(all)
		want := min(Watchers, len(all)-1)
		for _, name := range all {
			watchers, watched := r.WatchersOf(name), r.WatchedBy(name)
			if len(watchers) != want || len(watched) != want {
				t.Fatalf("%d members: %s is watched by %v and watches %v", len(all), name, watchers, watched)
			}
			for i, by := range watchers {
				if by == name || slices.Contains(watchers[:i], by) || !slices.Contains(r.WatchedBy(by), name) {
					t.Fatalf("%d members: %s is watched by %v", len(all), name, watchers)
				}
			}
		}
		gone := rand.IntN(len(all))
		less := NewRing(slices.Delete(slices.Clone(all), gone, gone+1))
		changed := 0
		for i, name := range all {
			if i != gone && !slices.Equal(r.WatchersOf(name), less.WatchersOf(name)) {
				changed++
			}
		}
		if changed > Watchers {
			t.Fatalf("%d members: one that went changed the watchers of %d others", len(all), changed)
		}
		shuffled := slices.Clone(all)
		rand.Shuffle(len(all), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		if !slices.Equal(NewRing(shuffled).order, r.order) {
			t.Fatal("the order of the members matters")
		}
	}
	if r := NewRing(names(5)); r.Has("other") || r.WatchersOf("other") != nil || r.WatchedBy("other") != nil {
		t.Error("one that is no member has a place")
	}
}
