package web

import (
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
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// Bounds of what a client may send before a Pod is involved.
const (
	// maxHeader bounds the request line and the fields: more is 431.
	maxHeader = 64 << 10
	// maxStreams is how many requests a connection of HTTP/2 may have at a time.
	maxStreams = 250
	// maxAnswerHeader bounds the fields of a Pod's answer: more is 502.
	maxAnswerHeader = 256 << 10
)

// bounds are how long an engine waits.
type bounds struct {
	// headerTimeout is how long the head of a request may take, from the first byte.
	headerTimeout time.Duration
	// idleGrace is how much longer than a Pod may be silent the client's connection stays, for the answer 504.
	idleGrace time.Duration
}

// The bounds, unless a test wants others.
const (
	headerTimeout = 20 * time.Second
	idleGrace     = 5 * time.Second
)

// engine is a proxied.Engine. A session carries requests of HTTP/1.1 for Pods of HTTP/1.1; net/http, behind a guard,
// carries requests of HTTP/2, of clients or for Pods.
type engine struct {
	host proxied.Host
	bounds
	http  http.Server
	proxy httputil.ReverseProxy
	conns chan net.Conn
	ended chan struct{}

	sessions sessions
	kept     keptConns      // to Pods, of all transports
	waiter   *socket.Waiter // for the next requests
	// onlyNetHTTP has net/http carry requests of HTTP/1.1, too: for tests, which compare both.
	onlyNetHTTP bool
	end         func() // closes ended
}

// Start returns an engine that runs: an option of proxied.New.
func Start(host proxied.Host) (proxied.Engine, error) {
	return start(host, bounds{headerTimeout: headerTimeout, idleGrace: idleGrace})
}

func start(host proxied.Host, b bounds) (*engine, error) {
	e, err := newEngine(host, b)
	if err != nil {
		return nil, err
	}
	host.Go(func() { _ = e.http.Serve(e) })
	host.Go(func() {
		if err := e.waiter.Run(); err != nil {
			host.Log().Error("cannot wait for requests on kept connections", "err", err)
		}
	})
	return e, nil
}

func newEngine(host proxied.Host, b bounds) (*engine, error) {
	waiter, err := socket.NewWaiter()
	if err != nil {
		return nil, err
	}
	e := &engine{host: host, bounds: b, conns: make(chan net.Conn), ended: make(chan struct{}), waiter: waiter}
	e.end = sync.OnceFunc(func() { close(e.ended) })
	quiet := slog.NewLogLogger(host.Log().Handler(), slog.LevelDebug)
	e.proxy = httputil.ReverseProxy{
		Rewrite: rewrite, Transport: chooser{}, ErrorLog: quiet, BufferPool: bufferPool{},
		ModifyResponse: prepare, ErrorHandler: e.fail,
	}
	e.http = http.Server{
		Handler: e, ReadHeaderTimeout: b.headerTimeout, MaxHeaderBytes: maxHeader, ErrorLog: quiet, Protocols: new(http.Protocols),
		DisableGeneralOptionsHandler: true, // it would keep a connection that asks for another protocol
		HTTP2:                        &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		BaseContext:                  func(net.Listener) context.Context { return host.Context() },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, clientConnKey{}, clientConnOf(c))
		},
	}
	e.http.Protocols.SetHTTP1(true)
	e.http.Protocols.SetHTTP2(true)
	e.http.Protocols.SetUnencryptedHTTP2(true)
	return e, nil
}

// Serve carries the requests of a connection as carry does. For HTTPS it ends TLS first.
func (e *engine) Serve(conn stream.Conn, l *proxied.Listener, c *proxied.Config, client, at netip.AddrPort) proxied.Parked {
	web := &clientConn{Conn: conn, listener: l, config: c, client: client, at: at, closed: make(chan struct{}), began: time.Now(),
		engine: e}
	web.close = sync.OnceValue(func() error { defer close(web.closed); return conn.Close() })
	var front stream.Conn = conn
	if c.TLS != nil {
		web.secure = true
		t := tls.Server(web, c.TLS)
		if err := t.HandshakeContext(e.host.Context()); err != nil {
			e.host.Log().Debug("no TLS with a client", "service", c.Service, "client", client, "err", err)
			return nil
		}
		front, web.tls = t, t.ConnectionState()
		if web.tls.NegotiatedProtocol == proxied.ACMEProtocol { // an authority has seen what it wanted
			return nil
		}
	}
	_ = conn.SetDeadline(time.Time{})
	return e.carry(web, front)
}

// parkedConn is a connection of HTTP/1.1 that waits for its next request.
type parkedConn struct {
	engine *engine
	web    *clientConn
	front  stream.Conn
}

// IdleFor is how much longer it may wait.
func (p *parkedConn) IdleFor() time.Duration { return p.web.idleFor() }

// Resume carries its requests.
func (p *parkedConn) Resume() proxied.Parked { return p.engine.carry(p.web, p.front) }

// Park waits for the next request.
func (e *engine) Park(conn *net.TCPConn, p proxied.Parked, then func(readable bool)) bool {
	return e.waiter.Wait(conn, p.IdleFor(), then)
}

