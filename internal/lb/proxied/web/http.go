package web

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/muxes"
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

// bounds are how long an engine waits, and what it keeps.
type bounds struct {
	// headerTimeout is how long the head of a request may take, from the first byte.
	headerTimeout time.Duration
	// idleGrace is how much longer than a Pod may be silent the client's connection stays, for the answer 504.
	idleGrace time.Duration
	// mirrorTime and mirrorMemory are of copies of requests.
	mirrorTime   time.Duration
	mirrorMemory int64
	// askTime is how long an authorization server has for its answer, and a client before that for a body that the server gets.
	askTime time.Duration
}

// The bounds, unless a test wants others.
const (
	headerTimeout = 20 * time.Second
	idleGrace     = 5 * time.Second
)

func defaultBounds() bounds {
	return bounds{headerTimeout, idleGrace, mirrorTime, mirrorMemory, askTime}
}

// engine is a proxied.Engine. A session carries the requests of a connection of HTTP/1.1 one after the other, and a muxed
// each one of HTTP/2; both are exchanges.
type engine struct {
	host proxied.Host
	bounds

	sessions sessions
	clients  muxes.Clients
	kept     keptConns // to Pods, of all transports
	mirrors  mirrorUse
	asks     budget.Warning // of authorization servers
	repeats  atomic.Int64   // bytes of bodies that are kept to be sent again
	waiter   *socket.Waiter // for the next requests
	// onlyNetHTTP has netHTTP carry all requests: a test compares both.
	onlyNetHTTP bool
	netHTTP     func(*clientConn, stream.Conn)
}

// Start returns an engine that runs: an option of proxied.New.
func Start(host proxied.Host) (proxied.Engine, error) {
	return start(host, defaultBounds())
}

func start(host proxied.Host, b bounds) (*engine, error) {
	waiter, err := socket.NewWaiter()
	if err != nil {
		return nil, err
	}
	e := &engine{host: host, bounds: b, waiter: waiter}
	host.Go(func() {
		if err := e.waiter.Run(); err != nil {
			host.Log().Error("cannot wait for requests on kept connections", "err", err)
		}
	})
	return e, nil
}

// Serve carries the requests of a connection as carry does. For HTTPS it ends TLS first.
func (e *engine) Serve(conn stream.Conn, l *proxied.Listener, c *proxied.Config, client, at netip.AddrPort) proxied.Parked {
	web := &clientConn{Conn: conn, listener: l, config: c, client: client, at: at, began: time.Now(), engine: e}
	web.close = sync.OnceValue(conn.Close)
	var front stream.Conn = conn
	if c.TLS != nil {
		web.secure = true
		t := tls.Server(web, c.TLS)
		if err := t.HandshakeContext(e.host.Context()); err != nil {
			c.NoTLS(err)
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
	var text []byte
	if web.tls.NegotiatedProtocol != "h2" {
		p := &parkedConn{e, web, front}
		var rest *readAhead
		if rest, waits = e.carryHTTP1(web, front); waits {
			return p
		} else if rest == nil {
			return nil
		}
		if e.onlyNetHTTP {
			e.netHTTP(web, rest)
			return nil
		}
		text = rest.text
	}
	e.carryHTTP2(web, front, text)
	return nil
}

// Shutdown ends connections without a request, and the others after their request.
func (e *engine) Shutdown(context.Context) {
	e.sessions.end()
	e.clients.End()
	if err := e.waiter.Close(); err != nil {
		e.host.Log().Warn("cannot end the wait for requests", "err", err)
	}
}
