// Package http2 speaks HTTP/2 (RFC 9113) at either end of a connection: frames, flow control, and the bounds of what a peer
// may send. Heads of messages are from package http1. It knows no Services and no Pods.
package http2
