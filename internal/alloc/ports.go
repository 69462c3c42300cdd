package alloc

import "github.com/fairlead/fairlead/internal/svc"

// Ports is one range of port numbers. All methods may be called from any
// goroutine.
type Ports struct {
	ports svc.PortRange
	pool  *pool
	dry   bool
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

// Range returns the range.
func (r *Ports) Range() svc.PortRange { return r.ports }

// Used is the number of ports that are taken.
func (r *Ports) Used() int { return int(r.pool.used()) }

// DryRun returns a view of the range that answers as the range does and takes
// and frees nothing.
func (r *Ports) DryRun() *Ports {
	view := *r
	view.dry = true
	return &view
}

// Allocate takes p. It returns ErrPortAllocated or a *NotInRangeError.
func (r *Ports) Allocate(p uint16) error {
	if !r.ports.Contains(p) {
		return &NotInRangeError{Range: r.ports.String()}
	}
	off := uint64(p - r.ports.First)
	if r.dry {
		if r.pool.has(off) {
			return ErrPortAllocated
		}
		return nil
	}
	if !r.pool.allocate(off) {
		return ErrPortAllocated
	}
	return nil
}

// AllocateNext takes a random free port. It returns a *FullError when there is
// none.
func (r *Ports) AllocateNext() (uint16, error) {
	off, ok := r.pool.next(r.dry)
	if !ok {
		return 0, &FullError{Range: r.ports.String()}
	}
	return r.ports.First + uint16(off), nil
}

// Release frees p. Freeing a port that is not taken, or not of this range, does
// nothing.
func (r *Ports) Release(p uint16) {
	if r.ports.Contains(p) && !r.dry {
		r.pool.release(uint64(p - r.ports.First))
	}
}

// Has says whether p is taken.
func (r *Ports) Has(p uint16) bool {
	return r.ports.Contains(p) && r.pool.has(uint64(p-r.ports.First))
}
