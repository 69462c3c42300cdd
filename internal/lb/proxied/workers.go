package proxied

import (
	"sync"
	"time"
)

// workers are goroutines that serve one connection or request after the other: a new one grows its stack several times while it
// carries its first request, which is a twentieth of what a short connection costs. The worker that became idle last is used
// first, so that those at the bottom of the stack are the ones that nobody needs.
type workers struct {
	wg *sync.WaitGroup

	mu     sync.Mutex
	idle   []chan func() // one channel for each worker; nil ends it
	low    int           // the least length of idle since the last sweep
	sweeps bool
	ended  bool
}

// workerIdle is how long a worker stays idle at least; at most it is twice as long.
const workerIdle = 50 * time.Millisecond

// run has a worker call f.
func (w *workers) run(f func()) {
	w.mu.Lock()
	n := len(w.idle) - 1
	if n < 0 {
		w.mu.Unlock()
		w.wg.Go(func() { w.work(f) })
		return
	}
	next := w.idle[n]
	w.idle = w.idle[:n]
	w.low = min(w.low, n)
	w.mu.Unlock()
	next <- f
}

func (w *workers) work(f func()) {
	next := make(chan func(), 1)
	for ; f != nil; f = <-next {
		f()
		if !w.rest(next) {
			return
		}
	}
}

// rest makes a worker idle. It reports false at the end.
func (w *workers) rest(next chan func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return false
	}
	w.idle = append(w.idle, next)
	if !w.sweeps {
		w.sweeps = true
		time.AfterFunc(workerIdle, w.sweep)
	}
	return true
}

// sweep ends the workers that were idle since the last sweep.
func (w *workers) sweep() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop(w.low)
	w.low = len(w.idle)
	if w.sweeps = w.low > 0; w.sweeps {
		time.AfterFunc(workerIdle, w.sweep)
	}
}

// drop ends the n workers that have been idle for longest. The caller holds mu.
func (w *workers) drop(n int) {
	for _, next := range w.idle[:n] {
		next <- nil
	}
	rest := copy(w.idle, w.idle[n:])
	clear(w.idle[rest:])
	w.idle = w.idle[:rest]
}

// end ends idle workers, and the others once they become idle.
func (w *workers) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended, w.low = true, 0
	w.drop(len(w.idle))
}
