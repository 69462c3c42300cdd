package endpoints

import (
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// After a write of a Service the next one waits for a gap: gapFactor times the
// time that the write took, so that a busy API server gets fewer writes, within
// these bounds. While changes come faster than that, the gap doubles.
const (
	minGap    = 40 * time.Millisecond
	maxGap    = 320 * time.Millisecond
	gapFactor = 16
	// removalGapFactor and minRemovalGap are for removals.
	minRemovalGap    = 10 * time.Millisecond
	removalGapFactor = 2
)

// pace gathers the changes of a Service that changes without pause, such as one
// whose 5,000 Pods restart, into fewer writes: each is work for every watcher,
// on every node. The first change after a pause is written at once.
//
// Removals, endpoints that nodes send new connections to until they know better, wait
// for earlier removals alone: in a rolling update each comes right after the write that
// brought its replacement. So a Service is written at most as often again.
type pace struct {
	mu    sync.Mutex
	paces map[svc.Name]*servicePace
}

type servicePace struct {
	all, removals gate
	// removal is set while a removal is to be written.
	removal bool
}

type gate struct {
	next    time.Time // no write before
	gap     time.Duration
	delayed bool // a change has had to wait since the last write
}

func (g *gate) left() time.Duration { return max(0, time.Until(g.next)) }

// wrote sets the gap after a write that has just ended.
func (g *gate) wrote(gap time.Duration) {
	if g.delayed {
		gap = max(gap, 2*g.gap)
	}
	gap = min(gap, maxGap)
	*g = gate{next: time.Now().Add(gap), gap: gap}
}

// removal records that the next write of a Service has a removal.
func (p *pace) removal(name svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of(name).removal = true
}

func (p *pace) of(name svc.Name) *servicePace {
	if p.paces == nil {
		p.paces = map[svc.Name]*servicePace{}
	}
	if p.paces[name] == nil {
		p.paces[name] = &servicePace{}
	}
	return p.paces[name]
}

// wait returns how long the next write of a Service has to wait; 0 is not at all. Then
// removal, which the caller gives to wrote, is whether it has a removal.
func (p *pace) wait(name svc.Name) (left time.Duration, removal bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.paces[name]
	if !ok {
		return 0, false
	}
	left = s.all.left()
	if s.removal {
		left = min(left, s.removals.left())
	}
	if left > 0 {
		s.all.delayed, s.removals.delayed = true, s.removals.delayed || s.removal
		return left, false
	}
	removal, s.removal = s.removal, false
	return 0, removal
}

// wrote sets the gap after a write of a Service that began at began and has just
// ended.
func (p *pace) wrote(name svc.Name, began time.Time, removal bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, took := p.of(name), time.Since(began)
	s.all.wrote(max(minGap, gapFactor*took))
	if removal {
		s.removals.wrote(max(minRemovalGap, removalGapFactor*took))
	}
}

func (p *pace) forget(name svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.paces, name)
}
