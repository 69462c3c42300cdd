package web

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// Why a request fails.
var (
	// errStale means that a kept connection had been closed by the Pod: it has answered nothing.
	errStale  = errors.New("the endpoint has closed a kept connection")
	errSilent = errors.New("the endpoint is silent")
	errLeft   = errors.New("the client has left")
	errAnswer = errors.New("not an answer of HTTP/1.1")
)

// upload is the body of a request on its way while the answer is awaited.
type upload struct {
	pump
	session *session
	done    chan struct{}
	err     error // once done is closed
}

func (u *upload) touch() { u.session.touch() }

// waited decides whether to go on waiting for the client.
func (u *upload) waited() error {
	if u.session.silentFor() >= u.session.limit()+u.session.grace() {
		return errLeft
	}
	return nil
}

// forward carries the request that was read. It reports whether the connection may have another one.
func (s *session) forward(c *proxied.Config) bool {
	s.exchange = exchange{conn: s.web, config: c, to: c, upgrades: s.req.Upgrades, began: time.Now()}
	s.link = &s.own
	s.interim, s.answering, s.upload, s.status, s.unread = false, false, nil, 0, false
	s.isHead, s.websocket = string(s.req.Method) == http.MethodHead, strings.EqualFold(string(s.req.Upgrade), "websocket")
	s.sent.Store(0)
	s.touch()
	s.line, s.cookies = requestLine{}, nil
	if c.Logs() {
		s.line = requestLineOf(&s.req)
		defer func() { s.record(s.line, s.status, s.sent.Load()) }()
	}
	if s.req.Expectation {
		s.status = http.StatusExpectationFailed
		s.reject(s.status)
		return false
	}
	persists := s.carry()
	s.front.out = s.front.out[:0]
	s.front.releaseOut()
	stream.PutBuffer(s.head)
	s.head = nil
	return persists
}

// carry has the request answered, as the listener's configuration routes it. It returns what forward does.
func (s *session) carry() (persists bool) {
	route := s.config.Route(&s.req, s.web.origin())
	if route.Reply != nil {
		return s.reply(route.Reply)
	}
	s.to, s.edit = route.To, route.Edit
	if s.to.Sticky.Cookies() {
		s.cookies = cookies(&s.req)
	}
	persists, err := s.try()
	s.leave()
	if err != nil {
		return s.failed(err)
	}
	if s.unread {
		s.linger()
	}
	return persists
}

// touch notes that something was carried.
func (s *session) touch() { s.active.Store(int64(time.Since(s.web.began))) }

// silentFor is how long nothing was carried.
func (s *session) silentFor() time.Duration {
	return time.Since(s.web.began) - time.Duration(s.active.Load())
}

// limit is how long the Pod may be silent, and grace how much longer the client's connection stays.
func (s *session) limit() time.Duration { return s.to.Spec.IdleTimeout.Std() }
func (s *session) grace() time.Duration { return s.engine.idleGrace }

// drain ends the request: its Pod has left, and the time to drain is over.
func (s *session) drain() {
	s.drained.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.upstream != nil {
		stream.CloseNow(s.upstream.conn)
	}
}

// attach makes a connection be that of the request.
func (s *session) attach(u *upstream) {
	s.mu.Lock()
	s.upstream = u
	s.mu.Unlock()
}

// try has a Pod answer, and another one while no byte of the request was sent.
func (s *session) try() (persists bool, err error) {
	body := s.req.Body()
	whole := s.begin(&body)
	simple := body.Done() && whole == 0 && s.req.Idempotent()
	var tried []*pods.Member
	var last error
	for range pods.MaxDials {
		m, err := s.to.Sticky.Choose(s.to.Pool, s.web.client.Addr(), s.cookies, tried)
		if err != nil {
			return false, cmp.Or(last, err)
		}
		if !s.use(m) {
			continue // it has left just now
		}
		persists, err = s.ask(m, &body, simple)
		var undialed *dialError
		if !errors.As(err, &undialed) || s.drained.Load() {
			return persists, err
		}
		s.leave()
		tried, last = append(tried, m), err
	}
	return false, cmp.Or(last, pods.ErrNone)
}

