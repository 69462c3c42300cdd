package proxied

import (
	"container/list"
	"io"
	"sync/atomic"
	"time"
)

// usage is what all listeners of a Service share.
type usage struct {
	bandwidth bandwidth
	requests  atomic.Int64

	// What follows is guarded by the Server's openMu.

	active  int       // connections, and sessions of UDP
	oneTime list.List // those sessions that could be of a forged source, the oldest first
}

// rejectWarning is how often rejected connections are reported at most.
const rejectWarning = time.Minute

// admit counts a connection. It reports false if there are too many: of all Services as many as open files allow, of
// one half of them, so that no Service takes the place of the others.
func (s *Server) admit(conn io.Closer, c *config) bool {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	return s.count(conn, c)
}

// count is admit. s.openMu is held.
func (s *Server) count(conn io.Closer, c *config) bool {
	if limit := c.spec.ConnectionLimit; limit > 0 && c.usage.active >= limit && !s.replace(&c.usage.oneTime) {
		return false
	}
	if c.usage.active >= s.most/2 && !s.replace(&c.usage.oneTime) || len(s.open) >= s.most && !s.replace(&s.oneTime) {
		s.reject(c)
		return false
	}
	s.open[conn] = struct{}{}
	c.usage.active++
	return true
}

// mostKept bounds the connections to Pods that wait for a request: with one for each connection of a client, and these
// themselves, they are less than the files that may be open.
func (s *Server) mostKept() int { return max(1, s.most/2) }

// admitSession counts a session of UDP, as admit does. It is the first to go for others until its client has sent something
// after an answer: datagrams of forged sources cost no client its connection.
func (s *Server) admitSession(u *udpSession) bool {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	if !s.count(u.pod, u.config) {
		return false
	}
	u.inService, u.inServer = u.config.usage.oneTime.PushBack(u), s.oneTime.PushBack(u)
	return true
}

// confirm makes a session stay like a connection.
func (s *Server) confirm(u *udpSession) {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	u.config.usage.oneTime.Remove(u.inService)
	s.oneTime.Remove(u.inServer)
}

// replace ends the oldest session of a list, and reports whether there was one. s.openMu is held.
func (s *Server) replace(of *list.List) bool {
	oldest := of.Front()
	if oldest == nil {
		return false
	}
	u := oldest.Value.(*udpSession)
	u.config.usage.oneTime.Remove(u.inService)
	s.oneTime.Remove(u.inServer)
	s.uncount(u.pod, u.config)
	_ = u.pod.Close()
	return true
}

// forget takes a connection out of what admit has counted.
func (s *Server) forget(conn io.Closer, c *config) {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	s.uncount(conn, c)
}

// uncount is forget. s.openMu is held.
func (s *Server) uncount(conn io.Closer, c *config) {
	if _, counts := s.open[conn]; counts {
		delete(s.open, conn)
		c.usage.active--
	}
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
