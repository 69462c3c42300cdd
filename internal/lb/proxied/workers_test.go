package proxied

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A worker serves the next connection, too, if it comes soon; none stays for long.
func TestWorkersAreUsedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wg sync.WaitGroup
		w := workers{wg: &wg}
		run := func() (worker int) {
			w.run(func() { worker = goroutine() })
			synctest.Wait()
			return worker
		}
		first := run()
		if again := run(); again != first {
			t.Errorf("goroutine %d after %d", again, first)
		}
		release := make(chan struct{})
		w.run(func() { <-release })
		if other := run(); other == first {
			t.Error("a worker that has a connection has got another one")
		}
		close(release)
		time.Sleep(2 * workerIdle) // of the bubble's clock
		wg.Wait()                  // none stays
		last := run()
		if last == first {
			t.Error("a worker has stayed")
		}
		w.end()
		wg.Wait()
		if w.run(func() {}); len(w.idle) > 0 {
			t.Error("a worker waits after the end")
		}
		wg.Wait()
	})
}

// goroutine returns the number of the calling goroutine.
func goroutine() (n int) {
	b := make([]byte, 64)
	_, _ = fmt.Sscanf(string(b[:runtime.Stack(b, false)]), "goroutine %d ", &n)
	return n
}
