package hubble

import (
	"context"
	"sync"
)

// Ring has the last flows of a node. Writers never wait for readers: a reader that is too slow misses the oldest.
type Ring struct {
	mu    sync.Mutex
	flows []Flow
	next  uint64        // the number of the flow that comes next
	wake  chan struct{} // closed when it has come; nil without readers that wait

	metrics *Metrics // nil if none count
}

// NewRing returns a Ring for size flows.
func NewRing(size int) *Ring { return &Ring{flows: make([]Flow, size)} }

// Count has m count what is added. It is called before Add.
func (r *Ring) Count(m *Metrics) { r.metrics = m }

// Add adds a flow and gives it its number.
func (r *Ring) Add(f Flow) {
	if r.metrics != nil {
		r.metrics.count(&f)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	f.number = r.next
	r.flows[r.next%uint64(len(r.flows))] = f
	r.next++
	if r.wake != nil {
		close(r.wake)
		r.wake = nil
	}
}

// Bounds returns the numbers of the oldest flow and of the one that comes next.
func (r *Ring) Bounds() (oldest, next uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.oldest(), r.next
}

func (r *Ring) oldest() uint64 { return r.next - min(r.next, uint64(len(r.flows))) }

// Size is how many flows the Ring has room for.
func (r *Ring) Size() int { return len(r.flows) }

// Read copies flows from a number on into to. lost is how many from there on are not in the Ring any more; next is the number
// to go on with.
func (r *Ring) Read(from uint64, to []Flow) (n int, next, lost uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if oldest := r.oldest(); from < oldest {
		lost, from = oldest-from, oldest
	}
	for n < len(to) && from < r.next {
		to[n] = r.flows[from%uint64(len(r.flows))]
		n++
		from++
	}
	return n, from, lost
}

// Wait returns when there is a flow with the number, or an error when ctx ends.
func (r *Ring) Wait(ctx context.Context, number uint64) error {
	for {
		r.mu.Lock()
		if r.next > number {
			r.mu.Unlock()
			return nil
		}
		if r.wake == nil {
			r.wake = make(chan struct{})
		}
		wake := r.wake
		r.mu.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wake:
		}
	}
}
