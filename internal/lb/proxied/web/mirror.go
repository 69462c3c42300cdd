package web

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
)

// Bounds of the copies of requests. What is beyond them is not copied; the request itself goes on in any case.
const (
	// maxMirrorBody is how long the body of a copied request may be, in bytes. It is kept until all of it has come.
	maxMirrorBody = 64 << 10
	// maxMirrors is how many copies for a backend there may be at a time, of a process.
	maxMirrors = 64
	// mirrorTime is how long the body of a copied request may take to come, and then its copy, to the end of its answer.
	mirrorTime = 10 * time.Second
	// mirrorMemory bounds the heads and bodies that are kept for copies of all requests together, in bytes.
	mirrorMemory = 16 << 20
	// maxMirrorAnswer is how much of an answer is read, in bytes, so that its connection can be used again.
	maxMirrorAnswer = 1 << 20
	// fieldCost is what a field of a head takes beside its text, in bytes.
	fieldCost = 64
)

// mirrorUse is what the copies of all requests take together.
type mirrorUse struct {
	copies atomic.Int64 // sent, and not over
	memory atomic.Int64 // see mirrorMemory
	budget.Warning
}

// admit counts a copy for a backend, unless there are too many. A copy needs a connection to a Pod, which is an open file.
func (u *mirrorUse) admit(t *transport, most int) bool {
	if !budget.AddUpTo(&u.copies, 1, int64(most)) {
		return false
	}
	if !budget.AddUpTo(&t.mirrors, 1, maxMirrors) {
		u.copies.Add(-1)
		return false
	}
	return true
}

// forget takes out what admit has counted.
func (u *mirrorUse) forget(t *transport) {
	t.mirrors.Add(-1)
	u.copies.Add(-1)
}

// maxCopies is how many copies there may be at a time.
func (e *engine) maxCopies() int { return max(1, e.host.MaxKept()/4) }

// mirrored is a request that is copied. Its methods do nothing for nil. One goroutine calls them at a time, except for drop.
type mirrored struct {
	x      *exchange
	engine *engine
	late   *time.Timer  // drops it
	left   atomic.Int32 // copies that are not over, and one while they are sent

	mu     sync.Mutex
	to     []*proxied.Config // nil once the copies are sent, or given up
	req    *http1.Request    // the bytes of x.req end with its head
	body   []byte
	memory int64 // of req and body, counted
}

// copyOf begins to copy a request as its own Pod gets it. It returns nil for one that is not copied.
func copyOf(x *exchange, to []*proxied.Config) *mirrored {
	c := &mirrored{x: x, engine: x.engine, to: to}
	if x.websocket || x.req.Length > maxMirrorBody || !c.keep(sizeOf(x.req)) {
		c.drop()
		return nil
	}
	c.req = x.req.Clone()
	c.late = time.AfterFunc(x.engine.mirrorTime, c.drop)
	return c
}

// sizeOf is what a copy of a head takes, in bytes.
func sizeOf(r *http1.Request) int {
	n := len(r.Method) + len(r.Target) + len(r.Host)
	for i := range r.Fields {
		n += len(r.Fields[i].Name) + len(r.Fields[i].Value) + fieldCost
	}
	return n
}

// keep counts memory. It reports false if there is none left.
func (c *mirrored) keep(n int) bool {
	if !budget.AddUpTo(&c.engine.mirrors.memory, int64(n), c.engine.mirrorMemory) {
		return false
	}
	c.memory += int64(n)
	return true
}

// free gives back what is kept.
func (c *mirrored) free() {
	c.req, c.body = nil, nil
	c.engine.mirrors.memory.Add(-c.memory)
	c.memory = 0
}

// wants reports whether it gets what is carried of the body.
func (c *mirrored) wants() bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.to) > 0
}

// add copies a part of the body.
func (c *mirrored) add(data []byte) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case len(c.to) == 0:
	case len(c.body)+len(data) > maxMirrorBody || !c.keep(len(data)):
		c.giveUp()
	default:
		c.body = append(c.body, data...)
	}
}

