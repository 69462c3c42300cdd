package dns

import (
	"bufio"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// tcpIdle is how long a connection may be silent (RFC 7766, 6.2.3).
	tcpIdle = 10 * time.Second
	// tcpWrite is the time a client has to take an answer.
	tcpWrite = 5 * time.Second
	// tcpPending bounds the requests of one connection that wait for
	// upstreams.
	tcpPending = 64
	// lengthSize is the length before each message (RFC 1035, 4.2.2).
	lengthSize = 2
	// tcpBuffer holds the requests that are read at once, the longest one at
	// least.
	tcpBuffer = 4096
	// tcpGather is how many bytes of answers are gathered.
	tcpGather = 16 << 10
)

// tcpConn is the connection of a client.
type tcpConn struct {
	net.Conn
	client, server netip.AddrPort
	// used is when it was opened or last had a request or an answer, in
	// nanoseconds since 1970.
	used atomic.Int64
}

func newTCPConn(conn net.Conn) *tcpConn {
	c := &tcpConn{Conn: conn}
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		c.client = clientOf(a.AddrPort())
	}
	if a, ok := conn.LocalAddr().(*net.TCPAddr); ok {
		c.server = clientOf(a.AddrPort())
	}
	c.used.Store(time.Now().UnixNano())
	return c
}

// clientOf returns the address of a client as shares, the query log and flows have it.
func clientOf(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// conns are the open connections: bounded in number, and shared fairly among the
// clients.
type conns struct {
	displaced atomic.Uint64 // closed for another one

	mu     sync.Mutex
	closed bool
	shares shares
	open   map[netip.Addr]map[*tcpConn]struct{}
}

// add keeps a new connection. If its client has its share, its connection that is
// idle for the longest is closed; if there is no place at all for a client without
// any, that of the client with the most. It returns false after closeAll.
func (c *conns) add(conn *tcpConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	client := conn.client.Addr()
	if !c.shares.take(client) {
		from := client
		if c.open[client] == nil {
			from = c.shares.largest()
		}
		idle := c.longestIdle(from)
		c.displaced.Add(1)
		c.drop(idle)
		idle.Close()
		c.shares.add(client)
	}
	if c.open[client] == nil {
		c.open[client] = map[*tcpConn]struct{}{}
	}
	c.open[client][conn] = struct{}{}
	return true
}

func (c *conns) longestIdle(client netip.Addr) (idle *tcpConn) {
	for conn := range c.open[client] {
		if idle == nil || conn.used.Load() < idle.used.Load() {
			idle = conn
		}
	}
	return idle
}

// drop forgets a connection that is in open.
func (c *conns) drop(conn *tcpConn) {
	client := conn.client.Addr()
	c.shares.release(client)
	if delete(c.open[client], conn); len(c.open[client]) == 0 {
		delete(c.open, client)
	}
}

// remove forgets a connection, unless that has happened already.
func (c *conns) remove(conn *tcpConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.open[conn.client.Addr()][conn]; ok {
		c.drop(conn)
	}
}

// len returns the number of connections.
func (c *conns) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shares.used
}

func (c *conns) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, of := range c.open {
		for conn := range of {
			conn.Close()
		}
	}
}

// serveTCP accepts connections until the listener is closed, and returns when
// the last one has ended.
func (s *Server) serveTCP(l net.Listener, stats *workerStats) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		accepted, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of file descriptors: the next one may do better, but not
			// at once.
			s.log.Warn("cannot accept a DNS connection", "err", err)
			if !s.pause(100 * time.Millisecond) {
				return
			}
			continue
		}
		conn := newTCPConn(accepted)
		if !s.conns.add(conn) {
			conn.Close()
			continue
		}
		wg.Go(func() {
			defer conn.Close()
			defer s.conns.remove(conn)
			s.serveConn(conn, stats)
		})
	}
}

// serveConn answers the requests of one connection. Those that wait for an
// upstream do not hold up those behind them (RFC 7766, 6.2.1.1). What came in
// together is answered together: a system call costs more than an answer.
func (s *Server) serveConn(conn *tcpConn, stats *workerStats) {
	w := s.newWorker(false, stats)
	w.client, w.server = conn.client, conn.server
	w.family = family(conn.client.Addr())
	r := bufio.NewReaderSize(conn, tcpBuffer)
	answers := &stream{conn: conn}
	pending := make(chan struct{}, tcpPending)
	defer func() { // wait for the answers on the way
		for range tcpPending {
			pending <- struct{}{}
		}
	}()
	var deadline time.Time
	for {
		if !whole(r) {
			if !answers.flush() {
				return
			}
			deadline = renew(deadline, tcpIdle, conn.SetReadDeadline)
		}
		length, err := r.Peek(lengthSize)
		if err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(length))
		if n > maxRequest {
			return
		}
		in, err := r.Peek(lengthSize + n)
		if err != nil {
			return
		}
		in = in[lengthSize:]
		start := time.Now()
		conn.used.Store(start.UnixNano())
		what := w.answer(in)
		if what == drop {
			w.stats.dropped.Add(1)
			return // not a DNS client
		}
		handed := false
		if what == forward || what == follow {
			pending <- struct{}{}
			handed = w.handOver(in, what, func(out []byte) {
				answers.add(out)
				answers.flush()
				conn.used.Store(time.Now().UnixNano())
				<-pending
			})
			if !handed {
				<-pending
			}
		}
		_, _ = r.Discard(lengthSize + n) // all of it has been seen
		if handed {
			continue
		}
		if !answers.add(w.out) {
			return
		}
		w.finished(n, time.Since(start))
	}
}

// whole reports whether r has a whole request buffered.
func whole(r *bufio.Reader) bool {
	if r.Buffered() < lengthSize {
		return false
	}
	length, err := r.Peek(lengthSize)
	return err == nil && r.Buffered() >= lengthSize+int(binary.BigEndian.Uint16(length))
}

// stream is the answers of one connection, in the order in which they were
// ready.
type stream struct {
	conn net.Conn

	mu       sync.Mutex
	out      []byte // not sent yet
	deadline time.Time
	broken   bool
}

// add puts an answer behind the answers that wait to be sent, which happens at the
// latest when they are more than tcpGather bytes. It is false when no more can
// be sent.
func (t *stream) add(out []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.out) > 0 && len(t.out)+len(out) > tcpGather {
		t.send()
	}
	t.out = binary.BigEndian.AppendUint16(t.out, uint16(len(out)))
	t.out = append(t.out, out...)
	return !t.broken
}

// flush sends what waits. It is false when that cannot be sent.
func (t *stream) flush() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.send()
	return !t.broken
}

func (t *stream) send() {
	if len(t.out) > 0 && !t.broken {
		t.deadline = renew(t.deadline, tcpWrite, t.conn.SetWriteDeadline)
		_, err := t.conn.Write(t.out)
		t.broken = err != nil
	}
	t.out = t.out[:0]
	if cap(t.out) > 2*tcpGather { // after a long answer
		t.out = nil
	}
}

// renew sets a deadline at least limit from now and returns it. One that is at
// most a fifth of limit later than asked is as good, and is kept: setting it costs
// as much as an answer.
func renew(deadline time.Time, limit time.Duration, set func(time.Time) error) time.Time {
	now := time.Now()
	if deadline.Sub(now) >= limit {
		return deadline
	}
	deadline = now.Add(limit + limit/5)
	_ = set(deadline) // fails on a closed connection, as reading and writing will
	return deadline
}
