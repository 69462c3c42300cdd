package store

import (
	"testing"
	"testing/synctest"
	"time"
)

// A member that gave the leadership away is not chosen for ten minutes; another reason to hand over says nothing of it.
func TestTooSlowIsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s tooSlow
		for _, value := range []string{"", "not an ID", "8e9e05c52164694d"} {
			s.note([]byte(value))
		}
		const id = 0x8e9e05c52164694d
		if !s.has(id) || s.has(0) || len(s.when) != 1 {
			t.Errorf("slow members are %v", s.when)
		}
		time.Sleep(yieldMemory)
		if s.has(id) {
			t.Error("ten minutes later it still counts as slow")
		}
	})
}

// The mean is of the syncs between two looks. Without one, nothing is known.
func TestMeanOfSyncs(t *testing.T) {
	before := syncs{count: 10, took: 1}
	if mean, known := (syncs{count: 12, took: 1.5}).since(before); mean != 250*time.Millisecond || !known {
		t.Errorf("two syncs in half a second: %s, %v", mean, known)
	}
	if mean, known := before.since(before); mean != 0 || known {
		t.Errorf("no sync: %s, %v", mean, known)
	}
}

// etcd's own metric is found under the name and help that it has in this version.
func TestSyncsAreMeasured(t *testing.T) {
	metric, err := syncHistogram()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := syncHistogram(); err != nil || again != metric {
		t.Errorf("the second look: %v, %v", again, err)
	}
}
