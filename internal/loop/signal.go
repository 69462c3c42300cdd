package loop

// Signal wakes one goroutine. Signals that come before it looks are one: it holds no queue. The zero
// Signal is not usable; NewSignal makes one.
type Signal chan struct{}

// NewSignal returns a Signal that is not set.
func NewSignal() Signal { return make(Signal, 1) }

// Set wakes the goroutine that receives from s, now or when it next receives. It never blocks.
func (s Signal) Set() {
	select {
	case s <- struct{}{}:
	default:
	}
}
