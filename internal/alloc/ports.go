package alloc

import "github.com/fairlead/fairlead/internal/svc"

// Ports is one range of port numbers. All methods may be called from any
// goroutine.
type Ports struct {
	ports svc.PortRange
	pool  *pool
}

// NewPorts makes a range in which nothing is taken.
func NewPorts(ports svc.PortRange) *Ports {
	size := uint64(ports.Size())
	band := uint64(0)
	if size >= 16 { // a smaller range is not split
		band = bandSize(size, 16, 128, 32)
	}
	return &Ports{ports: ports, pool: newPool(size, band)}
}

// Allocate takes p. It returns ErrPortAllocated or a *NotInRangeError.
func (r *Ports) Allocate(p uint16) error {
	if !r.ports.Contains(p) {
		return &NotInRangeError{Range: r.ports.String()}
	}
	if !r.pool.allocate(uint64(p - r.ports.First)) {
		return ErrPortAllocated
	}
	return nil
}

// AllocateNext takes a random free port. It returns a *FullError when there is
// none.
func (r *Ports) AllocateNext() (uint16, error) { return r.next(r.pool.next) }

// Peek returns what AllocateNext could take, and takes nothing.
func (r *Ports) Peek() (uint16, error) { return r.next(r.pool.peek) }

func (r *Ports) next(choose func() (uint64, bool)) (uint16, error) {
	off, ok := choose()
	if !ok {
		return 0, &FullError{Range: r.ports.String()}
	}
	return r.ports.First + uint16(off), nil
}

// Release frees p. Freeing a port that is not taken, or not of this range, does
// nothing.
func (r *Ports) Release(p uint16) {
	if r.ports.Contains(p) {
		r.pool.release(uint64(p - r.ports.First))
	}
}
