package testbed

import (
	"testing"
	"time"
)

// Patience is how long anything that a test waits for may take: not an
// expectation, but the time after which a slow machine is no longer an
// explanation. Package uml doubles it in its guests.
var Patience = 4 * time.Minute

// Until calls check every 20 ms until it returns nil. After Patience it fails
// the test with what was waited for and the last error.
func Until(t testing.TB, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for {
		begin := time.Now()
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s: %v", Patience, what, err)
		}
		// A check that starts a program takes a third of a processor at most: others wait for it, too.
		time.Sleep(min(max(leastPause, 2*time.Since(begin)), mostPause))
	}
}

// The bounds of the pause between two checks of Until.
const leastPause, mostPause = 20 * time.Millisecond, 500 * time.Millisecond

// Receive returns what comes from ch, or its zero value when ch is closed. After Patience it
// fails the test with what was waited for.
func Receive[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(Patience):
		t.Fatalf("waited %s for %s", Patience, what)
		panic("unreachable")
	}
}
