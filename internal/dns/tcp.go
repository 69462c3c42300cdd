package dns

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
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
// upstream do not hold up those behind them (RFC 7766, 6.2.1.1).
func (s *Server) serveConn(conn net.Conn, stats *workerStats) {
	w := s.newWorker(false, stats)
	w.family = familyOf(conn.RemoteAddr())
	r := bufio.NewReaderSize(conn, 4096)
	in := make([]byte, maxRequest)
	var mu sync.Mutex // of writes
	write := func(out []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		_ = conn.SetWriteDeadline(time.Now().Add(tcpWrite))
		bufs := net.Buffers{{byte(len(out) >> 8), byte(len(out))}, out}
		_, err := bufs.WriteTo(conn)
		return err == nil
	}
	pending := make(chan struct{}, tcpPending)
	defer func() { // wait for the answers on the way
		for range tcpPending {
			pending <- struct{}{}
		}
	}()
	for {
		_ = conn.SetReadDeadline(time.Now().Add(tcpIdle))
		var length [2]byte
		if _, err := io.ReadFull(r, length[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(length[:]))
		if n > maxRequest {
			return
		}
		in = in[:n]
		if _, err := io.ReadFull(r, in); err != nil {
			return
		}
		start := time.Now()
		what := w.answer(in)
		if what == drop {
			w.stats.dropped.Add(1)
			return // nobody who speaks DNS
		}
		if what == forward || what == follow {
			pending <- struct{}{}
			if w.handOver(in, what, func(out []byte) { write(out); <-pending }) {
				continue
			}
			<-pending
		}
		if !write(w.out) {
			return
		}
		w.count(n, time.Since(start))
		w.log()
	}
}