// drop gives up copies that were not sent.
func (c *mirrored) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.giveUp()
}

// giveUp is drop for a caller that holds mu.
func (c *mirrored) giveUp() {
	if len(c.to) == 0 {
		return
	}
	for _, t := range c.to {
		t.Traffic().Mirrored(traffic.MirrorDropped)
	}
	c.to = nil
	c.free()
}

// end is the last call, once the request is over: what was not sent is given up.
func (c *mirrored) end() {
	if c != nil {
		c.late.Stop()
		c.drop()
	}
}

// send sends the copies, each on a goroutine of its own, which nothing waits for.
func (c *mirrored) send() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.to) == 0 {
		return
	}
	to, x := c.to, c.x
	c.to = nil // from here on the copies have the rest
	c.left.Store(1)
	defer c.over()
	c.req.Length = int64(len(c.body))
	from := clientConn{client: x.conn.client, at: x.conn.at, secure: x.conn.secure, began: time.Now(), engine: x.engine}
	for _, t := range to {
		if !c.engine.mirrors.admit(transportOf(t), c.engine.maxCopies()) {
			t.Traffic().Mirrored(traffic.MirrorDropped)
			continue
		}
		m := &mirror{}
		m.engine, m.conn, m.client, m.second, m.req = c.engine, &from, m, x.second, c.req
		m.link = &pods.Link{Close: m.drain}
		c.left.Add(1)
		body := c.body
		c.engine.host.Run(func() {
			defer c.over()
			m.run(t, body)
		})
	}
}

// over ends a copy. The last one gives back what is kept.
func (c *mirrored) over() {
	if c.left.Add(-1) == 0 {
		c.free()
	}
}

// mirror is a copy of a request, and its client, which wants no answer.
type mirror struct {
	exchange
	internal
	taken int // of the answer
}

// run has a Pod get the copy.
func (m *mirror) run(to *proxied.Config, body []byte) {
	defer m.engine.mirrors.forget(transportOf(to))
	result := traffic.MirrorFailed // also after a panic
	defer func() { to.Traffic().Mirrored(result) }()
	defer m.engine.host.Panics().Recover(to.Service)
	m.begin(to)
	defer m.leave()
	timer := time.AfterFunc(m.engine.mirrorTime, m.drain)
	defer timer.Stop()
	stop := context.AfterFunc(m.engine.host.Context(), m.drain)
	defer stop()
	r := reaching{x: &m.exchange, t: transportOf(to)}
	err := r.deliver(body, false)
	if err == nil || m.podStatus != 0 && errors.Is(err, errEnough) {
		result = traffic.MirrorAnswered
		return
	}
	log := m.engine.host.Log().Debug
	if m.engine.mirrors.Due() {
		log = m.engine.host.Log().Warn
	}
	log("cannot mirror a request; the request itself is not concerned", "service", to.Service, "endpoint", m.pod, "err", err)
}

// errEnough means that the rest of an answer is not read.
var errEnough = errors.New("an answer to a copy is long")

// internal is a client, and the sink of an answer, of a request that the load balancer sends for itself, with its body.
type internal struct{}

func (internal) source() source                { return nothing }
func (internal) whole(int) ([]byte, bool)      { return nil, false }
func (internal) takeWhole(int)                 {}
func (internal) interim(*http1.Response) error { return nil }
func (internal) proceed() error                { return nil }
func (internal) begun() bool                   { return true }
func (internal) tunnel(*upstream) error        { return fmt.Errorf("%w: it changes the protocol", errAnswer) }
func (internal) flush() error                  { return nil }
func (internal) pending() bool                 { return false }
func (internal) finish([]http1.Field) error    { return nil }

func (m *mirror) reply(*proxied.Reply)       {}
func (m *mirror) left() bool                 { return false }
func (m *mirror) answer(source, string) sink { return m }

func (m *mirror) add(data []byte, _ bool) error {
	if m.taken += len(data); m.taken > maxMirrorAnswer {
		return errEnough
	}
	return nil
}
