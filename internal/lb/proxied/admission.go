package proxied

import (
	"container/list"
	"io"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
)

// usage is what all listeners of a Service share.
type usage struct {
	bandwidth stream.Bandwidth
	requests  atomic.Int64
	traffic   *traffic.Service

	// What follows is guarded by the admission's mu.

	active   int // connections, and sessions of UDP
	sessions sessionQueue
	clients  map[netip.Addr]int // connections of each, where that is bounded

	// rates count the requests of clients, and routes the ones for routes with limits.
	rates  rates
	routes routeRates
	held   heldRequests
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

// admission counts connections, and requests of HTTP/2, and rejects what exceeds the bounds.
type admission struct {
	log      *slog.Logger
	most     int          // connections at a time, and requests of HTTP/2
	requests atomic.Int64 // of HTTP/2

	// mu is held for moments only: threads that carry other connections wait for it.
	mu       sync.Mutex
	open     map[io.Closer]netip.Addr // with the client that it counts for, see enter
	sessions sessionQueue             // of all Services
	rejected uint64
	warned   time.Time // of that, last
}

// rejectWarning is how often rejected connections are reported at most.
const rejectWarning = time.Minute

// admit counts a connection. It reports false if there are too many: of all Services as many as open files allow. One that has half of
// them gets more only while a quarter is free: no Service takes the place of the others, and none is bounded for others that have nothing.
func (a *admission) admit(conn io.Closer, c *Config) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.count(conn, c)
}

// count is admit. The caller holds mu.
func (a *admission) count(conn io.Closer, c *Config) bool {
	if limit := c.Spec.ConnectionLimit; limit > 0 && c.usage.active >= limit && !a.replace(&c.usage.sessions) {
		c.usage.traffic.Rejected(traffic.OverLimit)
		return false
	}
	large := c.usage.active >= a.most/2 && len(a.open) >= a.most-a.most/4
	if large && !a.replace(&c.usage.sessions) || len(a.open) >= a.most && !a.replace(&a.sessions) {
		a.reject(c)
		return false
	}
	a.open[conn] = netip.Addr{}
	c.usage.active++
	c.usage.traffic.Opened()
	return true
}

// admitSession counts a session of UDP, as admit does.
func (a *admission) admitSession(u *udpSession) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.count(u.pod, u.config) {
		return false
	}
	a.enqueue(u)
	return true
}

// requeue makes a session, whose client has sent something, the last one to give way. confirmed is set if that was after
// an answer.
func (a *admission) requeue(u *udpSession, confirmed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, counts := a.open[u.pod]; counts {
		a.dequeue(u)
		u.confirmed = confirmed
		a.enqueue(u)
	}
}

// enqueue adds a session to its queues. The caller holds mu.
func (a *admission) enqueue(u *udpSession) {
	u.inService, u.inServer = u.config.usage.sessions.add(u), a.sessions.add(u)
}

// dequeue undoes enqueue. The caller holds mu.
func (a *admission) dequeue(u *udpSession) {
	u.config.usage.sessions.remove(u.inService)
	a.sessions.remove(u.inServer)
}

// replace ends the first session of a queue, and reports whether there was one. The caller holds mu.
func (a *admission) replace(of *sessionQueue) bool {
	u := of.first()
	if u == nil {
		return false
	}
	a.dequeue(u)
	a.uncount(u.pod, u.config)
	_ = u.pod.Close()
	return true
}

// forgetSession takes out what admitSession has counted.
func (a *admission) forgetSession(u *udpSession) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dequeue(u)
	a.uncount(u.pod, u.config)
}

// forget takes a connection out of what admit has counted.
func (a *admission) forget(conn io.Closer, c *Config) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.uncount(conn, c)
}

// uncount is forget. The caller holds mu.
func (a *admission) uncount(conn io.Closer, c *Config) {
	client, counts := a.open[conn]
	if !counts {
		return
	}
	delete(a.open, conn)
	c.usage.active--
	if client.IsValid() {
		if c.usage.clients[client]--; c.usage.clients[client] == 0 {
			delete(c.usage.clients, client)
		}
	}
}

// enter counts an admitted connection for its client. It reports false if that has too many.
func (a *admission) enter(conn io.Closer, c *Config, client netip.Addr) bool {
	most := c.Spec.Clients.Connections
	if most == 0 {
		return true
	}
	client = clientOf(client)
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.usage.clients[client] >= most {
		c.usage.traffic.Rejected(traffic.ClientLimit)
		return false
	}
	if before, open := a.open[conn]; !open || before.IsValid() {
		return true
	}
	if c.usage.clients == nil {
		c.usage.clients = map[netip.Addr]int{}
	}
	c.usage.clients[client]++
	a.open[conn] = client
	return true
}

// reject counts and reports a rejected connection or request. The caller holds mu.
func (a *admission) reject(c *Config) {
	a.rejected++
	c.usage.traffic.Rejected(traffic.TooMany)
	if now := time.Now(); now.Sub(a.warned) >= rejectWarning {
		a.warned = now
		a.log.Warn("rejected a connection or a request of HTTP/2, since there are too many: raise the limit of open files (LimitNOFILE=)",
			"service", c.Service, "connections", c.usage.active, "requests", c.usage.requests.Load(),
			"all", len(a.open), "limit", a.most)
	}
}

// rejections returns how many connections and requests were rejected.
func (a *admission) rejections() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rejected
}

// busy reports whether connections are open.
func (a *admission) busy() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.open) > 0
}

// closeAll closes all connections.
func (a *admission) closeAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.open {
		_ = c.Close()
	}
}

// admitRequest counts a request of HTTP/2: each needs a connection to a Pod, and one connection of a client has many. It
// reports false if there are too many, by the rule of admit; forgetRequest undoes it in either case.
func (a *admission) admitRequest(c *Config) bool {
	most := int64(a.most)
	all, own := a.requests.Add(1), c.usage.requests.Add(1)
	if all > most || own > most/2 && all > most-most/4 {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.reject(c)
		return false
	}
	return true
}

// forgetRequest takes out what admitRequest has counted.
func (a *admission) forgetRequest(c *Config) {
	c.usage.requests.Add(-1)
	a.requests.Add(-1)
}
