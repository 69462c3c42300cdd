package proxied

import (
	"sync"
	"time"
)

// workers are goroutines that serve one connection after the other: a new one grows its stack several times while it
// carries its first request, which is a twentieth of what a short connection costs.
type workers struct {
	wg   *sync.WaitGroup
	next chan func() // to idle workers
	over <-chan struct{}
}

// workerIdle is how long a worker waits for another connection.
const workerIdle = 50 * time.Millisecond

// run has a worker call f.
func (w *workers) run(f func()) {
	select {
	case w.next <- f:
	default:
		w.wg.Go(func() { w.work(f) })
	}
}

func (w *workers) work(f func()) {
	timer := time.NewTimer(workerIdle)
	defer timer.Stop()
	for {
		f()
		timer.Reset(workerIdle)
		select {
		case f = <-w.next:
		case <-timer.C:
			return
		case <-w.over:
			return
		}
	}
}
