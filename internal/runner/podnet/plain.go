package podnet

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// routed is what Network has written of routes to other nodes' Pods. It is safe for concurrent use.
type routed struct {
	first chan struct{} // closed when they are first written, and this node's Node has no key of WireGuard

	mu      sync.Mutex
	written bool
	without []string // the names of nodes that have no key of WireGuard
}

func newRouted() *routed { return &routed{first: make(chan struct{})} }

// set takes in a plan that was written, and reports whether the nodes without a key have changed.
func (r *routed) set(p *plan) (changed bool) {
	var names []string
	for _, o := range p.others {
		if o.key == (link.Key{}) && p.problems[o.name] == "" && len(o.cidrs) > 0 {
			names = append(names, o.name)
		}
	}
	slices.Sort(names)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.written && p.own.key == (link.Key{}) {
		r.written = true
		close(r.first)
	}
	changed = !slices.Equal(r.without, names)
	r.without = names
	return changed
}

// withoutKey returns the names of the nodes whose Pods are reached although they have no key of WireGuard.
func (r *routed) withoutKey() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.without
}

// decryptFor is how long the device of WireGuard stays after an agent without encryption has written its routes.
const decryptFor = 3 * time.Second

// removeEncryption removes the device of an agent that encrypted, after the other nodes had time to read in the API that this one has no
// key any more, as this one has read: until then they send to the device.
func removeEncryption(ctx context.Context, r *routed, log *slog.Logger) {
	select {
	case <-r.first:
	case <-ctx.Done():
		return
	}
	select {
	case <-time.After(decryptFor):
	case <-ctx.Done():
		return
	}
	if err := link.RemoveWireGuard(); err != nil {
		log.Warn("cannot remove the device of WireGuard", "err", err)
	}
}
