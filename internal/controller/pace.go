package controller

import (
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// A Service that has been written waits for minGap before it is written again.
// While changes come faster than that, the gap doubles up to maxGap.
const (
	minGap = 20 * time.Millisecond
	maxGap = 320 * time.Millisecond
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

// wrote notes a write of a Service just now.
func (p *pace) wrote(name svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, gap := p.at[name], minGap
	if b.held {
		gap = min(2*b.gap, maxGap)
	}
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