// maxWhole is how long a body may be that goes out together with its head.
const maxWhole = 8 << 10

// begin makes the head of the request for a Pod, with the body if that is short and there already: then body is done.
// It returns how long that one is.
func (s *session) begin(body *http1.Body) (whole int) {
	if s.head == nil {
		s.head = stream.GetBuffer()
	}
	if n, ok := body.Sized(); ok && n <= maxWhole && n <= uint64(len(s.front.buffered())) && !s.req.Continue {
		whole = int(n) //nolint:gosec // at most maxWhole
	}
	// While a body is on its way there is no other use of the connection (RFC 9110, section 7.8: the client must send all
	// of it before the other protocol).
	s.websocket = s.websocket && (body.Done() || whole > 0)
	s.head = appendRequest(s.head[:0], &s.req, heading{
		client: s.web.client, at: s.web.at, secure: s.web.secure, once: transportOf(s.to).kind.proxy != 0, websocket: s.websocket,
	})
	if whole > 0 {
		n := uint64(whole)
		s.head = append(s.head, s.front.buffered()[:n]...)
		s.front.take(whole)
		body.Skip(n)
		s.received.Store(int64(n))
	}
	return whole
}

// ask sends the request to a member and passes its answer on. simple reports whether it may be sent again.
func (s *session) ask(m *pods.Member, body *http1.Body, simple bool) (persists bool, err error) {
	t := transportOf(s.to)
	for kept := t.upstreams.get(m.Addr()); ; kept = nil {
		u := kept
		s.pod, s.asked = m.Addr(), time.Now()
		if u == nil {
			if u, err = t.connect(s.engine.host.Context(), m.Addr(), s.web.client, s.web.at); err != nil {
				return false, err
			}
		}
		s.attach(u)
		persists, reusable, err := s.converse(u, m, body)
		s.attach(nil)
		if reusable && !s.drained.Load() {
			t.upstreams.put(u)
		} else {
			u.close()
		}
		if errors.Is(err, errStale) && simple && !s.drained.Load() {
			continue
		}
		return persists, err
	}
}

// converse sends the request and passes the answer on.
func (s *session) converse(u *upstream, m *pods.Member, body *http1.Body) (persists, reusable bool, err error) {
	if s.drained.Load() {
		return false, false, pods.ErrNone
	}
	defer func() {
		if s.endUpload(u) {
			s.unread, persists, reusable = true, false, false
		}
	}()
	u.put(s.head)
	waits := s.req.Continue && !body.Done()
	if body.Done() || waits {
		if err := u.flush(s.limit()); err != nil && u.kept {
			return false, false, fmt.Errorf("%w: %w", errStale, err)
		} // otherwise it may still have answered
	} else {
		s.beginUpload(u, *body)
	}
	waits, err = s.awaitAnswer(u, *body, waits)
	if err != nil {
		return false, false, err
	}
	s.answered, s.podStatus = time.Now(), s.res.Status
	if s.res.Status == http.StatusSwitchingProtocols {
		return false, false, s.switchProtocols(u)
	}
	return s.answer(u, m, waits)
}

// beginUpload starts to send the body of the request while the answer is awaited.
func (s *session) beginUpload(u *upstream, body http1.Body) {
	up := &upload{session: s, done: make(chan struct{})}
	s.upload = up
	up.pump = pump{
		to: &u.wire, from: &s.front, body: body, chunked: s.req.Chunked, trailers: s.req.Announced, timeout: s.limit(), bytes: &s.received,
		of: up,
	}
	up.err = panics.Err // if there is one
	go func() {
		defer close(up.done)
		defer s.engine.host.Panics().Recover(s.config.Service, u.conn)
		up.err = up.run(pollInterval)
		switch {
		case errors.Is(up.err, http1.ErrMalformed):
			s.web.malformed.Store(true)
			_ = u.conn.Close()
		case up.err != nil && !errors.Is(up.err, errSink): // the Pod may have answered before it has closed
			_ = u.conn.Close()
		}
	}()
}

