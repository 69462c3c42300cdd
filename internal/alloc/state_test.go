package alloc

import (
	"errors"
	"net/netip"
)

// isFull reports whether err is or wraps a FullError.
func isFull(err error) bool {
	var full *FullError
	return errors.As(err, &full)
}

// isAllocated reports whether err is or wraps ErrAllocated or ErrPortAllocated.
func isAllocated(err error) bool {
	return errors.Is(err, ErrAllocated) || errors.Is(err, ErrPortAllocated)
}

// isNotInRange reports whether err is or wraps a NotInRangeError.
func isNotInRange(err error) bool {
	var out *NotInRangeError
	return errors.As(err, &out)
}

// Size is the number of addresses that can be given out. That of an IPv6 /64
// is 2^64-1.
func (r *Addrs) Size() uint64 { return r.pool.size() }

// Used is the number of addresses that are taken.
func (r *Addrs) Used() uint64 { return r.pool.used() }

// Has reports whether a is taken.
func (r *Addrs) Has(a netip.Addr) bool {
	off, ok := r.offset(a)
	return ok && r.pool.has(off)
}

// Used is the number of ports that are taken.
func (r *Ports) Used() int { return int(r.pool.used()) }

// Has reports whether p is taken.
func (r *Ports) Has(p uint16) bool {
	return r.ports.Contains(p) && r.pool.has(uint64(p-r.ports.First))
}

func (p *pool) used() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.static.used + p.dynamic.used
}

func (p *pool) has(off uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, off := p.band(off)
	return s.has(off)
}
