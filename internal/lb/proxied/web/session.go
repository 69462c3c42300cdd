package web

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

const (
	// pollInterval is how long something is waited for before a look at the other end: whether the client is still there.
	pollInterval = time.Second
	// parkAfter is how long a client's next request is waited for before the connection is parked.
	parkAfter = 100 * time.Millisecond
	// linger is how long a client is read from that was sent the last answer, so that it gets it: what is closed with bytes
	// unread is reset.
	linger = 500 * time.Millisecond
	// maxLinger bounds the bytes that are read while lingering.
	maxLinger = 256 << 10
	// newConnGrace is how long a connection without a request stays at the end.
	newConnGrace = 5 * time.Second
)

// session is a client's connection with requests of HTTP/1.1, which are carried one after the other.
type session struct {
	engine *engine
	web    *clientConn
	front  wire
	idle   atomic.Bool // waits for a request
	served atomic.Bool // has had one
	req    http1.Request
	exchange
	own      pods.Link // closes the Pod's end
	from     wireSource
	into     wireSink
	persists bool // the connection may have another request
}

// sessions are the sessions of a engine.
type sessions struct {
	mu    sync.Mutex
	all   map[*session]struct{}
	ended bool
}

// sessionPool has sessions that have ended.
var sessionPool = sync.Pool{New: func() any {
	s := &session{}
	s.own.Close = s.drain
	return s
}}

// carryHTTP1 carries the requests of a connection, as run does.
func (e *engine) carryHTTP1(web *clientConn, front stream.Conn) (rest *readAhead, waits bool) {
	s := sessionPool.Get().(*session)
	s.engine, s.web, s.front = e, web, newWire(front)
	s.front.smallFirst = true
	s.exchange.engine, s.exchange.conn, s.exchange.client, s.exchange.req, s.exchange.link = e, web, s, &s.req, &s.own
	s.idle.Store(false)
	s.served.Store(!web.idleSince.IsZero())
	rest, waits = s.run()
	s.front.out = s.front.out[:0]
	s.front.release()
	s.engine, s.web, s.front, s.from, s.into = nil, nil, wire{}, wireSource{fields: s.from.fields[:0]}, wireSink{}
	s.forget()
	sessionPool.Put(s)
	return rest, waits
}

// run carries requests until the connection ends, or waits for the next one for longer, or returns the rest of it: the client
// speaks HTTP/2.
func (s *session) run() (rest *readAhead, waits bool) {
	if !s.engine.sessions.add(s) {
		return nil, false
	}
	defer s.engine.sessions.remove(s)
	defer s.giveUp()
	for {
		n, err := s.read()
		switch {
		case err == nil:
		case errors.Is(err, errHTTP2):
			return s.rest(), false
		case errors.Is(err, errWaits):
			return nil, true
		default:
			s.refuse(err)
			return nil, false
		}
		c := s.web.listener.Config()
		if status := s.web.rejects(c, s.req.Method); status > 0 {
			s.recordOwn(c, status, heads.LineOf(&s.req, false))
			s.reject(status)
			return nil, false
		}
		if !c.Protocol.IsHTTP() { // the listener carries bytes by now
			c = s.web.config
		}
		if s.engine.onlyNetHTTP {
			return s.rest(), false
		}
		s.front.take(n)
		if !s.forward(c) {
			return nil, false
		}
		s.served.Store(true)
	}
}

// giveUp ends the request at hand, of which nothing is left but after a panic.
func (s *session) giveUp() {
	s.leave()
	s.abort()
}

// rest returns the connection, with the bytes that were read but not taken.
func (s *session) rest() *readAhead {
	_ = s.front.conn.SetDeadline(time.Time{})
	return &readAhead{Conn: s.front.conn, text: bytes.Clone(s.front.buffered())}
}

// readAhead is a connection of which text was read already.
type readAhead struct {
	stream.Conn
	text []byte
}

// Read reads the text first.
func (r *readAhead) Read(p []byte) (int, error) {
	if len(r.text) > 0 {
		n := copy(p, r.text)
		r.text = r.text[n:]
		return n, nil
	}
	return r.Conn.Read(p)
}

var (
	errHTTP2 = errors.New("a client of HTTP/2")
	// errWaits means that the next request does not come at once.
	errWaits = errors.New("a client that waits")
)

// read reads the head of the next request, and returns how long it is.
func (s *session) read() (int, error) {
	s.req.Reset()
	until := s.web.began.Add(s.engine.headerTimeout) // for a head that has begun
	if s.served.Load() {
		if len(s.front.buffered()) == 0 {
			if err := s.await(); err != nil {
				return 0, err
			}
		}
		until = time.Time{}
	}
	s.idle.Store(len(s.front.buffered()) == 0)
	for blank := 0; ; {
		skipped, half := s.skipBlank(maxBlank - blank)
		blank += skipped
		if b := s.front.buffered(); half { // of such a line, perhaps
		} else if blank == 0 && !s.served.Load() && !s.web.secure && isPreface(b) {
			if len(b) >= len(http2.Preface) {
				return 0, errHTTP2
			}
		} else if n, err := s.req.Parse(b); n > 0 || err != nil {
			return n, err
		}
		if until.IsZero() {
			until = time.Now().Add(s.engine.headerTimeout)
		}
		s.front.readBy = time.Time{} // the time is bounded, however often bytes come
		if err := s.front.conn.SetReadDeadline(until); err != nil {
			return 0, err
		}
		err := s.front.fillBy(maxHeader + headerSlack)
		s.idle.Store(false)
		if err != nil {
			return 0, err
		}
	}
}

