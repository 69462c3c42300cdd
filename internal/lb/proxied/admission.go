package proxied

import (
	"io"
	"sync/atomic"
	"time"
)

// usage is what all listeners of a Service share.
type usage struct {
	bandwidth bandwidth
	active    int // connections, guarded by the Server's openMu
	requests  atomic.Int64
}

// rejectWarning is how often rejected connections are reported at most.
const rejectWarning = time.Minute

// admit counts a connection. It reports false if there are too many: of all Services as many as open files allow, of
// one half of them, so that no Service takes the place of the others.
func (s *Server) admit(conn io.Closer, c *config) bool {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	if limit := c.spec.ConnectionLimit; limit > 0 && c.usage.active >= limit {
		return false
	}
	if len(s.open) >= s.most || c.usage.active >= s.most/2 {
		s.reject(c)
		return false
	}
	s.open[conn] = struct{}{}
	c.usage.active++
	return true
}

// forget takes a connection out of what admit has counted.
func (s *Server) forget(conn io.Closer, c *config) {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	delete(s.open, conn)
	c.usage.active--
}

// reject counts and reports what was rejected. s.openMu is held.
func (s *Server) reject(c *config) {
	s.rejected++
	if now := time.Now(); now.Sub(s.warned) >= rejectWarning {
		s.warned = now
		s.log.Warn("rejected a connection or a request of HTTP/2, since there are too many: raise the limit of open files (LimitNOFILE=)",
			"service", c.service, "connections", c.usage.active, "requests", c.usage.requests.Load(),
			"all", len(s.open), "limit", s.most)
	}
}

// Panics returns how many connections, requests and datagrams were dropped since what served them has panicked.
func (s *Server) Panics() uint64 { return s.panics.count.Load() }

// Rejected returns how many connections and requests were rejected since there were too many.
func (s *Server) Rejected() uint64 {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	return s.rejected
}

// begin counts a request of HTTP/2: each needs a connection to a Pod, and one connection of a client has many. It reports
// false if there are too many, by the rule of Server.admit. Those of HTTP/1.1 are as many as connections.
func (w *webServer) begin(x *exchange) bool {
	if !x.conn.multiplexed.Load() {
		return true
	}
	s, u := w.server, x.config.usage
	x.usage = u
	if all, own, most := s.requests.Add(1), u.requests.Add(1), int64(s.most); all > most || own > most/2 {
		s.openMu.Lock()
		defer s.openMu.Unlock()
		s.reject(x.config)
		return false
	}
	return true
}
