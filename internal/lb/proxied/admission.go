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

	active   int // connections, and sessions of UDP
	sessions sessionQueue
}

// sessionQueue is sessions of UDP in the order in which they give way: first sessions whose client has sent nothing after
// an answer, then the others, and of each the one that was silent for longest. A source may be forged, and so may be what it
// sends after an answer: a session never keeps out a connection, nor another client.
type sessionQueue struct{ unconfirmed, confirmed list.List }

func (q *sessionQueue) add(u *udpSession) *list.Element {
	if u.confirmed {
		return q.confirmed.PushBack(u)
	}
	return q.unconfirmed.PushBack(u)
}

// remove takes an element out, if it is in the queue.
func (q *sessionQueue) remove(e *list.Element) {
	q.unconfirmed.Remove(e)
	q.confirmed.Remove(e)
}

// first returns the session that gives way first, nil if there is none.
func (q *sessionQueue) first() *udpSession {
	for _, l := range []*list.List{&q.unconfirmed, &q.confirmed} {
		if e := l.Front(); e != nil {
			return e.Value.(*udpSession)
		}
	}
	return nil
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

// count is admit. The caller holds openMu.
func (s *Server) count(conn io.Closer, c *config) bool {
	if limit := c.spec.ConnectionLimit; limit > 0 && c.usage.active >= limit && !s.replace(&c.usage.sessions) {
		return false
	}
	if c.usage.active >= s.most/2 && !s.replace(&c.usage.sessions) || len(s.open) >= s.most && !s.replace(&s.sessions) {
		s.reject(c)
		return false
	}
	s.open[conn] = struct{}{}
	c.usage.active++
	return true
}

// mostKept bounds the connections to Pods that wait for a request of HTTP/1.1: with one for each connection of a client, and
// these themselves, they are less than the files that may be open. It is one bound for all of keptConns; the requests of
// clients that speak HTTP/2 are net/http's, where it bounds each port of a Service by itself.
func (s *Server) mostKept() int { return max(1, s.most/2) }

// admitSession counts a session of UDP, as admit does.
func (s *Server) admitSession(u *udpSession) bool {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	if !s.count(u.pod, u.config) {
		return false
	}
	s.enqueue(u)
	return true
}

// requeue makes a session, whose client has sent something, the last one to give way. confirmed is set if that was after
// an answer.
func (s *Server) requeue(u *udpSession, confirmed bool) {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	if _, counts := s.open[u.pod]; counts {
		s.dequeue(u)
		u.confirmed = confirmed
		s.enqueue(u)
	}
}

// enqueue adds a session to its queues. The caller holds openMu.
func (s *Server) enqueue(u *udpSession) {
	u.inService, u.inServer = u.config.usage.sessions.add(u), s.sessions.add(u)
}

// dequeue undoes enqueue. The caller holds openMu.
func (s *Server) dequeue(u *udpSession) {
	u.config.usage.sessions.remove(u.inService)
	s.sessions.remove(u.inServer)
}

// replace ends the first session of a queue, and reports whether there was one. The caller holds openMu.
func (s *Server) replace(of *sessionQueue) bool {
	u := of.first()
	if u == nil {
		return false
	}
	s.dequeue(u)
	s.uncount(u.pod, u.config)
	_ = u.pod.Close()
	return true
}

// forgetSession takes out what admitSession has counted.
func (s *Server) forgetSession(u *udpSession) {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	s.dequeue(u)
	s.uncount(u.pod, u.config)
}

// forget takes a connection out of what admit has counted.
func (s *Server) forget(conn io.Closer, c *config) {
	s.openMu.Lock()
	defer s.openMu.Unlock()
	s.uncount(conn, c)
}

// uncount is forget. The caller holds openMu.
func (s *Server) uncount(conn io.Closer, c *config) {
	if _, counts := s.open[conn]; counts {
		delete(s.open, conn)
		c.usage.active--
	}
}

// reject counts and reports a rejected connection or request. The caller holds openMu.
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

// admitRequest counts a request of HTTP/2: each needs a connection to a Pod, and one connection of a client has many. It
// reports false if there are too many, by the rule of admit; forgetRequest undoes it in either case.
func (s *Server) admitRequest(c *config) bool {
	most := int64(s.most)
	all, own := s.requests.Add(1), c.usage.requests.Add(1)
	if all > most || own > most/2 {
		s.openMu.Lock()
		defer s.openMu.Unlock()
		s.reject(c)
		return false
	}
	return true
}

// forgetRequest takes out what admitRequest has counted.
func (s *Server) forgetRequest(c *config) {
	c.usage.requests.Add(-1)
	s.requests.Add(-1)
}