// maxBlank is how many empty lines may stand before a request line (RFC 9112, section 2.2): some clients send one after a body.
const maxBlank = 4

// skipBlank takes empty lines before a request line, most of them at most, and returns how many. half reports whether there is the
// beginning of one.
func (s *session) skipBlank(most int) (lines int, half bool) {
	for lines < most {
		b := s.front.buffered()
		if len(b) == 0 || b[0] != '\r' || len(b) > 1 && b[1] != '\n' {
			return lines, false
		}
		if len(b) == 1 {
			return lines, true
		}
		s.front.take(2)
		lines++
	}
	return lines, false
}

// headerSlack is how much a header may exceed maxHeader, as net/http allows it.
const headerSlack = 4 << 10

// isPreface reports whether b begins as a connection of HTTP/2 does, or is the beginning of that.
func isPreface(b []byte) bool {
	n := min(len(b), len(http2.Preface))
	return n > 0 && string(b[:n]) == http2.Preface[:n]
}

// await waits for the first bytes of a request that is not the first one. What comes may be none yet: a part of a record
// of TLS, or one without content. That does not make the wait longer.
func (s *session) await() error {
	s.idle.Store(true)
	defer s.idle.Store(false)
	if s.web.idleSince.IsZero() {
		s.web.idleSince = time.Now()
	}
	err := s.front.fill(parkAfter, maxHeader)
	switch {
	case !errors.Is(err, os.ErrDeadlineExceeded):
		s.web.idleSince = time.Time{}
	case s.web.idleFor() > 0:
		err = errWaits
	}
	return err
}

// refuse answers an invalid or incomplete request, if it can be answered.
func (s *session) refuse(err error) {
	switch {
	case errors.Is(err, http1.ErrMalformed):
		s.recordOwn(s.web.config, http.StatusBadRequest, heads.Line{})
		s.reject(http.StatusBadRequest)
	case errors.Is(err, errFull):
		s.recordOwn(s.web.config, http.StatusRequestHeaderFieldsTooLarge, heads.Line{})
		s.reject(http.StatusRequestHeaderFieldsTooLarge)
	case errors.Is(err, os.ErrDeadlineExceeded) && len(s.front.buffered()) > 0: // who has sent nothing expects no answer
		s.recordOwn(s.web.config, http.StatusRequestTimeout, heads.Line{})
		s.reject(http.StatusRequestTimeout)
	}
}

// recordOwn writes the line of what is answered here, of the Service that had the address if that has passed on.
func (s *session) recordOwn(c *proxied.Config, status int, line heads.Line) {
	if status == http.StatusMisdirectedRequest {
		c = s.web.config
	}
	c.Traffic().Request(status, -1)
	x := &exchange{engine: s.engine, conn: s.web, config: c, to: c, began: time.Now()}
	if c.Logs() {
		x.record(line, status, int64(len(heads.TextOf(status))))
	}
	if c.Watches() {
		show(x, line, status)
	}
}

// reject answers a request that no Pod gets. It is the last one of the connection.
func (s *session) reject(status int) {
	s.putReply(&proxied.Reply{Status: status}, true, string(s.req.Method) == http.MethodHead) // no body was read yet
	if s.front.flush(s.grace()) == nil {
		s.linger()
	}
}

// linger sends the end, and reads what the client still sends.
func (s *session) linger() {
	if s.front.conn.CloseWrite() != nil || s.front.conn.SetReadDeadline(time.Now().Add(linger)) != nil {
		return
	}
	buf := stream.GetBuffer()
	defer stream.PutBuffer(buf)
	for n := 0; n < maxLinger; {
		m, err := s.front.conn.Read(buf)
		if n += m; err != nil {
			return
		}
	}
}

// fillBy reads more of a head of at most limit bytes, by the deadline that is set.
func (c *wire) fillBy(limit int) error {
	c.readBy = time.Now().Add(24 * time.Hour)
	err := c.fill(0, limit)
	c.readBy = time.Time{}
	return err
}

// add makes a session count. It reports false at the end.
func (a *sessions) add(s *session) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return false
	}
	if a.all == nil {
		a.all = map[*session]struct{}{}
	}
	a.all[s] = struct{}{}
	return true
}

func (a *sessions) remove(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.all, s)
}

// end closes the sessions that wait for a request; sessions without any request yet a little later. The others end with
// their requests, as their listeners are gone.
func (a *sessions) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.ended {
		a.ended = true
		time.AfterFunc(newConnGrace, a.end)
	}
	for s := range a.all {
		if s.idle.Load() && (s.served.Load() || time.Since(s.web.began) >= newConnGrace) && s.idle.CompareAndSwap(true, false) {
			_ = s.web.Close()
		}
	}
}

