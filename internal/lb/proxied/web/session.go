package web

import (
	"bytes"
	"errors"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
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
	res    http1.Response
	head   []byte // of the request, as it goes to a Pod

	// Of the request at hand:

	exchange
	own       pods.Link // closes pod
	interim   bool      // 100 was sent to the client
	answering bool      // the answer has begun
	upload    *upload
	down      pump         // the body of the answer
	active    atomic.Int64 // when something was carried last, since web.began
	status    int
	sent      atomic.Int64
	line      requestLine // for the access log
	cookies   []string
	isHead    bool
	websocket bool // the client asks for it
	unread    bool // the client may still send something of its body

	mu       sync.Mutex
	upstream *upstream
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
func (e *engine) carryHTTP1(web *clientConn, front stream.Conn) (handOver stream.Conn, waits bool) {
	s := sessionPool.Get().(*session)
	s.engine, s.web, s.front = e, web, newWire(front)
	s.front.smallFirst = true
	s.idle.Store(false)
	s.served.Store(!web.idleSince.IsZero())
	handOver, waits = s.run()
	s.front.out = s.front.out[:0]
	s.front.release()
	s.engine, s.web, s.front, s.exchange, s.line, s.cookies = nil, nil, wire{}, exchange{}, requestLine{}, nil
	sessionPool.Put(s)
	return handOver, waits
}

// run carries requests until the connection ends, or waits for the next one for longer, or returns the rest of it
// for package net/http: the client speaks HTTP/2, or Pods do.
func (s *session) run() (handOver stream.Conn, waits bool) {
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
			s.recordOwn(c, status, requestLineOf(&s.req))
			s.reject(status)
			return nil, false
		}
		if !c.Protocol.IsHTTP() { // the listener carries bytes by now
			c = s.web.config
		}
		if !transportOf(c).isHTTP1() || s.engine.onlyNetHTTP {
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
	if s.upstream != nil {
		stream.CloseNow(s.upstream.conn)
	}
}

// rest returns the connection, with the bytes that were read but not taken.
func (s *session) rest() stream.Conn {
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
	for {
		b := s.front.buffered()
		if !s.served.Load() && !s.web.secure && isPreface(b) {
			if len(b) >= len(wholePreface) {
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

// headerSlack is how much a header may exceed maxHeader, as net/http allows it.
const headerSlack = 4 << 10

// isPreface reports whether b begins as a connection of HTTP/2 does, or is the beginning of that.
func isPreface(b []byte) bool {
	n := min(len(b), len(wholePreface))
	return n > 0 && string(b[:n]) == wholePreface[:n]
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
		s.recordOwn(s.web.config, http.StatusBadRequest, requestLine{})
		s.reject(http.StatusBadRequest)
	case errors.Is(err, errFull):
		s.recordOwn(s.web.config, http.StatusRequestHeaderFieldsTooLarge, requestLine{})
		s.reject(http.StatusRequestHeaderFieldsTooLarge)
	case errors.Is(err, os.ErrDeadlineExceeded) && len(s.front.buffered()) > 0: // who has sent nothing expects no answer
		s.recordOwn(s.web.config, http.StatusRequestTimeout, requestLine{})
		s.reject(http.StatusRequestTimeout)
	}
}

// recordOwn writes the line of what is answered here, of the Service that had the address if that has passed on.
func (s *session) recordOwn(c *proxied.Config, status int, line requestLine) {
	if status == http.StatusMisdirectedRequest {
		c = s.web.config
	}
	if c.Logs() {
		x := exchange{conn: s.web, config: c, to: c, began: time.Now()}
		x.record(line, status, int64(len(http.StatusText(status))+5)) // see appendOwn
	}
}

// reject answers a request that no Pod gets. It is the last one of the connection.
func (s *session) reject(status int) {
	s.front.out = appendOwn(s.front.out[:0], s.req.Minor, &proxied.Reply{Status: status}, true, string(s.req.Method) == http.MethodHead)
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
