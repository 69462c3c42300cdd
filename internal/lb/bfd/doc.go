// Package bfd notices within a second or less that a router is not reached any more: Bidirectional Forwarding Detection
// (RFC 5880) in asynchronous mode, over one hop (RFC 5881) or several (RFC 5883), without the echo function and without
// authentication. What is decided is in machine, which has no clock and no socket.
package bfd
