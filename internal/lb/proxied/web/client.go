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
	malformed  atomic.Bool  // what the client sends
	close      func() error // of Conn, once

	began time.Time
	// idleSince is since when a connection of HTTP/1.1 waits for its next request, zero while it does not.
	idleSince time.Time
	engine    *engine
}

// origin is where its requests come from.
func (c *clientConn) origin() proxied.Origin {
	return proxied.Origin{Client: c.client, At: c.at, Secure: c.secure, ServerName: c.tls.ServerName}
}

// Close closes the connection.
func (c *clientConn) Close() error { return c.close() }

// CloseWrite sends the end.
func (c *clientConn) CloseWrite() error {
	if s, ok := c.Conn.(stream.Conn); ok {
		return s.CloseWrite()
	}
	return nil
}

// idleFor is for how much longer a connection may wait for its next request.
func (c *clientConn) idleFor() time.Duration {
	return c.config.Spec.IdleTimeout.Std() - time.Since(c.idleSince)
}

// rejects returns the status for a request that no Pod gets by a configuration, 0 for others: a kept connection has
// the rights of a new one.
func (c *clientConn) rejects(now *proxied.Config, method []byte) int {
	switch {
	case now.Service != c.config.Service: // the address has passed on
		return http.StatusMisdirectedRequest
	case !now.Verifies(c.config.TLS):
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
