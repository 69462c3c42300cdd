package controller

import (
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// A Service that has been written waits for a gap before it is written again:
// slowness times as long as the write took, so that an API server that is busy
// gets fewer writes, and within these bounds. While changes come faster than
// that, the gap doubles.
const (
	minGap   = 40 * time.Millisecond
	maxGap   = 320 * time.Millisecond
	slowness = 16
)

// pace gathers the changes of a Service that changes without pause, such as one
// whose 5,000 Pods restart, into fewer writes: each is work for every watcher,
// on every node. The first change after a pause is written at once.
type pace struct {
	mu sync.Mutex
	at map[svc.Name]beat
}

type beat struct {
	next time.Time // no write before
	gap  time.Duration
	held bool // a change has had to wait since the last write
}

// wait returns how long the next write of a Service has to wait; 0 is not at
// all.
func (p *pace) wait(name svc.Name) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, ok := p.at[name]
	if !ok {
		return 0
	}
	left := time.Until(b.next)
	if left <= 0 {
		return 0
	}
	b.held = true
	p.at[name] = b
	return left
}

// wrote notes a write of a Service that began at a moment and has just ended.
func (p *pace) wrote(name svc.Name, began time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, gap := p.at[name], max(minGap, slowness*time.Since(began))
	if b.held {
		gap = max(gap, 2*b.gap)
	}
	gap = min(gap, maxGap)
	if p.at == nil {
		p.at = map[svc.Name]beat{}
	}
	p.at[name] = beat{next: time.Now().Add(gap), gap: gap}
}

func (p *pace) forget(name svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.at, name)
}
