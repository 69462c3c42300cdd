package proxy

import (
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Bounds of what a proxy remembers of its past: how long, and how many endpoints all remembered ports have together.
// The oldest changes go first. An endpoint takes 40 bytes.
const (
	historyTime      = time.Hour
	historyEndpoints = 200_000
	historyChanges   = 10_000
)

// Past is how a service port was programmed at some time.
type Past struct {
	Time time.Time `json:"time"`
	// Before and After are the port before and from then on, in the words of table.ServicePort.String; empty if it
	// was not there.
	Before string `json:"before,omitempty"`
	After  string `json:"after,omitempty"`
}

// past is a change of one port.
type past struct {
	at            time.Time
	before, after *table.ServicePort
	size          int
}

// history remembers the changes of ports. It is safe for concurrent use.
type history struct {
	mu    sync.Mutex
	list  []past
	total int // endpoints in list
	// from is when what is remembered begins: the first Table, or the last change that was forgotten.
	from time.Time
}

// note remembers the changes of keys. The first Table of a process is no change.
func (h *history) note(now time.Time, before, after *table.Table, keys []table.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if before == nil {
		h.from = now
		return
	}
	for _, k := range keys {
		p := past{at: now, before: before.Get(k), after: after.Get(k)}
		if p.before == p.after {
			continue
		}
		p.size = sizeOf(p.before) + sizeOf(p.after)
		h.list = append(h.list, p)
		h.total += p.size
	}
	h.forget(now)
}

// forget drops what is over the bounds.
func (h *history) forget(now time.Time) {
	n := 0
	for n < len(h.list) && (now.Sub(h.list[n].at) > historyTime || h.total > historyEndpoints || len(h.list)-n > historyChanges) {
		h.total -= h.list[n].size
		h.from = h.list[n].at
		n++
	}
	h.list = slices.Delete(h.list, 0, n)
}

func sizeOf(p *table.ServicePort) int {
	if p == nil {
		return 0
	}
	n := len(p.Serving)
	for i := range p.Frontends {
		n += len(p.Frontends[i].Endpoints) + len(p.Frontends[i].LocalClients)
	}
	return n
}

// of returns the changes of a Service since a time, the oldest first. It puts them in words without the lock, for which the
// Proxy's loop waits: a change has up to historyEndpoints.
func (h *history) of(n svc.Name, since time.Time) []Past {
	out := []Past{}
	for _, p := range h.matching(n, since) {
		text := Past{Time: p.at}
		if p.before != nil {
			text.Before = p.before.String()
		}
		if p.after != nil {
			text.After = p.after.String()
		}
		out = append(out, text)
	}
	return out
}

// matching returns what of has. Its ports are immutable.
func (h *history) matching(n svc.Name, since time.Time) (out []past) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.list {
		p := &h.list[i]
		port := p.after
		if port == nil {
			port = p.before
		}
		if port.ID.Name == n && !p.at.Before(since) {
			out = append(out, *p)
		}
	}
	return out
}

// Then is what a node had at an earlier time. Its JSON form goes from an agent to the command: fields are only ever added.
type Then struct {
	// From is when what the node remembers begins.
	From time.Time `json:"from"`
	// Changed are the ports that have changed since; the others are as they are now.
	Changed []ThenPort `json:"changed"`
}

// ThenPort is a service port at an earlier time.
type ThenPort struct {
	Key table.Key `json:"key"`
	// Port is nil if it was not there.
	Port *table.ServicePort `json:"port,omitempty"`
}

// ThenOf returns the ports of a Service that a Proxy has changed since a time, as they were then. It is safe for concurrent use.
func ThenOf(p *Proxy, n svc.Name, at time.Time) Then { return p.history.then(n, at) }

func (h *history) then(n svc.Name, at time.Time) Then {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := Then{From: h.from, Changed: []ThenPort{}}
	seen := map[table.Key]bool{}
	for i := range h.list {
		c := &h.list[i]
		port := c.after
		if port == nil {
			port = c.before
		}
		if k := port.Key(); port.ID.Name == n && c.at.After(at) && !seen[k] {
			seen[k] = true
			out.Changed = append(out.Changed, ThenPort{k, c.before})
		}
	}
	return out
}

// History returns the changes of a Service that were programmed since a time, as far as they are remembered. It is safe for
// concurrent use.
func (p *Proxy) History(n svc.Name, since time.Time) []Past { return p.history.of(n, since) }
