package web

import (
	"context"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
)

// exchange is a request and what becomes of it.
type exchange struct {
	conn   *clientConn
	config *proxied.Config // of the listener
	to     *proxied.Config // has the Pods: see proxied.Route
	edit   func(*http1.Response)
	client context.Context // ends when the client goes, or resets its stream.Conn
	cancel context.CancelFunc
	// upgrades is true if the client asks for another protocol.
	upgrades bool

	member  *pods.Member
	link    *pods.Link
	drained atomic.Bool
	counted *proxied.Config // by Host.AdmitRequest, nil if it was not

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
		x.conn.engine.host.ForgetRequest(x.counted)
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
	limit := x.to.Spec.IdleTimeout.Std() + x.conn.engine.idleGrace
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
	e := accesslog.Entry{
		Client: x.conn.client, Pod: x.pod, Before: -1, During: -1, After: -1, Status: status, PodStatus: x.podStatus,
		Received: x.received.Load(), Sent: sent, Agent: r.agent, Kind: r.kind(x.conn.secure, status), Began: x.began,
	}
	scheme := "http"
	if x.conn.secure {
		scheme = "https"
		e.TLS(x.conn.tls)
		e.Domain = x.conn.tls.ServerName
	}
	if r.method != "" { // else it is none
		e.Request = r.text(scheme, x.conn.at.Port())
	}
	if !x.asked.IsZero() {
		e.Before = x.asked.Sub(x.began)
		if !x.answered.IsZero() {
			e.During, e.After = x.answered.Sub(x.asked), time.Since(x.answered)
		}
	}
	x.config.Record(e)
}

type exchangeKey struct{}

// use makes a member have the request.
func (x *exchange) use(m *pods.Member) bool {
	if x.member = m; x.link == nil {
		x.link = &pods.Link{Close: func() { x.drained.Store(true); x.cancel() }}
	}
	return x.to.Pool.Add(m, x.link)
}

func (x *exchange) leave() {
	if x.member != nil {
		x.to.Pool.Remove(x.member, x.link)
		x.member = nil
	}
}

func exchangeOf(r *http.Request) *exchange { return r.Context().Value(exchangeKey{}).(*exchange) }
