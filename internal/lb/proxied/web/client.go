package web

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// clientConn is a client's connection that has requests.
type clientConn struct {
	net.Conn
	listener   *proxied.Listener
	config     *proxied.Config // as it was accepted with
	client, at netip.AddrPort
	secure     bool
	tls        tls.ConnectionState
	malformed  atomic.Bool // what the client sends
	closed     chan struct{}
	close      func() error // of Conn, once

	began time.Time
	// idleSince is since when a connection of HTTP/1.1 waits for its next request, zero while it does not.
	idleSince time.Time
	last      atomic.Int64 // when something was carried last, since began
	// multiplexed is true of a connection of HTTP/2: there only requests and answers count as carried. carries
	// is how often they were, and taken how many bytes of requests.
	multiplexed    atomic.Bool
	carries, taken atomic.Int64
	engine         *engine
}

func (c *clientConn) log(text string, err error) {
	c.engine.host.Log().Debug(text, "service", c.config.Service, "client", c.client, "err", err)
}

// origin is where its requests come from.
func (c *clientConn) origin() proxied.Origin {
	return proxied.Origin{Client: c.client, At: c.at, Secure: c.secure, ServerName: c.tls.ServerName}
}

type clientConnKey struct{}

// clientConnOf returns the clientConn below what is given to net/http.
func clientConnOf(c net.Conn) *clientConn {
	switch c := c.(type) {
	case *tls.Conn:
		return clientConnOf(c.NetConn())
	case *frames:
		return c.web
	case *guard:
		return c.web
	case *clientConn:
		return c
	}
	return nil
}

// Close closes the connection.
func (c *clientConn) Close() error { return c.close() }

// Read is that of the connection below.
func (c *clientConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.progressed(n)
	return n, err
}

// Write is that of the connection below.
func (c *clientConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.progressed(n)
	return n, err
}

// CloseWrite sends the end.
func (c *clientConn) CloseWrite() error {
	if s, ok := c.Conn.(stream.Conn); ok {
		return s.CloseWrite()
	}
	return nil
}

func (c *clientConn) progressed(n int) {
	if n > 0 && !c.multiplexed.Load() {
		c.last.Store(int64(time.Since(c.began)))
	}
}

// idleFor is for how much longer a connection may wait for its next request.
func (c *clientConn) idleFor() time.Duration {
	return c.config.Spec.IdleTimeout.Std() + c.engine.idleGrace - time.Since(c.idleSince)
}

// endIdle closes the connection when it has carried nothing for that long.
func (c *clientConn) endIdle(limit time.Duration) {
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

// rejects returns the status for a request that no Pod gets by a configuration, 0 for others: a kept connection has
// the rights of a new one.
func (c *clientConn) rejects(now *proxied.Config, method []byte) int {
	switch {
	case now.Service != c.config.Service: // the address has passed on
		return http.StatusMisdirectedRequest
	case !now.Admits(c.client.Addr()):
		return http.StatusForbidden
	case string(method) == "PRI": // the preface of HTTP/2, with fields
		return http.StatusBadRequest
	case string(method) == http.MethodConnect:
		return http.StatusMethodNotAllowed
	}
	return 0
}
