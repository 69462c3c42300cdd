package proxied

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// Engine carries requests of HTTP: the seam between the Server, which accepts and counts connections, and the requests on
// them. The Server starts one with the first listener of HTTP, and calls Shutdown once.
type Engine interface {
	// Configure sets c.Transport: that of old, which may be nil, if nothing differs.
	Configure(c, old *Config)
	// Serve carries the requests of a connection at l until it is closed, or until it waits for its next request: then it
	// returns the connection for Park, else nil. For HTTPS it ends TLS.
	Serve(conn stream.Conn, l *Listener, c *Config, client, at netip.AddrPort) Parked
	// Park calls then once conn can be read, or with false after p.IdleFor. It returns false, and calls nothing, after
	// Shutdown.
	Park(conn *net.TCPConn, p Parked, then func(readable bool)) bool
	// Shutdown ends connections without a request, and the others after their request, for which it waits until ctx ends.
	Shutdown(ctx context.Context)
}

// Parked is a connection that waits for its next request.
type Parked interface {
	// IdleFor is how much longer it may wait.
	IdleFor() time.Duration
	// Resume carries its requests as Engine.Serve does.
	Resume() Parked
}

// Host is what an Engine uses of its Server.
type Host struct{ server *Server }

// Log is for what an Engine reports.
func (h Host) Log() *slog.Logger { return h.server.log }

// Context ends when the Server closes what is left of connections.
func (h Host) Context() context.Context { return h.server.ctx }

// Go calls f on a goroutine that Server.Close waits for.
func (h Host) Go(f func()) { h.server.wg.Go(f) }

// Run calls f as Go does, on a goroutine that has served before if one is idle: for what is short.
func (h Host) Run(f func()) { h.server.workers.run(f) }

// Panics is for goroutines that serve foreign bytes.
func (h Host) Panics() *panics.Counter { return h.server.panics }

// AdmitRequest counts a request of HTTP/2: each needs a connection to a Pod, and one connection of a client has many. It
// reports false if there are too many, by the rule for connections; ForgetRequest undoes it in either case.
func (h Host) AdmitRequest(c *Config) bool { return h.server.admission.admitRequest(c) }

// ForgetRequest takes out what AdmitRequest has counted.
func (h Host) ForgetRequest(c *Config) { h.server.admission.forgetRequest(c) }

// MaxKept bounds the connections to Pods that wait for a request: with one for each connection of a client, and these
// themselves, they are less than the files that may be open.
func (h Host) MaxKept() int { return max(1, h.server.admission.most/2) }

var errNoEngine = errors.New("HTTP cannot be carried: this process has no engine for it")

// startEngine starts the engine of HTTP.
func (s *Server) startEngine() (Engine, error) {
	if s.start == nil {
		return nil, errNoEngine
	}
	return s.start(Host{s})
}
