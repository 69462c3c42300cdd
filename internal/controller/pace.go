package controller

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
)

// pace gathers the changes of a Service that changes without pause, such as one
// whose 5,000 Pods restart, into fewer writes: each is work for every watcher,
// on every node. The first change after a pause is written at once.
type pace struct {
	mu    sync.Mutex
	gates map[svc.Name]gate
}

type gate struct {
	next    time.Time // no write before
	gap     time.Duration
	delayed bool // a change has had to wait since the last write
}

// wait returns how long the next write of a Service has to wait; 0 is not at all.
func (p *pace) wait(name svc.Name) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	g, ok := p.gates[name]
	if !ok {
		return 0
	}
	left := time.Until(g.next)
	if left <= 0 {
		return 0
	}
	g.delayed = true
	p.gates[name] = g
	return left
}

// wrote sets the gap after a write of a Service that began at began and has just
// ended.
func (p *pace) wrote(name svc.Name, began time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g, gap := p.gates[name], max(minGap, gapFactor*time.Since(began))
	if g.delayed {
		gap = max(gap, 2*g.gap)
	}
	gap = min(gap, maxGap)
	if p.gates == nil {
		p.gates = map[svc.Name]gate{}
	}
	p.gates[name] = gate{next: time.Now().Add(gap), gap: gap}
}

func (p *pace) forget(name svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.gates, name)
}
