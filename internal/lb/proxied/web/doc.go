// Package web carries the requests of HTTP on connections that a proxied.Server has accepted: HTTP/1.1 by an engine of
// its own, in session.go, carry.go and wire.go, and HTTP/2 by net/http, which guard.go and frames.go watch.
package web
