package proxied

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

// Bounds of what a client may send before a Pod is involved.
const (
	// maxHeader bounds the request line and the fields: more is 431.
	maxHeader = 64 << 10
	// headerTimeout is how long they may take, from the first byte.
	headerTimeout = 20 * time.Second
	// maxStreams is how many requests a connection of HTTP/2 may have at a time.
	maxStreams = 250
	// maxAnswerHeader bounds the fields of a Pod's answer: more is 502.
	maxAnswerHeader = 256 << 10
)

// webServer carries requests of HTTP: the seam between an accepted connection and a configuration, as TCP has
// it in serve, and whatever reads requests. Those of HTTP/1.1 for Pods of HTTP/1.1 are carried by a session; those of
// HTTP/2, of clients or of Pods, by net/http, behind a guard.
type webServer struct {
	server *Server
	http   http.Server
	proxy  httputil.ReverseProxy
	conns  chan net.Conn
	ended  chan struct{}

	sessions sessions
	// onlyNetHTTP has net/http carry requests of HTTP/1.1, too: for tests, which compare both.
	onlyNetHTTP bool
	end         func() // closes ended
}

func newWebServer(s *Server) *webServer {
	w := &webServer{server: s, conns: make(chan net.Conn), ended: make(chan struct{})}
	w.end = sync.OnceFunc(func() { close(w.ended) })
	quiet := slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	w.proxy = httputil.ReverseProxy{
		Rewrite: rewrite, Transport: chooser{}, ErrorLog: quiet, BufferPool: bufferPool{},
		ModifyResponse: prepare, ErrorHandler: w.fail,
	}
	w.http = http.Server{
		Handler: w, ReadHeaderTimeout: s.headerTimeout, MaxHeaderBytes: maxHeader, ErrorLog: quiet, Protocols: new(http.Protocols),
		DisableGeneralOptionsHandler: true, // it would keep a connection that asks for another protocol
		HTTP2:                        &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		BaseContext:                  func(net.Listener) context.Context { return s.ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, webConnKey{}, webConnOf(c))
		},
	}
	w.http.Protocols.SetHTTP1(true)
	w.http.Protocols.SetHTTP2(true)
	w.http.Protocols.SetUnencryptedHTTP2(true)
	return w
}

// webConn is a client's connection that has requests.
type webConn struct {
	net.Conn
	listener   *listener
	config     *config // as it was accepted with
	client, at netip.AddrPort
	secure     bool
	tls        tls.ConnectionState
	malformed  atomic.Bool // what the client sends
	closed     chan struct{}
	close      func() error // of Conn, once

	began time.Time
	last  atomic.Int64 // when something was carried last, since began
	// multiplexed is true of a connection of HTTP/2: there only requests and answers count as carried. carries
	// is how often they were, and taken how many bytes of requests.
	multiplexed    atomic.Bool
	carries, taken atomic.Int64
	server         *Server
}

func (c *webConn) log(text string, err error) {
	c.server.log.Debug(text, "service", c.config.service, "client", c.client, "err", err)
}

type webConnKey struct{}

// webConnOf returns the webConn below what is given to net/http.
func webConnOf(c net.Conn) *webConn {
	switch c := c.(type) {
	case *tls.Conn:
		return webConnOf(c.NetConn())
	case *frames:
		return c.web
	case *guard:
		return c.web
	case *webConn:
		return c
	}
	return nil
}

// Close closes the connection.
func (c *webConn) Close() error { return c.close() }

// Read is that of the connection below.
func (c *webConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.carried(n)
	return n, err
}

// Write is that of the connection below.
func (c *webConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.carried(n)
	return n, err
}

// CloseWrite sends the end.
func (c *webConn) CloseWrite() error {
	if s, ok := c.Conn.(stream); ok {
		return s.CloseWrite()
	}
	return nil
}

func (c *webConn) carried(n int) {
	if n > 0 && !c.multiplexed.Load() {
		c.last.Store(int64(time.Since(c.began)))
	}
}

// endIdle closes the connection when it has carried nothing for that long.
func (c *webConn) endIdle(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case <-c.closed:
			return
		case <-timer.C:
		}
		left := limit - (time.Since(c.began) - time.Duration(c.last.Load()))
		if left <= 0 {
			_ = c.Close()
			return
		}
		timer.Reset(left)
	}
}

// idleGrace is how much longer than a Pod may be silent the client's connection stays, for the answer 504.
const idleGrace = 5 * time.Second

