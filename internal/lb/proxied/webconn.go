package proxied

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"
)

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
	// idleSince is since when a connection of HTTP/1.1 waits for its next request, zero while it does not.
	idleSince time.Time
	last      atomic.Int64 // when something was carried last, since began
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
	c.progressed(n)
	return n, err
}

// Write is that of the connection below.
func (c *webConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.progressed(n)
	return n, err
}

// CloseWrite sends the end.
func (c *webConn) CloseWrite() error {
	if s, ok := c.Conn.(stream); ok {
		return s.CloseWrite()
	}
	return nil
}

func (c *webConn) progressed(n int) {
	if n > 0 && !c.multiplexed.Load() {
		c.last.Store(int64(time.Since(c.began)))
	}
}

// idleFor is for how much longer a connection may wait for its next request.
func (c *webConn) idleFor() time.Duration {
	return c.config.spec.IdleTimeout.Std() + c.server.idleGrace - time.Since(c.idleSince)
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
