package web

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"net/http"
	"sync"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// muxed is a request on a stream of HTTP/2.
type muxed struct {
	exchange
	conn2 *http2.Conn
	s     *http2.Stream
	task  func()    // run
	own   pods.Link // closes the Pod's end
	leave func()    // what ends it when the client does
	from  streamSource
	into  streamSink
	w     heads.Writer
	end   bool // the answer's head is all of it
}

// muxedPool has requests that have ended.
var muxedPool sync.Pool

func newMuxed() *muxed {
	if m, ended := muxedPool.Get().(*muxed); ended {
		return m
	}
	m := &muxed{w: heads.Writer{Second: true}}
	m.own.Close = m.drain
	m.leave, m.task = m.abort, m.run
	return m
}

// carryHTTP2 carries the requests of a connection of HTTP/2, of which text was read already, until it ends.
func (e *engine) carryHTTP2(web *clientConn, front stream.Conn, text []byte) {
	var c *http2.Conn
	idle := web.config.Spec.IdleTimeout.Std()
	c = http2.NewServer(front, text, http2.Options{
		Accept: func(s *http2.Stream) {
			m := newMuxed()
			m.conn2, m.s, m.engine, m.exchange.conn = c, s, e, web
			e.host.Run(m.task)
		},
		Go: e.host.Run, MaxHead: maxHeader, MaxStreams: maxStreams, HeadTimeout: e.headerTimeout, IdleTimeout: idle,
		WriteTimeout: idle + e.idleGrace,
	})
	if !e.clients.Add(c) {
		return
	}
	defer e.clients.Remove(c)
	if err := c.Run(); err != nil {
		e.host.Log().Debug("a connection of HTTP/2 has ended", "service", web.config.Service, "client", web.client, "err", err)
	}
}

// run carries the request.
func (m *muxed) run() {
	e, web := m.engine, m.exchange.conn
	code := http2.InternalError // unless it goes well
	defer func() {
		m.s.CloseAndWrite(code)
		m.exchange.forget()
		m.conn2, m.s, m.from, m.into = nil, nil, streamSource{}, streamSink{}
		muxedPool.Put(m)
	}()
	c := web.listener.Config()
	defer e.host.Panics().Recover(c.Service)
	m.client, m.second, m.req, m.link = m, true, &m.s.Request, &m.own
	kept := c
	status := web.rejects(c, m.req.Method)
	if status == http.StatusMisdirectedRequest || !c.Protocol.IsHTTP() { // the line is for the Service that had the address
		kept = web.config
	}
	m.begin(kept)
	defer m.exchange.end()
	m.from = streamSource{Stream: m.s, length: m.req.Length}
	m.s.OnEnd(m.leave)
	m.end = false
	switch {
	case status > 0:
		m.conn2.Leave() // a kept connection has the rights of a new one
	case m.s.TooLarge:
		status = http.StatusRequestHeaderFieldsTooLarge
	case m.req.Expectation:
		status = http.StatusExpectationFailed
	case !m.admit():
		status = http.StatusServiceUnavailable
	}
	if status > 0 {
		m.exchange.reply(&proxied.Reply{Status: status})
		code = http2.NoError
		return
	}
	if m.s.Socket {
		m.socket()
	}
	if m.carry() {
		code = http2.NoError
	}
}

// admit counts the request: each needs a connection to a Pod, and one connection of a client has many.
func (m *muxed) admit() bool {
	m.counted = m.config
	return m.engine.host.AdmitRequest(m.config)
}

// socket makes a request for a WebSocket have the form of HTTP/1.1, in which it has a key.
func (m *muxed) socket() {
	var key [16]byte
	_, _ = rand.Read(key[:])
	m.key = base64.StdEncoding.EncodeToString(key[:])
	m.req.Upgrade, m.req.Upgrades, m.upgrades = []byte("websocket"), true, true
}

// nothing is the body of a request without one.
var nothing = &wireSource{}

// source is the body of the request. What a client of a WebSocket sends is none.
func (m *muxed) source() source {
	if m.s.Socket {
		return nothing
	}
	return &m.from
}

func (m *muxed) whole(most int) ([]byte, bool) { return m.s.Whole(most) }

func (m *muxed) takeWhole(n int) { m.s.Take(n) }

// put sends a head, which is the end of the answer or not.
func (m *muxed) put(end bool) error {
	err := m.s.Head(&m.w.Encoder, end)
	m.w.Block = m.w.Block[:0]
	return err
}

func (m *muxed) interim(r *http1.Response) error {
	m.w.Interim(r)
	if err := m.put(false); err != nil {
		return fmt.Errorf("%w: %w", errLeft, err)
	}
	m.s.Flush()
	return nil
}

func (m *muxed) proceed() error { return m.interim(&http1.Response{Status: http.StatusContinue}) }

func (m *muxed) answer(body source, cookie string) sink {
	m.w.Answer(&m.res, heads.Onward{Minor: 1, Cookie: cookie})
	m.end = body.done() && len(body.trailers()) == 0
	m.into = streamSink{Stream: m.s, w: &m.w, timeout: m.limit() + m.grace(), ended: m.end, waits: true, closes: m.upload == nil}
	_ = m.put(m.end) // what comes next finds the error, too
	return &m.into
}

func (m *muxed) begun() bool { return m.answering }

// reply answers for a Pod.
func (m *muxed) reply(r *proxied.Reply) {
	m.w.Own(1, r, false)
	if body := heads.BodyOf(r); m.put(m.isHead || len(body) == 0) == nil && !m.isHead && len(body) > 0 {
		_ = m.s.Write(body, true, m.limit()+m.grace())
	}
}

func (m *muxed) left() bool { return m.s.Err() != nil }

// tunnel carries the bytes of a WebSocket both ways: to the client they are the body of an answer 200.
func (m *muxed) tunnel(u *upstream) error {
	r := &m.res
	r.Status = http.StatusOK
	for i := range r.Fields {
		if f := &r.Fields[i]; http1.EqualFold(f.Name, "sec-websocket-accept") {
			f.Kind = http1.HopByHop
		}
	}
	m.w.Answer(r, heads.Onward{Minor: 1})
	if err := m.put(false); err != nil {
		return err
	}
	m.s.Flush()
	up := &upload{exchange: &m.exchange, done: make(chan struct{})}
	up.pump = pump{to: &wireSink{to: &u.wire, timeout: m.limit()}, from: &m.from, timeout: m.limit(), bytes: &m.received, of: up}
	m.upload = up
	m.engine.host.Run(func() {
		defer close(up.done)
		defer m.engine.host.Panics().Recover(m.config.Service, closer(u.abort))
		if up.err = up.run(pollInterval); up.err != nil {
			u.abort()
			return
		}
		_ = u.conn.CloseWrite()
	})
	m.into = streamSink{Stream: m.s, w: &m.w, timeout: m.limit() + m.grace()}
	m.down = pump{to: &m.into, from: http1Tail(u), timeout: m.limit() + m.grace(), bytes: &m.sent, of: &m.exchange}
	return m.down.run(m.poll()) // what the client still sends nobody reads
}

// http1Tail is what follows on a connection, to its end.
func http1Tail(u *upstream) source { return &wireSource{from: &u.wire, body: http1.UntilEnd()} }
