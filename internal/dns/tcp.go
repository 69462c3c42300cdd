package dns

import (
	"bufio"
	"encoding/binary"
	"errors"
	"net"
	"sync"
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

// conns are the open connections, to close them at the end.
type conns struct {
	mu   sync.Mutex
	open map[net.Conn]struct{} // nil once closed
}

func (c *conns) add(conn net.Conn, limit int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil || len(c.open) >= limit {
		return false
	}
	c.open[conn] = struct{}{}
	return true
}

func (c *conns) remove(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, conn)
}

func (c *conns) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.open {
		conn.Close()
	}
	c.open = nil
}

// serveTCP accepts connections until the listener is closed, and returns when
// the last one has ended.
func (s *Server) serveTCP(l net.Listener, stats *workerStats) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, err := l.Accept()
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
		if !s.conns.add(conn, s.options.MaxConns) {
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
func (s *Server) serveConn(conn net.Conn, stats *workerStats) {
	w := s.newWorker(false, stats)
	w.family = familyOf(conn.RemoteAddr())
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
		what := w.answer(in)
		if what == drop {
			w.stats.dropped.Add(1)
			return // not a DNS client
		}
		handed := false
		if what == forward || what == follow {
			pending <- struct{}{}
			handed = w.handOver(in, what, func(out []byte) { answers.add(out); answers.flush(); <-pending })
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
		w.count(n, time.Since(start))
		w.log()
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

// add puts an answer behind those that wait to be sent, which happens at the
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
