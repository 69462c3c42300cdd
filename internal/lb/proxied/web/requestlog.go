package web

import (
	"io"
	"net/http"
)

// kind returns what an Application Load Balancer calls a request that had a status.
func (l requestLine) kind(secure bool, status int) string {
	switch {
	case status == http.StatusSwitchingProtocols && secure:
		return "wss"
	case status == http.StatusSwitchingProtocols:
		return "ws"
	case secure && l.proto == "HTTP/2.0" && l.grpc:
		return "grpcs"
	case l.proto == "HTTP/2.0": // also without TLS, which an Application Load Balancer does not have
		return "h2"
	case secure:
		return "https"
	}
	return "http"
}

// counter counts the bytes to a client, and keeps the status.
type counter struct {
	http.ResponseWriter
	exchange *exchange
	status   int
	sent     int64
}

// WriteHeader passes on a status; the last one counts.
func (c *counter) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
	c.exchange.progressed(1)
}

// Write passes on a part of the body.
func (c *counter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.sent += int64(n)
	c.exchange.progressed(n)
	return n, err
}

// Unwrap is for http.ResponseController.
func (c *counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// countedBody counts the bytes of a request's body.
type countedBody struct {
	io.ReadCloser
	exchange *exchange
}

// Read reads from the body.
func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.exchange.received.Add(int64(n))
	b.exchange.conn.taken.Add(int64(n))
	b.exchange.progressed(n)
	return n, err
}
