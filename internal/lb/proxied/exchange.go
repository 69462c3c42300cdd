package proxied

import (
	"context"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// exchange is a request and what becomes of it.
type exchange struct {
	conn   *webConn
	config *config
	client context.Context // ends when the client goes, or resets its stream
	cancel context.CancelFunc
	// upgrades is true if the client asks for another protocol.
	upgrades bool

	member  *member
	link    *link
	drained atomic.Bool
	counted *config // by Server.admitRequest, nil if it was not

	// What follows is for the access log.

	began, asked, answered time.Time // the latter are zero if that has not been
	pod                    netip.AddrPort
	podStatus              int
	received               atomic.Int64

	last atomic.Int64 // when something was carried last, since began
}

// end gives back what the request has.
func (x *exchange) end() {
	x.leave()
	if x.counted != nil {
		x.conn.server.forgetRequest(x.counted)
	}
}

// progressed takes into account that an answer, or a part of a body, was carried.
func (x *exchange) progressed(n int) {
	if n > 0 && x.client.Err() == nil {
		x.conn.carries.Add(1)
		x.touch()
	}
}

// touch makes the request, and the connection of HTTP/2 that it is of, count as not idle.
func (x *exchange) touch() {
	now := time.Now()
	x.last.Store(int64(now.Sub(x.began)))
	if x.conn.multiplexed.Load() {
		x.conn.last.Store(int64(now.Sub(x.conn.began)))
	}
}

// endIdle resets the stream of a request of HTTP/2 when it has carried nothing for as long as a connection may be
// idle, as if the client does not open its window. What it returns ends that.
func (x *exchange) endIdle(out http.ResponseWriter) (stop func()) {
	limit := x.config.spec.IdleTimeout.Std() + x.conn.server.idleGrace
	var mu sync.Mutex // out is not used after the end
	var timer *time.Timer
	ended := false
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(limit, func() {
		mu.Lock()
		defer mu.Unlock()
		if ended {
			return
		}
		if left := limit - (time.Since(x.began) - time.Duration(x.last.Load())); left > 0 {
			timer.Reset(left)
			return
		}
		c, now := http.NewResponseController(out), time.Now()
		_, _ = c.SetReadDeadline(now), c.SetWriteDeadline(now)
		x.cancel()
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		ended = true
		timer.Stop()
	}
}

// record writes the line of a request.
func (x *exchange) record(r requestLine, status int, sent int64) {
	e := entry{
		client: x.conn.client, pod: x.pod, before: -1, during: -1, after: -1, status: status, podStatus: x.podStatus,
		received: x.received.Load(), sent: sent, agent: r.agent, kind: r.kind(x.conn.secure, status), began: x.began,
	}
	scheme := "http"
	if x.conn.secure {
		scheme = "https"
		e.tls(x.conn.tls)
		e.domain = x.conn.tls.ServerName
	}
	if r.method != "" { // else it is none
		e.request = r.text(scheme, x.conn.at.Port())
	}
	if !x.asked.IsZero() {
		e.before = x.asked.Sub(x.began)
		if !x.answered.IsZero() {
			e.during, e.after = x.answered.Sub(x.asked), time.Since(x.answered)
		}
	}
	x.config.record(e)
}

type exchangeKey struct{}

// use makes a member have the request.
func (x *exchange) use(m *member) bool {
	if x.member = m; x.link == nil {
		x.link = &link{func() { x.drained.Store(true); x.cancel() }}
	}
	return x.config.pool.add(m, x.link)
}

func (x *exchange) leave() {
	if x.member != nil {
		x.config.pool.remove(x.member, x.link)
		x.member = nil
	}
}

func exchangeOf(r *http.Request) *exchange { return r.Context().Value(exchangeKey{}).(*exchange) }
