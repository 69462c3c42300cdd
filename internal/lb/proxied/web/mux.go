package web

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/muxes"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// muxOptions are the options of a Pod's connection.
func (t *transport) muxOptions(e *engine) http2.Options {
	limit := t.kind.silence + e.idleGrace
	return http2.Options{Go: e.host.Run, MaxHead: maxAnswerHeader, MaxStreams: http2.PodStreams, HeadTimeout: limit, IdleTimeout: podIdle,
		WriteTimeout: limit}
}

// multiplexes reports whether a request goes on by HTTP/2: to Pods that speak only that, and one that has come so to Pods
// with TLS which choose it.
func (t *transport) multiplexes(x *exchange) bool {
	return !t.isHTTP1() || x.second && !x.websocket && t.kind.backend.IsTLS() && t.kind.proxy == 0
}

// stream returns a stream to a Pod. Both are nil if the Pod has chosen HTTP/1.1. Who waits for the attempt of another request
// shares its failure: otherwise each would make one, one after the other.
func (t *transport) stream(d dialling, addr netip.AddrPort) (pod, error) {
	if t.kind.proxy != 0 { // the connection is of one client
		return t.connectMux(d, addr, nil)
	}
	for {
		s, first := t.muxes.Open(addr, d.isHead)
		if s != nil {
			return newMuxStream(s), nil
		}
		if first {
			return nil, nil
		}
		a, m, own := t.muxes.Begin(addr)
		if own {
			return t.try(d, addr, m, a)
		}
		if err := a.Wait(); err != nil {
			return nil, err
		}
	}
}

// try makes an attempt.
func (t *transport) try(d dialling, addr netip.AddrPort, m *muxes.Pod, a *muxes.Attempt) (b pod, err error) {
	defer t.muxes.Finish(addr, m)
	b, err = t.connectMux(d, addr, m)
	a.Result(err)
	return b, err
}

// connectMux opens a connection to a Pod, and a stream on it. If the Pod has chosen HTTP/1.1 it returns the connection. Without m
// nothing else uses the connection, which ends with the stream.
func (t *transport) connectMux(d dialling, addr netip.AddrPort, m *muxes.Pod) (pod, error) {
	u, second, err := t.dialPod(d.engine.host.Context(), addr, d.client, d.at, true)
	if err != nil {
		return nil, err
	}
	p := &t.muxes
	if !second {
		if m != nil {
			p.First(m)
		}
		return u, nil
	}
	c := http2.NewClient(u.conn, t.muxOptions(d.engine))
	s := c.Open(d.isHead)
	shared := m != nil && p.Add(m, c)
	d.engine.host.Go(func() {
		if shared {
			defer p.Remove(addr, m, c)
		}
		defer d.engine.host.Panics().Recover(t.service, u.conn)
		stop := context.AfterFunc(d.engine.host.Context(), func() { stream.CloseNow(u.conn) })
		defer stop()
		_ = c.Run()
	})
	if !shared {
		c.Leave()
	}
	return newMuxStream(s), nil
}

// muxStream is a stream to a Pod.
type muxStream struct {
	streamSink
	from  streamSource
	w     heads.Writer
	begun bool // an answer has
}

var muxStreams = sync.Pool{New: func() any { return &muxStream{w: heads.Writer{Second: true}} }}

func newMuxStream(s *http2.Stream) *muxStream {
	m := muxStreams.Get().(*muxStream)
	m.streamSink, m.from, m.begun = streamSink{Stream: s, w: &m.w}, streamSource{}, false
	return m
}

func (m *muxStream) head(x *exchange, whole []byte, end bool) {
	m.timeout = x.limit()
	m.w.Request(x.req, heads.Heading{
		Client: x.conn.client, At: x.conn.at, Secure: x.conn.secure, BackTLS: transportOf(x.to).kind.backend.IsTLS(),
	})
	m.ended, m.waits = end && len(whole) == 0, true
	_ = m.Head(&m.w.Encoder, m.ended) // flush finds the error, too
	m.w.Block = m.w.Block[:0]
	if len(whole) > 0 {
		_ = m.add(whole, true)
	}
}

func (m *muxStream) answer(r *http1.Response, poll time.Duration) error {
	err := m.Answer(r, poll)
	m.begun = m.begun || err == nil
	return err
}

func (m *muxStream) source(x *exchange) source {
	r := &x.res
	if x.isHead || http1.Bodyless(r.Status) {
		return nothing // what still comes is no body, and is reset
	}
	if r.Announced {
		r.Length = -1 // to a client of HTTP/1.1 trailers go behind chunks
	}
	m.from = streamSource{Stream: m.Stream, length: r.Length}
	if m.Ended() && r.Length < 0 && len(m.Trailers()) == 0 {
		r.Length = 0
	}
	return &m.from
}

// stale reports whether the connection has ended before an answer has begun.
func (m *muxStream) stale() bool {
	reset := m.reset()
	return reset != nil && reset.Lost
}

// reset returns how the stream has ended before its answer has begun, nil if it has not.
func (m *muxStream) reset() *http2.ResetError {
	if m.begun {
		return nil
	}
	reset, _ := errors.AsType[*http2.ResetError](m.Err())
	return reset
}

// unseen reports whether the Pod has told that it has not looked at the request.
func (m *muxStream) unseen(err error) bool {
	if err == nil {
		return false
	}
	reset := m.reset()
	return reset != nil && reset.Refused
}

func (m *muxStream) abort() { m.Abort(http2.Cancel) }

func (m *muxStream) release(*exchange, bool) {
	m.Close(http2.Cancel)
	m.Stream, m.from = nil, streamSource{}
	muxStreams.Put(m)
}