// forward carries the request that was read. It reports whether the connection may have another one.
func (s *session) forward(c *proxied.Config) bool {
	s.begin(c)
	defer s.end()
	s.from.from, s.from.body, s.from.closed = &s.front, s.req.Body(), false
	s.persists = false
	if s.req.Expectation {
		s.status = http.StatusExpectationFailed
		s.reject(s.status)
		return false
	}
	whole := s.carry()
	if s.upload != nil {
		s.front.readBy = time.Time{} // it may have been woken
	}
	if s.persists = s.persists && whole && !s.unread; whole && !s.persists && (s.unread || !s.answering) {
		s.linger()
	}
	s.front.out = s.front.out[:0]
	s.front.releaseOut()
	return s.persists
}

func (s *session) source() source { return &s.from }

func (s *session) whole(most int) ([]byte, bool) {
	n, ok := s.from.body.Sized()
	if b := s.front.buffered(); ok && n <= uint64(most) && n <= uint64(len(b)) {
		return b[:n], true
	}
	return nil, false
}

func (s *session) takeWhole(n int) {
	s.front.take(n)
	s.from.body.Skip(uint64(n)) //nolint:gosec // at most maxWhole
}

// send writes a text that is no answer yet.
func (s *session) send(text []byte) error {
	s.front.out = text
	if err := s.front.flush(s.limit() + s.grace()); err != nil {
		return fmt.Errorf("%w: %w", errLeft, err)
	}
	return nil
}

func (s *session) interim(r *http1.Response) error {
	w := heads.Writer{Encoder: http2.Encoder{Block: s.front.out}}
	w.Interim(r)
	return s.send(w.Block)
}

func (s *session) proceed() error {
	return s.send(append(s.front.out, "HTTP/1.1 100 Continue\r\n\r\n"...))
}

func (s *session) answer(body source, cookie string) sink {
	done := body.done()
	_, sized := body.sized()
	chunked := !done && !sized && s.req.Minor == 1
	s.persists = s.req.Persists() && !s.upgrades && !s.unread && !s.web.listener.Gone() && (done || sized || chunked)
	s.front.put(nil)
	w := heads.Writer{Encoder: http2.Encoder{Block: s.front.out}}
	w.Answer(&s.res, heads.Onward{Minor: s.req.Minor, Chunked: chunked, Close: !s.persists, Cookie: cookie})
	s.front.out, s.front.written = w.Block, false
	s.into = wireSink{to: &s.front, chunked: chunked, timeout: s.limit() + s.grace()}
	return &s.into
}

func (s *session) begun() bool { return s.front.written }

// reply answers for a Pod.
func (s *session) reply(r *proxied.Reply) {
	s.persists = r.Status != http.StatusBadRequest && s.req.Persists() && !s.upgrades && s.from.done() && !s.web.listener.Gone()
	s.answering = false
	s.putReply(r, !s.persists, s.isHead)
	if err := s.front.flush(s.limit()); err != nil {
		s.persists, s.answering = false, true // the client has gone
	}
}

// putReply puts an answer of the load balancer's own.
func (s *session) putReply(r *proxied.Reply, closes, isHead bool) {
	s.front.put(nil)
	w := heads.Writer{Encoder: http2.Encoder{Block: s.front.out[:0]}}
	w.Own(s.req.Minor, r, closes)
	if s.front.out = w.Block; !isHead {
		s.front.out = append(s.front.out, heads.BodyOf(r)...)
	}
}

// sending reports whether a body is on its way: then its goroutine reads from the client.
func (s *session) sending() bool {
	if s.upload == nil {
		return false
	}
	select {
	case <-s.upload.done:
		return false
	default:
		return true
	}
}

// left reports whether the client has closed the connection; while a body is on its way the read of it finds the end.
func (s *session) left() bool {
	return !s.sending() && len(s.front.buffered()) == 0 && stream.HasEnded(s.web.Conn)
}

// tunnel carries bytes both ways.
func (s *session) tunnel(u *upstream) error {
	s.front.written = true
	s.front.put(nil)
	w := heads.Writer{Encoder: http2.Encoder{Block: s.front.out}}
	w.Answer(&s.res, heads.Onward{Minor: s.req.Minor})
	s.front.out = append(w.Block, u.buffered()...)
	u.put(s.front.buffered())
	if err := errors.Join(s.front.flush(s.limit()), u.wire.flush(s.limit())); err != nil {
		return err
	}
	u.r, s.front.r = u.w, s.front.w
	u.wire.release()
	s.front.release()
	if err := errors.Join(s.front.conn.SetDeadline(time.Time{}), u.conn.SetDeadline(time.Time{})); err != nil {
		return err
	}
	sent, received := stream.Join(s.engine.host.Panics(), s.config.Service, s.front.conn, u.conn, s.limit())
	s.sent.Add(sent)
	s.received.Add(received)
	return nil
}