// endUpload waits until the body of the request is sent, or gives it up if it has not been read yet. It reports
// whether something of it is left.
func (s *session) endUpload(u *upstream) bool {
	up := s.upload
	if up == nil {
		return false
	}
	s.upload = nil
	select {
	case <-up.done:
	default:
		if !up.ended.Load() {
			up.abandon(u)
		}
		<-up.done
		s.front.readBy = time.Time{}
	}
	return up.err != nil
}

// abandon ends an upload of which not all was read.
func (u *upload) abandon(to *upstream) {
	u.abandoned.Store(true)
	_ = to.conn.Close()
	again := time.NewTicker(abandonInterval) // the pump may have been about to set its own deadline
	defer again.Stop()
	for {
		_ = u.from.conn.SetReadDeadline(time.Unix(1, 0))
		select {
		case <-u.done:
			return
		case <-again.C:
		}
	}
}

// abandonInterval is how often an upload that is abandoned is woken until it has ended.
const abandonInterval = 10 * time.Millisecond

// awaitAnswer reads the head of the answer, and passes interim ones on. While waits, the body of the request is sent
// when the Pod asks for it, or does not answer in time; it returns whether it still waits.
func (s *session) awaitAnswer(u *upstream, body http1.Body, waits bool) (bool, error) {
	first := true
	for interim := 0; ; {
		s.res.Reset()
		if err := s.readAnswer(u, first, waits); err != nil {
			if !errors.Is(err, errContinue) {
				return waits, err
			}
			waits, s.interim = false, true
			if err := s.interimAnswer(append(s.front.out, "HTTP/1.1 100 Continue\r\n\r\n"...)); err != nil {
				return false, err
			}
			s.beginUpload(u, body)
			continue
		}
		first = false
		if s.res.Status >= 200 || s.res.Status == http.StatusSwitchingProtocols {
			return waits, nil
		}
		if interim++; interim > maxInterim {
			return waits, fmt.Errorf("%w: more than %d interim ones", errAnswer, maxInterim)
		}
		again := s.res.Status == http.StatusContinue && s.interim
		s.interim = s.interim || s.res.Status == http.StatusContinue
		if s.req.Minor == 1 && !again {
			if err := s.interimAnswer(appendInterim(s.front.out, &s.res)); err != nil {
				return waits, err
			}
		}
		if s.res.Status == http.StatusContinue && waits {
			waits = false
			s.beginUpload(u, body)
		}
	}
}

// maxInterim bounds how many interim answers a request has.
const maxInterim = 32

// interimAnswer sends an answer that is not the last one.
func (s *session) interimAnswer(text []byte) error {
	s.front.out = text
	if err := s.front.flush(s.limit() + s.grace()); err != nil {
		return fmt.Errorf("%w: %w", errLeft, err)
	}
	return nil
}

// errContinue means that a Pod has not asked for the body within pollInterval.
var errContinue = errors.New("the endpoint does not ask for the body")

