package web

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// wholePreface is how a connection of HTTP/2 begins.
const wholePreface = http2.Preface

// emptyBurst is how many frames that carry nothing a client may send.
const emptyBurst = http2.EmptyBurst

// reference carries requests of HTTP/1.1 by net/http and its ReverseProxy behind a guard, as all requests were carried once:
// what a session does otherwise is seen by comparing both.
type reference struct {
	engine *engine
	server http.Server
	conns  chan net.Conn
	ended  chan struct{}
}

type clientConnKey struct{}

// newReference starts one, which ends with the host.
func newReference(e *engine, host proxied.Host) *reference {
	n := &reference{engine: e, conns: make(chan net.Conn), ended: make(chan struct{})}
	n.server = http.Server{
		Handler: n, ReadHeaderTimeout: e.headerTimeout, MaxHeaderBytes: maxHeader, DisableGeneralOptionsHandler: true,
		BaseContext: func(net.Listener) context.Context { return host.Context() },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, clientConnKey{}, c.(*guard).web)
		},
	}
	host.Go(func() { _ = n.server.Serve(n) })
	host.Go(func() {
		<-host.Context().Done()
		_ = n.server.Close()
	})
	return n
}

// carry has net/http serve a connection to its end.
func (n *reference) carry(web *clientConn, front stream.Conn) {
	closed := make(chan struct{})
	select {
	case n.conns <- &guard{Conn: noted{front, closed, new(sync.Once)}, web: web}:
	case <-n.ended:
		return
	}
	<-closed
}

// noted is a connection of which the end is noted.
type noted struct {
	stream.Conn
	closed chan struct{}
	once   *sync.Once
}

func (c noted) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (n *reference) Accept() (net.Conn, error) {
	select {
	case c := <-n.conns:
		return c, nil
	case <-n.ended:
		return nil, net.ErrClosed
	}
}

func (n *reference) Close() error   { close(n.ended); return nil }
func (n *reference) Addr() net.Addr { return &net.TCPAddr{} }

// ServeHTTP carries one request.
func (n *reference) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	conn := r.Context().Value(clientConnKey{}).(*clientConn)
	c := conn.listener.Config()
	if status := conn.rejects(c, []byte(r.Method)); status > 0 {
		out.Header().Set("Connection", "close")
		answerOf(out, status)
		return
	}
	_, upgrades := r.Header["Upgrade"]
	_ = http.NewResponseController(out).EnableFullDuplex()
	transport := &http.Transport{
		ResponseHeaderTimeout: c.Spec.IdleTimeout.Std(), ExpectContinueTimeout: time.Second, DisableCompression: true, DisableKeepAlives: true,
		MaxResponseHeaderBytes: maxAnswerHeader,
	}
	proxy := httputil.ReverseProxy{Rewrite: n.rewrite(conn, c), Transport: once{transport}, ErrorHandler: n.fail(conn, upgrades),
		ModifyResponse: func(answer *http.Response) error {
			if answer.StatusCode != http.StatusSwitchingProtocols && upgrades {
				answer.Header.Set("Connection", "close")
			}
			if answer.ContentLength > 0 {
				answer.ContentLength = -1
			}
			return nil
		}}
	proxy.ServeHTTP(out, r)
}

// once is a Transport whose Pods see no "Connection: close": it keeps nothing all the same.
type once struct{ *http.Transport }

func (o once) RoundTrip(r *http.Request) (*http.Response, error) {
	o.DisableKeepAlives = false
	o.MaxIdleConnsPerHost = -1
	return o.Transport.RoundTrip(r)
}

// rewrite makes the request for a Pod of a client's one.
func (n *reference) rewrite(conn *clientConn, c *proxied.Config) func(*httputil.ProxyRequest) {
	return func(p *httputil.ProxyRequest) {
		out, h := p.Out, p.Out.Header
		out.URL.Scheme, out.URL.Host = "http", "none"
		if m, err := c.Pool.Pick(conn.client.Addr(), nil); err == nil {
			out.URL.Host = m.Addr().String()
		}
		out.URL.RawQuery, out.Host, out.Trailer = p.In.URL.RawQuery, p.In.Host, p.In.Trailer
		h.Del("X-Real-Ip")
		h.Set("X-Forwarded-For", strings.Join(append(p.In.Header["X-Forwarded-For"], conn.client.Addr().String()), ", "))
		h.Set("X-Forwarded-Proto", "http")
		h.Set("X-Forwarded-Port", strconv.Itoa(int(conn.at.Port())))
		if u := h.Get("Upgrade"); u != "" && !strings.EqualFold(u, "websocket") {
			h.Del("Upgrade")
			h.Del("Connection")
		}
	}
}

// fail answers for a Pod.
func (n *reference) fail(conn *clientConn, upgrades bool) func(http.ResponseWriter, *http.Request, error) {
	return func(out http.ResponseWriter, _ *http.Request, err error) {
		var timeout net.Error
		status := http.StatusBadGateway
		switch {
		case conn.malformed.Load():
			status = http.StatusBadRequest
		case errors.Is(err, pods.ErrNone):
			status = http.StatusServiceUnavailable
		case errors.As(err, &timeout) && timeout.Timeout():
			status = http.StatusGatewayTimeout
		}
		if status == http.StatusBadRequest || upgrades {
			out.Header().Set("Connection", "close")
		}
		answerOf(out, status)
	}
}

// answerOf writes a status with its text.
func answerOf(out http.ResponseWriter, status int) {
	out.Header().Set("Content-Type", "text/plain; charset=utf-8")
	out.Header().Set("Content-Length", strconv.Itoa(len(heads.TextOf(status))))
	out.WriteHeader(status)
	_, _ = io.WriteString(out, heads.TextOf(status))
}
