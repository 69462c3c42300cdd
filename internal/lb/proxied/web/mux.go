package web

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// muxes are the connections of HTTP/2 to the Pods of a transport.
type muxes struct {
	mu     sync.Mutex
	pods   map[netip.AddrPort]*mux
	closed bool
}

// mux is the connections to a Pod.
type mux struct {
	conns   []*http2.Conn
	dialing *attempt // nil if no connection is being made
	first   bool     // the Pod has chosen HTTP/1.1
}

// attempt is a connection that is being made for all requests that wait for it. err is why it has failed, once done is closed.
type attempt struct {
	done chan struct{}
	err  error
}

// begin returns the attempt to reach a Pod, and whether it is the caller's to make and to end.
func (p *muxes) begin(addr netip.AddrPort) (a *attempt, m *mux, own bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m = p.pods[addr]; m == nil {
		m = &mux{}
		if p.pods == nil {
			p.pods = map[netip.AddrPort]*mux{}
		}
		p.pods[addr] = m
	}
	if m.dialing != nil {
		return m.dialing, m, false
	}
	m.dialing = &attempt{done: make(chan struct{}), err: panics.Err} // if there is one
	return m.dialing, m, true
}

// finish ends an attempt.
func (p *muxes) finish(addr netip.AddrPort, m *mux) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(m.dialing.done)
	m.dialing = nil
	if !m.first {
		p.tidy(addr, m)
	}
}

// tidy forgets a Pod without connections, and what it has chosen. The caller holds mu.
func (p *muxes) tidy(addr netip.AddrPort, m *mux) {
	if m != nil && len(m.conns) == 0 && m.dialing == nil && p.pods[addr] == m {
		delete(p.pods, addr)
	}
}

// forget forgets that a Pod has chosen HTTP/1.1: it may be another one by now.
func (p *muxes) forget(addr netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.pods[addr]; m != nil {
		m.first = false
		p.tidy(addr, m)
	}
}

// add adds a connection to those to a Pod. It reports false at the end.
func (p *muxes) add(m *mux, c *http2.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		m.conns = append(m.conns, c)
	}
	return !p.closed
}

// remove removes a connection that has ended.
func (p *muxes) remove(addr netip.AddrPort, m *mux, c *http2.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(m.conns, c); i >= 0 {
		m.conns = slices.Delete(m.conns, i, i+1)
	}
	p.tidy(addr, m)
}

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

// open returns a stream to a Pod on a connection that is there, nil if none has room, and whether the Pod has chosen HTTP/1.1.
func (p *muxes) open(d dialling, addr netip.AddrPort) (_ pod, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.pods[addr]
	if m == nil {
		return nil, false
	}
	for _, c := range m.conns {
		if s := c.Open(d.isHead); s != nil {
			return newMuxStream(s), false
		}
	}
	return nil, m.first
}

// stream returns a stream to a Pod. Both are nil if the Pod has chosen HTTP/1.1. Who waits for the attempt of another request
// shares its failure: otherwise each would make one, one after the other.
func (t *transport) stream(d dialling, addr netip.AddrPort) (pod, error) {
	if t.kind.proxy != 0 { // the connection is of one client
		return t.connectMux(d, addr, nil)
	}
	for {
		b, first := t.muxes.open(d, addr)
		if b != nil || first {
			return b, nil
		}
		a, m, own := t.muxes.begin(addr)
		if own {
			return t.try(d, addr, m, a)
		}
		if <-a.done; a.err != nil {
			return nil, a.err
		}
	}
}

// try makes an attempt.
func (t *transport) try(d dialling, addr netip.AddrPort, m *mux, a *attempt) (b pod, err error) {
	defer t.muxes.finish(addr, m)
	b, err = t.connectMux(d, addr, m)
	a.err = err
	return b, err
}

// connectMux opens a connection to a Pod, and a stream on it. If the Pod has chosen HTTP/1.1 it returns the connection. Without m
// nothing else uses the connection, which ends with the stream.
func (t *transport) connectMux(d dialling, addr netip.AddrPort, m *mux) (pod, error) {
	u, second, err := t.dialPod(d.engine.host.Context(), addr, d.client, d.at, true)
	if err != nil {
		return nil, err
	}
	p := &t.muxes
	if !second {
		if m != nil {
			p.mu.Lock()
			m.first = true
			p.mu.Unlock()
		}
		return u, nil
	}
	c := http2.NewClient(u.conn, t.muxOptions(d.engine))
	s := c.Open(d.isHead)
	shared := m != nil && p.add(m, c)
	d.engine.host.Go(func() {
		if shared {
			defer p.remove(addr, m, c)
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

// close has the connections end with their last streams.
func (p *muxes) close() {
	p.mu.Lock()
	p.closed = true
	var all []*http2.Conn
	for _, m := range p.pods {
		all = append(all, m.conns...)
	}
	p.mu.Unlock()
	for _, c := range all {
		c.Leave()
	}
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

// clients are the connections of HTTP/2 of clients.
type clients struct {
	mu    sync.Mutex
	all   map[*http2.Conn]struct{}
	ended bool
}

// add makes a connection count. It reports false at the end.
func (a *clients) add(c *http2.Conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.all == nil {
		a.all = map[*http2.Conn]struct{}{}
	}
	if !a.ended {
		a.all[c] = struct{}{}
	}
	return !a.ended
}

func (a *clients) remove(c *http2.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.all, c)
}

// end has the connections end with their last streams.
func (a *clients) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	for c := range a.all {
		c.Leave()
	}
}