// carry carries the requests of a connection until it is closed, or must be parked.
func (e *engine) carry(web *clientConn, front stream.Conn) proxied.Parked {
	waits := false
	defer func() {
		if !waits {
			_ = web.Close()
		}
	}()
	multiplexed := web.tls.NegotiatedProtocol == "h2"
	if !multiplexed {
		p := &parkedConn{e, web, front}
		if front, waits = e.carryHTTP1(web, front); waits {
			return p
		} else if front == nil {
			return nil
		}
		web.progressed(1) // since then it counts
		if !web.secure {
			front = &readAhead{Conn: web, text: front.(*readAhead).text}
		}
		front = &guard{Conn: front, web: web}
	}
	front = &frames{Conn: front, web: web, must: multiplexed, timeout: e.headerTimeout}
	select {
	case e.conns <- front:
	case <-e.ended:
		return nil
	}
	web.endIdle(web.config.Spec.IdleTimeout.Std() + e.idleGrace)
	return nil
}

// Shutdown ends connections without a request, and the others after their request.
func (e *engine) Shutdown(ctx context.Context) {
	e.sessions.end()
	if err := e.waiter.Close(); err != nil {
		e.host.Log().Warn("cannot end the wait for requests", "err", err)
	}
	_ = e.http.Shutdown(ctx)
}

// Accept, Close and Addr make e the net.Listener of its http.Server.
func (e *engine) Accept() (net.Conn, error) {
	select {
	case c := <-e.conns:
		return c, nil
	case <-e.ended:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (e *engine) Close() error { e.end(); return nil }

// Addr is nowhere.
func (e *engine) Addr() net.Addr { return &net.TCPAddr{} }

// begin counts a request of HTTP/2, as Host.AdmitRequest does. It reports false if there are too many. Requests of
// HTTP/1.1 are as many as connections.
func (e *engine) begin(x *exchange) bool {
	if !x.conn.multiplexed.Load() {
		return true
	}
	x.counted = x.config
	return e.host.AdmitRequest(x.config)
}

// ServeHTTP carries one request.
func (e *engine) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	conn, ok := r.Context().Value(clientConnKey{}).(*clientConn)
	if !ok {
		panic(http.ErrAbortHandler)
	}
	c := conn.listener.Config()
	defer e.host.Panics().Abort(c.Service)
	kept := c
	status := conn.rejects(c, []byte(r.Method))
	if status == http.StatusMisdirectedRequest { // the line is for the Service that had the address
		kept = conn.config
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	x := &exchange{conn: conn, config: kept, to: kept, client: r.Context(), cancel: cancel, began: time.Now()}
	defer x.end()
	if multiplexed := r.ProtoMajor == 2; multiplexed || kept.Logs() {
		counts := &counter{ResponseWriter: out, exchange: x}
		if r.Body != nil && r.Body != http.NoBody {
			r.Body = countedBody{r.Body, x}
		}
		if multiplexed {
			x.touch()
			defer x.endIdle(out)()
		}
		out = counts
		if kept.Logs() {
			defer func() { x.record(lineOf(r), counts.status, counts.sent) }()
		}
	}
	if status == 0 && !e.begin(x) {
		status = http.StatusServiceUnavailable
	}
	if status > 0 {
		if status != http.StatusServiceUnavailable { // other requests of the connection go on
			out.Header().Set("Connection", "close")
		}
		answer(out, status)
		return
	}
	if !c.Protocol.IsHTTP() { // the listener carries bytes by now
		x.config, x.to = conn.config, conn.config
	}
	// An empty field counts, too: the guard lets pass what follows it.
	_, x.upgrades = r.Header["Upgrade"]
	if r.ProtoMajor == 1 && !x.upgrades && conn.listener.Gone() {
		out.Header().Set("Connection", "close")
	}
	_ = http.NewResponseController(out).EnableFullDuplex() // HTTP/1.1: an answer may begin before the end of the request
	e.proxy.ServeHTTP(out, r.WithContext(context.WithValue(ctx, exchangeKey{}, x)))
}

// rewrite makes the request for a Pod of a client's one. Its Host stays, and its X-Forwarded-For goes on with
// the client's address at the end, as by AWS's load balancers; the other X-Forwarded fields are our own.
func rewrite(p *httputil.ProxyRequest) {
	x := exchangeOf(p.In)
	out := p.Out
	out.URL.Scheme, out.URL.Host = "http", "pod" // chooser fills it in
	if x.config.Backend.IsTLS() {
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
func (e *engine) fail(out http.ResponseWriter, r *http.Request, err error) {
	x := exchangeOf(r)
	var timeout net.Error
	status := http.StatusBadGateway
	switch {
	case x.conn.malformed.Load():
		status = http.StatusBadRequest
	case errors.Is(err, pods.ErrNone), x.drained.Load():
		status = http.StatusServiceUnavailable
	case errors.As(err, &timeout) && timeout.Timeout():
		status = http.StatusGatewayTimeout
	}
	e.host.Log().Debug("a request has failed", "service", x.config.Service, "client", x.conn.client, "status", status, "err", err)
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
func (bufferPool) Get() []byte { return stream.GetBuffer() }

// Put takes one back.
func (bufferPool) Put(b []byte) { stream.PutBuffer(b) }
