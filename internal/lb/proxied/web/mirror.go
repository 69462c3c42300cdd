package web

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
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
	// mirrorTime is how long a copy may take, from when it is whole to the end of its answer.
	mirrorTime = 10 * time.Second
	// maxMirrorAnswer is how much of an answer is read, in bytes, so that its connection can be used again.
	maxMirrorAnswer = 1 << 20
)

// mirrorCount counts the copies for a backend.
type mirrorCount struct {
	now    atomic.Int32
	failed atomic.Bool // the last one has, which was logged
}

// mirrored is a request that is copied. Its methods do nothing for nil, and one goroutine calls them at a time.
type mirrored struct {
	x    *exchange
	req  *http1.Request    // the bytes of x.req end with its head
	to   []*proxied.Config // each counted; nil once the copies are sent, or given up
	body []byte
}

// copyOf begins to copy a request as its own Pod gets it.
func copyOf(x *exchange, to []*proxied.Config) *mirrored {
	c := &mirrored{x: x, req: x.req.Clone()}
	for _, t := range to {
		n := &transportOf(t).mirrors.now
		if x.upgrades || x.req.Length > maxMirrorBody || n.Add(1) > maxMirrors {
			if !x.upgrades && x.req.Length <= maxMirrorBody {
				n.Add(-1)
			}
			t.Traffic().Mirrored(traffic.MirrorDropped)
			continue
		}
		c.to = append(c.to, t)
	}
	return c
}

// wants reports whether it gets what is carried of the body.
func (c *mirrored) wants() bool { return c != nil && len(c.to) > 0 }

// add copies a part of the body.
func (c *mirrored) add(data []byte) {
	if !c.wants() {
		return
	}
	if len(c.body)+len(data) > maxMirrorBody {
		c.drop()
		return
	}
	c.body = append(c.body, data...)
}

// drop gives up copies that were not sent.
func (c *mirrored) drop() {
	if c == nil {
		return
	}
	for _, t := range c.to {
		transportOf(t).mirrors.now.Add(-1)
		t.Traffic().Mirrored(traffic.MirrorDropped)
	}
	c.to, c.body = nil, nil
}

// send sends the copies, each on a goroutine of its own, which nothing waits for.
func (c *mirrored) send() {
	if !c.wants() {
		return
	}
	x := c.x
	c.req.Length = int64(len(c.body))
	from := clientConn{client: x.conn.client, at: x.conn.at, secure: x.conn.secure, began: time.Now(), engine: x.engine}
	for _, t := range c.to {
		m := &mirror{}
		m.engine, m.conn, m.client, m.second, m.req, m.isHead = x.engine, &from, m, x.second, c.req, x.isHead
		m.link = &pods.Link{Close: m.drain}
		body := c.body
		m.engine.host.Run(func() { m.run(t, body) })
	}
	c.to, c.body = nil, nil
}

// mirror is a copy of a request, and its client, which wants no answer.
type mirror struct {
	exchange
	taken int // of the answer
}

// run has a Pod get the copy.
func (m *mirror) run(to *proxied.Config, body []byte) {
	count := &transportOf(to).mirrors
	defer count.now.Add(-1)
	result := traffic.MirrorFailed // also after a panic
	defer func() { to.Traffic().Mirrored(result) }()
	defer m.engine.host.Panics().Recover(to.Service)
	m.begin(to)
	defer m.leave()
	timer := time.AfterFunc(mirrorTime, m.drain)
	defer timer.Stop()
	stop := context.AfterFunc(m.engine.host.Context(), m.drain)
	defer stop()
	r := reaching{x: &m.exchange, t: transportOf(to)}
	err := r.deliver(body, false)
	if err == nil || m.podStatus != 0 && errors.Is(err, errEnough) {
		result = traffic.MirrorAnswered
		count.failed.Store(false)
		return
	}
	log := m.engine.host.Log().Debug
	if !count.failed.Swap(true) {
		log = m.engine.host.Log().Warn
	}
	log("cannot mirror a request; the request itself is not concerned", "service", to.Service, "endpoint", m.pod, "err", err)
}

// errEnough means that the rest of an answer is not read.
var errEnough = errors.New("an answer to a copy is long")

func (m *mirror) source() source                      { return nothing }
func (m *mirror) whole(int) ([]byte, bool)            { return nil, false }
func (m *mirror) takeWhole(int)                       {}
func (m *mirror) interim(*http1.Response) error       { return nil }
func (m *mirror) proceed() error                      { return nil }
func (m *mirror) begun() bool                         { return true }
func (m *mirror) reply(*proxied.Reply)                {}
func (m *mirror) left() bool                          { return false }
func (m *mirror) answer(source, string) sink          { return m }
func (m *mirror) tunnel(*upstream) error              { return fmt.Errorf("%w: it changes the protocol", errAnswer) }
func (m *mirror) flush() error                        { return nil }
func (m *mirror) pending() bool                       { return false }
func (m *mirror) finish(trailers []http1.Field) error { return nil }

func (m *mirror) add(data []byte, _ bool) error {
	if m.taken += len(data); m.taken > maxMirrorAnswer {
		return errEnough
	}
	return nil
}
