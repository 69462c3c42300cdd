package alloc

import "sync"

// pool is a range of offsets in two bands. All methods may be called from any
// goroutine.
type pool struct {
	mu      sync.Mutex
	static  *set
	dynamic *set
}

func newPool(size, static uint64) *pool {
	static = min(static, size)
	return &pool{static: newSet(static), dynamic: newSet(size - static)}
}

// band returns the set that off lies in and its offset there.
func (p *pool) band(off uint64) (*set, uint64) {
	if off < p.static.size {
		return p.static, off
	}
	return p.dynamic, off - p.static.size
}

func (p *pool) size() uint64 { return p.static.size + p.dynamic.size }

func (p *pool) allocate(off uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, off := p.band(off)
	return s.add(off)
}

func (p *pool) release(off uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, off := p.band(off)
	s.remove(off)
}

// next takes a free offset, from the dynamic band while that has one.
func (p *pool) next() (uint64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	off, ok := p.choose()
	if ok {
		s, o := p.band(off)
		s.add(o)
	}
	return off, ok
}

// peek returns what next could take.
func (p *pool) peek() (uint64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.choose()
}

func (p *pool) choose() (uint64, bool) {
	if off, ok := p.dynamic.pick(); ok {
		return off + p.static.size, true
	}
	return p.static.pick()
}

// bandSize is the size of the static band of a range: a fixed part of it within
// limits, and none where the range is too small to be split.
func bandSize(size, least, most, part uint64) uint64 {
	return min(max(least, size/part), most)
}