// serve carries the requests of a connection until it is closed. For HTTPS it ends TLS first.
func (w *webServer) serve(conn stream, l *listener, c *config, client, at netip.AddrPort) {
	web := &webConn{Conn: conn, listener: l, config: c, client: client, at: at, closed: make(chan struct{}), began: time.Now(),
		server: w.server}
	web.close = sync.OnceValue(func() error { defer close(web.closed); return conn.Close() })
	defer web.Close()
	var front stream = conn
	if c.tls != nil {
		web.secure = true
		t := tls.Server(web, c.tls)
		if err := t.HandshakeContext(w.server.ctx); err != nil {
			w.server.log.Debug("no TLS with a client", "service", c.service, "client", client, "err", err)
			return
		}
		front, web.tls = t, t.ConnectionState()
	}
	_ = conn.SetDeadline(time.Time{})
	multiplexed := web.tls.NegotiatedProtocol == "h2"
	if !multiplexed {
		if front = w.carryHTTP1(web, front); front == nil {
			return
		}
		web.carried(1) // since then it counts
		if c.tls == nil {
			front = &readAhead{stream: web, text: front.(*readAhead).text}
		}
		front = &guard{Conn: front, web: web}
	}
	front = &frames{Conn: front, web: web, must: multiplexed, timeout: w.server.headerTimeout}
	select {
	case w.conns <- front:
	case <-w.ended:
		return
	}
	web.endIdle(c.spec.IdleTimeout.Std() + w.server.idleGrace)
}

// shutdown ends connections without requests, and those with one after it.
func (w *webServer) shutdown(ctx context.Context) {
	w.sessions.end()
	_ = w.http.Shutdown(ctx)
}

