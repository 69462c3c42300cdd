package web

import "net/http"

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
