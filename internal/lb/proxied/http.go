package proxied

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

// webServer carries requests of HTTP: the seam between an accepted connection and a configuration, as TCP has
// it in serve, and whatever reads requests. A session carries requests of HTTP/1.1 for
// Pods of HTTP/1.1; net/http, behind a guard, carries requests of HTTP/2, of clients or for Pods.
type webServer struct {
	server *Server
	http   http.Server
	proxy  httputil.ReverseProxy
	conns  chan net.Conn
	ended  chan struct{}

	sessions sessions
	kept     keptConns      // to Pods, of all transports
	waiter   *socket.Waiter // for the next requests
	// onlyNetHTTP has net/http carry requests of HTTP/1.1, too: for tests, which compare both.
	onlyNetHTTP bool
	end         func() // closes ended
}

// startWebServer returns an engine that runs.
func startWebServer(s *Server) (*webServer, error) {
	w, err := newWebServer(s)
	if err != nil {
		return nil, err
	}
	s.wg.Go(func() { _ = w.http.Serve(w) })
	s.wg.Go(func() {
		if err := w.waiter.Run(); err != nil {
			s.log.Error("cannot wait for requests on kept connections", "err", err)
		}
	})
	return w, nil
}

func newWebServer(s *Server) (*webServer, error) {
	waiter, err := socket.NewWaiter()
	if err != nil {
		return nil, err
	}
	w := &webServer{server: s, conns: make(chan net.Conn), ended: make(chan struct{}), waiter: waiter}
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
	return w, nil
}

// serve carries the requests of a connection as carry does. For HTTPS it ends TLS first.
func (w *webServer) serve(conn stream, l *listener, c *config, client, at netip.AddrPort) parked {
	web := &webConn{Conn: conn, listener: l, config: c, client: client, at: at, closed: make(chan struct{}), began: time.Now(),
		server: w.server}
	web.close = sync.OnceValue(func() error { defer close(web.closed); return conn.Close() })
	var front stream = conn
	if c.tls != nil {
		web.secure = true
		t := tls.Server(web, c.tls)
		if err := t.HandshakeContext(w.server.ctx); err != nil {
			w.server.log.Debug("no TLS with a client", "service", c.service, "client", client, "err", err)
			return nil
		}
		front, web.tls = t, t.ConnectionState()
		if web.tls.NegotiatedProtocol == acmeProtocol { // an authority has seen what it wanted
			return nil
		}
	}
	_ = conn.SetDeadline(time.Time{})
	return w.carry(web, front)
}

// parkedConn is a connection of HTTP/1.1 that waits for its next request.
type parkedConn struct {
	server *webServer
	web    *webConn
	front  stream
}

func (p *parkedConn) idleFor() time.Duration { return p.web.idleFor() }
func (p *parkedConn) resume() parked         { return p.server.carry(p.web, p.front) }

func (w *webServer) park(conn *net.TCPConn, p parked, then func(readable bool)) bool {
	return w.waiter.Wait(conn, p.idleFor(), then)
}

// carry carries the requests of a connection until it is closed, or must be parked.
func (w *webServer) carry(web *webConn, front stream) parked {
	waits := false
	defer func() {
		if !waits {
			_ = web.Close()
		}
	}()
	multiplexed := web.tls.NegotiatedProtocol == "h2"
	if !multiplexed {
		p := &parkedConn{w, web, front}
		if front, waits = w.carryHTTP1(web, front); waits {
			return p
		} else if front == nil {
			return nil
		}
		web.progressed(1) // since then it counts
		if !web.secure {
			front = &readAhead{stream: web, text: front.(*readAhead).text}
		}
		front = &guard{Conn: front, web: web}
	}
	front = &frames{Conn: front, web: web, must: multiplexed, timeout: w.server.headerTimeout}
	select {
	case w.conns <- front:
	case <-w.ended:
		return nil
	}
	web.endIdle(web.config.spec.IdleTimeout.Std() + w.server.idleGrace)
	return nil
}

// shutdown ends connections without a request, and the others after their request.
func (w *webServer) shutdown(ctx context.Context) {
	w.sessions.end()
	if err := w.waiter.Close(); err != nil {
		w.server.log.Warn("cannot end the wait for requests", "err", err)
	}
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

// begin counts a request of HTTP/2, as Server.admitRequest does. It reports false if there are too many. Requests of
// HTTP/1.1 are as many as connections.
func (w *webServer) begin(x *exchange) bool {
	if !x.conn.multiplexed.Load() {
		return true
	}
	x.counted = x.config
	return w.server.admitRequest(x.config)
}

// ServeHTTP carries one request.
func (w *webServer) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	conn, ok := r.Context().Value(webConnKey{}).(*webConn)
	if !ok {
		panic(http.ErrAbortHandler)
	}
	c := conn.listener.config.Load()
	defer w.server.panics.abort(c.service)
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
func (bufferPool) Get() []byte { return getBuffer() }

// Put takes one back.
func (bufferPool) Put(b []byte) { putBuffer(b) }