// Accept, Close and Addr make w the net.Listener of its http.Server.
func (w *webServer) Accept() (net.Conn, error) {
	select {
	case c := <-w.conns:
		return c, nil
	case <-w.ended:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (w *webServer) Close() error { w.end(); return nil }

// Addr is nowhere.
func (w *webServer) Addr() net.Addr { return &net.TCPAddr{} }

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
	usage   *usage // that counts it, nil if none does

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
	if x.usage != nil {
		x.usage.requests.Add(-1)
		x.conn.server.requests.Add(-1)
	}
}

// carried takes into account that an answer, or a part of a body, was carried.
func (x *exchange) carried(n int) {
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

// rejects returns the status for a request that no Pod gets by a configuration, 0 for others: a kept connection has
// the rights of a new one.
func (c *webConn) rejects(now *config, method []byte) int {
	switch {
	case now.service != c.config.service: // the address has passed on
		return http.StatusMisdirectedRequest
	case !now.admits(c.client.Addr()):
		return http.StatusForbidden
	case string(method) == "PRI": // the preface of HTTP/2, with fields
		return http.StatusBadRequest
	case string(method) == http.MethodConnect:
		return http.StatusMethodNotAllowed
	}
	return 0
}

// ServeHTTP carries one request.
func (w *webServer) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	conn, ok := r.Context().Value(webConnKey{}).(*webConn)
	if !ok {
		panic(http.ErrAbortHandler)
	}
	c := conn.listener.config.Load()
	kept := c
	status := conn.rejects(c, []byte(r.Method))
	if status == http.StatusMisdirectedRequest { // the line is for the Service that had the address
		kept = conn.config
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	x := &exchange{conn: conn, config: kept, client: r.Context(), cancel: cancel, began: time.Now()}
	defer x.end()
	if multiplexed := r.ProtoMajor == 2; multiplexed || kept.logs != nil {
		counts := &counter{ResponseWriter: out, exchange: x}
		if r.Body != nil && r.Body != http.NoBody {
			r.Body = countedBody{r.Body, x}
		}
		if multiplexed {
			x.touch()
			defer x.endIdle(out)()
		}
		out = counts
		if kept.logs != nil {
			defer func() { x.record(lineOf(r), counts.status, counts.sent) }()
		}
	}
	if status == 0 && !w.begin(x) {
		status = http.StatusServiceUnavailable
	}
	if status > 0 {
		if status != http.StatusServiceUnavailable { // other requests of the connection go on
			out.Header().Set("Connection", "close")
		}
		answer(out, status)
		return
	}
	if !c.protocol.IsHTTP() { // the listener carries bytes by now
		x.config = conn.config
	}
	// An empty field counts, too: the guard lets pass what follows it.
	_, x.upgrades = r.Header["Upgrade"]
	if r.ProtoMajor == 1 && !x.upgrades && conn.listener.gone.Load() {
		out.Header().Set("Connection", "close")
	}
	_ = http.NewResponseController(out).EnableFullDuplex() // HTTP/1.1: an answer may begin before the end of the request
	w.proxy.ServeHTTP(out, r.WithContext(context.WithValue(ctx, exchangeKey{}, x)))
}

// begin counts a request of HTTP/2: each needs a connection to a Pod, and one connection of a client has many. It reports
// false if there are too many, by the rule of Server.admit. Those of HTTP/1.1 are as many as connections.
func (w *webServer) begin(x *exchange) bool {
	if !x.conn.multiplexed.Load() {
		return true
	}
	s, u := w.server, x.config.usage
	x.usage = u
	if all, own, most := s.requests.Add(1), u.requests.Add(1), int64(s.most); all > most || own > most/2 {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.reject(x.config)
		return false
	}
	return true
}

func exchangeOf(r *http.Request) *exchange { return r.Context().Value(exchangeKey{}).(*exchange) }

// rewrite makes the request for a Pod of a client's one. Its Host stays, and its X-Forwarded-For goes on with
// the client's address at the end, as by AWS's load balancers; the other X-Forwarded fields are our own.
func rewrite(p *httputil.ProxyRequest) {
	x := exchangeOf(p.In)
	out := p.Out
	out.URL.Scheme, out.URL.Host = "http", "pod" // chooser fills it in
	if x.config.backend.IsTLS() {
		out.URL.Scheme = "https"
	}
	out.URL.RawQuery = p.In.URL.RawQuery
	out.Host = p.In.Host
	out.Trailer = p.In.Trailer // filled in at the end of the body
	proto := "http"
	if x.conn.secure {
		proto = "https"
	}
	h := out.Header
	h.Del("X-Real-Ip")
	h.Set("X-Forwarded-For", strings.Join(append(p.In.Header["X-Forwarded-For"], x.conn.client.Addr().String()), ", "))
	h.Set("X-Forwarded-Proto", proto)
	h.Set("X-Forwarded-Port", strconv.Itoa(int(x.conn.at.Port())))
	if u := h.Get("Upgrade"); u != "" && !strings.EqualFold(u, "websocket") {
		h.Del("Upgrade") // h2c would carry requests past this
		h.Del("Connection")
	}
}

// prepare changes a Pod's answer.
func prepare(answer *http.Response) error {
	if answer.ContentLength > 0 {
		// Package httputil passes on at once what has no known length, and holds back the rest; the field stays.
		// With its FlushInterval gRPC's answers without a body could lose their status, which is at their end.
		answer.ContentLength = -1
	}
	// After a request for another protocol that was refused the connection ends: the guard has let pass what
	// came after it.
	if answer.StatusCode != http.StatusSwitchingProtocols && exchangeOf(answer.Request).upgrades {
		answer.Header.Set("Connection", "close")
	}
	return nil
}

// fail answers for a Pod.
func (w *webServer) fail(out http.ResponseWriter, r *http.Request, err error) {
	x := exchangeOf(r)
	var timeout net.Error
	status := http.StatusBadGateway
	switch {
	case x.conn.malformed.Load():
		status = http.StatusBadRequest
	case errors.Is(err, errNoBackends), x.drained.Load():
		status = http.StatusServiceUnavailable
	case errors.As(err, &timeout) && timeout.Timeout():
		status = http.StatusGatewayTimeout
	}
	w.server.log.Debug("a request has failed", "service", x.config.service, "client", x.conn.client, "status", status, "err", err)
	if status == http.StatusBadRequest || x.upgrades {
		out.Header().Set("Connection", "close")
	}
	answer(out, status)
}

// answer writes a status with its text.
func answer(out http.ResponseWriter, status int) {
	text := strconv.Itoa(status) + " " + http.StatusText(status) + "\n"
	out.Header().Set("Content-Type", "text/plain; charset=utf-8")
	out.Header().Set("Content-Length", strconv.Itoa(len(text)))
	out.WriteHeader(status)
	_, _ = io.WriteString(out, text)
}

// bufferPool has the buffers in which bodies are copied.
type bufferPool struct{}

// Get returns a buffer.
func (bufferPool) Get() []byte { return buffers.Get().(*[16 << 10]byte)[:] }

// Put takes one back.
func (bufferPool) Put(b []byte) { buffers.Put((*[16 << 10]byte)(b)) }

// transportOf returns what carries requests to the Pods of a configuration: old's, if that is alike.
func transportOf(c, old *config) *transport {
	k := transportKind{c.backend, c.spec.ProxyProtocol, c.spec.IdleTimeout.Std(), c.pods}
	if old != nil && old.transport != nil {
		if old.transport.kind == k {
			return old.transport
		}
		defer old.transport.CloseIdleConnections()
	}
	t := &transport{kind: k}
	t.Transport = http.Transport{
		DialContext: t.dial, ResponseHeaderTimeout: k.silence, ExpectContinueTimeout: time.Second, DisableCompression: true,
		MaxIdleConnsPerHost: maxIdle, IdleConnTimeout: podIdle, MaxResponseHeaderBytes: maxAnswerHeader, Protocols: new(http.Protocols),
		TLSHandshakeTimeout: dialTimeout, ReadBufferSize: 8 << 10, WriteBufferSize: 8 << 10,
		// The header of the PROXY protocol is of one client: so is the connection then.
		DisableKeepAlives: k.proxy != 0,
		TLSClientConfig:   k.tls.config(),
	}
	t.Protocols.SetHTTP1(t.isHTTP1())
	t.Protocols.SetUnencryptedHTTP2(!t.isHTTP1())
	// A request of HTTP/2 goes on by that if the Pod offers it (ALPN), as gRPC needs.
	t.Protocols.SetHTTP2(k.backend.IsTLS() && k.proxy == 0)
	return t
}

// Connections to a Pod that wait for requests: how many, and how long. Servers should keep theirs for longer.
const (
	maxIdle = 256
	podIdle = 50 * time.Second
)

// transport carries requests to the Pods of a port, on connections that are kept.
type transport struct {
	http.Transport
	kind      transportKind
	upstreams upstreams
}

// isHTTP1 reports whether Pods are spoken to by HTTP/1.1.
func (t *transport) isHTTP1() bool {
	return t.kind.backend != dialect.H2C && t.kind.backend != dialect.GRPC
}

type transportKind struct {
	backend dialect.Protocol
	proxy   int
	silence time.Duration
	tls     podTLS
}

// dialError means that no byte of a request was sent.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

func (t *transport) dial(ctx context.Context, _, pod string) (net.Conn, error) {
	var client, at netip.AddrPort
	if x, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		client, at = x.conn.client, x.conn.at
	}
	return t.open(ctx, pod, client, at)
}

// open connects to a Pod for the client at, and sends the header of the PROXY protocol if it is to have one.
func (t *transport) open(ctx context.Context, pod string, client, at netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	conn, err := d.DialContext(ctx, "tcp", pod)
	if err != nil {
		return nil, &dialError{err}
	}
	if t.kind.proxy != 0 {
		_ = conn.SetWriteDeadline(time.Now().Add(dialTimeout))
		if _, err := conn.Write(header(t.kind.proxy, client, at)); err != nil {
			_ = conn.Close()
			return nil, &dialError{err}
		}
		_ = conn.SetWriteDeadline(time.Time{})
	}
	return conn, nil
}

// chooser sends a request to a Pod, and to another one while no byte of it was sent. What is sent on a kept
// connection that the Pod closes meanwhile is sent again by net/http, if it is idempotent and has no body.
type chooser struct{}

// RoundTrip returns the answer of a Pod.
func (chooser) RoundTrip(r *http.Request) (*http.Response, error) {
	x := exchangeOf(r)
	body := r.Body
	var tried []*member
	var last error
	for range maxDials {
		m, err := x.config.choose(x.conn.client.Addr(), r.Header["Cookie"], tried)
		if err != nil {
			return nil, cmp.Or(last, err)
		}
		if !x.use(m) {
			continue // it has left just now
		}
		to := *r.URL
		to.Host = m.addr.String()
		once := r.WithContext(r.Context())
		once.URL = &to
		if body != nil && body != http.NoBody {
			once.Body = io.NopCloser(body) // closed by the caller, after the last try
		}
		x.pod, x.asked = m.addr, time.Now()
		answer, err := x.config.transport.RoundTrip(once)
		var undialed *dialError
		if err == nil {
			x.podStatus, x.answered = answer.StatusCode, time.Now()
			answer.Request = r
			if c := x.config.keep(m, r.Header["Cookie"], answer.Header["Set-Cookie"], x.conn.secure); c != "" {
				answer.Header.Add("Set-Cookie", c)
			}
			return answer, nil
		}
		if !errors.As(err, &undialed) || r.Context().Err() != nil {
			return nil, err
		}
		x.leave()
		tried, last = append(tried, m), err
	}
	return nil, cmp.Or(last, errNoBackends)
}