// readAnswer reads the next head of the answer, and takes it.
func (s *session) readAnswer(u *upstream, first, waits bool) error {
	for {
		n, err := s.res.Parse(u.buffered())
		if err != nil {
			return fmt.Errorf("%w: %w", errAnswer, err)
		}
		if n > 0 {
			u.take(n)
			return nil
		}
		err = u.fill(min(pollInterval, s.limit()/4), maxAnswerHeader)
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			if waits {
				return errContinue
			}
			if err := s.waited(); err != nil {
				return err
			}
		case u.kept && first && len(u.buffered()) == 0 && !s.drained.Load():
			return fmt.Errorf("%w: %w", errStale, err)
		default:
			return fmt.Errorf("%w: %w", errAnswer, err)
		}
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

// waited decides whether to go on waiting for a Pod.
func (s *session) waited() error {
	if s.silentFor() >= s.limit() {
		return errSilent
	}
	if !s.sending() && len(s.front.buffered()) == 0 && s.web.hasLeft() {
		return errLeft
	}
	return nil
}

// hasLeft reports whether the client has closed the connection.
func (c *clientConn) hasLeft() bool {
	switch t := c.Conn.(type) {
	case *net.TCPConn:
		return socket.Ended(t)
	case *stream.Limited:
		return socket.Ended(t.TCPConn)
	}
	return false
}

// answer passes the answer on. waits reports whether the client still waits to be asked for its body.
func (s *session) answer(u *upstream, m *pods.Member, waits bool) (persists, reusable bool, err error) {
	body := s.res.Body(s.isHead)
	s.unread = waits
	_, sized := body.Sized()
	chunked := !body.Done() && !sized && s.req.Minor == 1
	persists = s.req.Persists() && !s.upgrades && !waits && !s.web.listener.Gone() && (body.Done() || sized || chunked)
	o := reply{minor: s.req.Minor, chunked: chunked, close: !persists}
	if s.to.Sticky.Cookies() {
		o.cookie = s.to.Sticky.Keep(s.to.Pool, m, s.cookies, setCookies(&s.res), s.web.secure)
	}
	if s.edit != nil {
		s.edit(&s.res)
	}
	s.front.put(nil)
	s.front.out = appendAnswer(s.front.out, &s.res, o)
	s.answering, s.status, s.front.written = true, s.res.Status, false
	reusable = s.res.Persists() && !body.Endless() && !waits && transportOf(s.to).kind.proxy == 0
	s.down = pump{
		to: &s.front, from: &u.wire, body: body, chunked: chunked, trailers: true, timeout: s.limit() + s.grace(), bytes: &s.sent, of: s,
		fields: s.down.fields[:0],
	}
	if err := s.down.run(min(pollInterval, s.limit()/4)); err != nil {
		return false, false, err
	}
	return persists, reusable, nil
}

// switchProtocols carries bytes both ways after the Pod's consent.
func (s *session) switchProtocols(u *upstream) error {
	if !s.websocket || s.upload != nil || !strings.EqualFold(string(s.res.Upgrade), "websocket") {
		return fmt.Errorf("%w: it changes to a protocol that was not asked for", errAnswer)
	}
	s.answering, s.front.written, s.status = true, true, http.StatusSwitchingProtocols
	s.front.put(nil)
	s.front.out = append(appendAnswer(s.front.out, &s.res, reply{minor: s.req.Minor}), u.buffered()...)
	u.put(s.front.buffered())
	if err := errors.Join(s.front.flush(s.limit()), u.flush(s.limit())); err != nil {
		return err
	}
	u.r, s.front.r = u.w, s.front.w
	u.release()
	s.front.release()
	if err := errors.Join(s.front.conn.SetDeadline(time.Time{}), u.conn.SetDeadline(time.Time{})); err != nil {
		return err
	}
	sent, received := stream.Join(s.engine.host.Panics(), s.config.Service, s.front.conn, u.conn, s.limit())
	s.sent.Add(sent)
	s.received.Add(received)
	return nil
}

// failed answers for a Pod, unless its answer has begun. It reports whether the connection may have another request.
func (s *session) failed(err error) bool {
	log := func(status int) {
		s.engine.host.Log().Debug("a request has failed", "service", s.config.Service, "client", s.web.client, "status", status, "err", err)
	}
	if s.answering && s.front.written {
		log(s.status)
		return false
	}
	s.status = http.StatusBadGateway
	switch {
	case s.web.malformed.Load():
		s.status = http.StatusBadRequest
	case errors.Is(err, pods.ErrNone), s.drained.Load():
		s.status = http.StatusServiceUnavailable
	case errors.Is(err, errSilent), errors.Is(err, os.ErrDeadlineExceeded):
		s.status = http.StatusGatewayTimeout
	}
	log(s.status)
	if errors.Is(err, errLeft) {
		return false
	}
	return s.reply(&proxied.Reply{Status: s.status})
}

// reply answers for a Pod. It reports whether the connection may have another request.
func (s *session) reply(r *proxied.Reply) bool {
	s.status = r.Status
	whole := s.req.Body()
	persists := s.status != http.StatusBadRequest && s.req.Persists() && !s.upgrades && whole.Done() && !s.web.listener.Gone()
	s.front.put(nil)
	s.front.out = appendOwn(s.front.out[:0], s.req.Minor, r, !persists, s.isHead)
	if err := s.front.flush(s.limit()); err != nil {
		return false
	}
	if !persists {
		s.linger()
	}
	return persists
}
