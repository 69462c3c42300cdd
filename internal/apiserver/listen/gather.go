package listen

import (
	"net"
	"runtime"
	"sync"
	"time"
)

const (
	// gatherLimit is how much of a connection's writes is gathered, in bytes. More waits, so
	// that a client that does not read is noticed.
	gatherLimit = 64 << 10
	// closeLimit is how long a connection that is closed has for what is gathered, of which the
	// rest is cut off then: the client sees the end without TLS's close_notify.
	closeLimit = 30 * time.Second
)

// gatherer is a connection with its own goroutine for writes, which first lets others run: a change is an
// event for many watches, and the events of watches on one connection go out in one system call.
// A write reports the error of an earlier one.
type gatherer struct {
	net.Conn

	mu       sync.Mutex
	changed  sync.Cond // of all below; with mu
	pending  *[]byte   // nil while there is nothing
	sending  bool      // a goroutine sends
	err      error     // of sending
	deadline time.Time // for writes
}

// gathered returns a connection that gathers its writes to conn.
func gathered(conn net.Conn) *gatherer {
	g := &gatherer{Conn: conn}
	g.changed.L = &g.mu
	return g
}

// gatherBuffers are kept by no connection, as most are idle.
var gatherBuffers = sync.Pool{New: func() any { return new([]byte) }} //nolint:gochecknoglobals // a pool

// Write has p sent.
func (g *gatherer) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.err == nil && g.pending != nil && len(*g.pending)+len(p) > gatherLimit {
		g.changed.Wait()
	}
	if g.err != nil {
		return 0, g.err
	}
	if g.pending == nil {
		g.pending = gatherBuffers.Get().(*[]byte)
	}
	*g.pending = append(*g.pending, p...)
	if !g.sending {
		g.sending = true
		go g.send()
	}
	return len(p), nil
}

// send sends what is gathered until there is nothing more.
func (g *gatherer) send() {
	runtime.Gosched()
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.pending != nil && g.err == nil {
		buf := g.pending
		g.pending = nil
		g.changed.Broadcast()
		g.mu.Unlock()
		_, err := g.Conn.Write(*buf)
		*buf = (*buf)[:0]
		gatherBuffers.Put(buf)
		g.mu.Lock()
		g.err = err
	}
	g.sending = false
	g.changed.Broadcast()
}

// drain waits until everything is sent, or cannot be. The caller holds g.mu.
func (g *gatherer) drain() {
	for g.sending {
		g.changed.Wait()
	}
}

// SetDeadline sets the deadline of reads and writes.
func (g *gatherer) SetDeadline(t time.Time) error {
	if err := g.SetReadDeadline(t); err != nil {
		return err
	}
	return g.SetWriteDeadline(t)
}

// SetWriteDeadline sets the deadline of writes, also of gathered ones. One that
// is over ends them at once, unless they have time by the deadline before: crypto/tls gives
// its last message five seconds, and sets another when it is written.
func (g *gatherer) SetWriteDeadline(t time.Time) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := time.Now(); !t.IsZero() && !t.After(now) && g.deadline.After(now) {
		g.drain()
	}
	g.deadline = t
	return g.Conn.SetWriteDeadline(t)
}

// Close closes the connection when everything is sent.
func (g *gatherer) Close() error {
	g.mu.Lock()
	if g.sending {
		_ = g.Conn.SetWriteDeadline(time.Now().Add(closeLimit)) // fails if it is closed, as does what it would bound
		g.drain()
	}
	g.mu.Unlock()
	return g.Conn.Close()
}
