package proxied

import (
	"context"
	"net"
	"net/netip"
	"time"
)

// engine carries requests of HTTP: the seam between the Server, which accepts and counts connections, and the requests on
// them. The Server starts one with the first listener of HTTP, and calls shutdown once.
type engine interface {
	// configure gives c its transport to Pods: that of old, which may be nil, if nothing differs.
	configure(c, old *config)
	// serve carries the requests of a connection at l until it is closed, or until it waits for its next request: then it
	// returns the connection for park, else nil.
	serve(conn stream, l *listener, c *config, client, at netip.AddrPort) parked
	// park calls then once conn can be read, or with false after p.idleFor. It returns false, and calls nothing, after
	// shutdown.
	park(conn *net.TCPConn, p parked, then func(readable bool)) bool
	// shutdown ends connections without a request, and the others after their request, for which it waits until ctx ends.
	shutdown(ctx context.Context)
}

// parked is a connection that waits for its next request.
type parked interface {
	// idleFor is how much longer it may wait.
	idleFor() time.Duration
	// resume carries its requests as engine.serve does.
	resume() parked
}
