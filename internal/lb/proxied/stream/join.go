// Package stream carries bytes between connections, and what all that do so share: buffers, and the bandwidth of a Service.
package stream

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/svc"
)

// Conn is a connection of which one direction can be closed.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Join carries bytes both ways until both ends have finished, one fails, or nothing was
// carried for idle; it may be a quarter more. It closes both, and returns how many bytes each was sent. A panic is counted
// by p, for a Service.
func Join(p *panics.Counter, service svc.Name, a, b Conn, idle time.Duration) (toA, toB int64) {
	r := &idleness{limit: idle, began: time.Now()}
	var wg sync.WaitGroup
	half := func(to, from Conn, total *int64) {
		if err := r.copy(to, from, total); err != nil {
			_, _ = a.Close(), b.Close()
			return
		}
		if to.CloseWrite() != nil {
			_, _ = a.Close(), b.Close()
		}
	}
	wg.Go(func() {
		defer p.Recover(service, a, b)
		half(a, b, &toA)
	})
	half(b, a, &toB)
	wg.Wait()
	_, _ = a.Close(), b.Close()
	return toA, toB
}

// idleness is when a connection has carried something last, in either direction.
type idleness struct {
	limit time.Duration
	began time.Time
	last  atomic.Int64 // since began
}

// ErrIdle means that nothing was carried for as long as a connection may be idle.
var ErrIdle = errors.New("idle for too long")

// copy carries what from sends to to until from has finished (nil) or something fails, and adds to total how
// many bytes that were.
func (r *idleness) copy(to, from Conn, total *int64) error {
	round := max(r.limit/4, 10*time.Millisecond)
	var small [smallRead]byte
	for {
		now := time.Now()
		// What is read is written before the next look at the clock: a writer may be stuck
		// for as long as a connection may be idle.
		if err := errors.Join(from.SetReadDeadline(now.Add(round)), to.SetWriteDeadline(now.Add(r.limit+2*round))); err != nil {
			return err
		}
		n, err := copyStream(to, from, small[:])
		if *total += n; n > 0 {
			r.last.Store(int64(time.Since(r.began)))
		}
		if err == nil {
			return nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if time.Since(r.began)-time.Duration(r.last.Load()) >= r.limit {
			return ErrIdle
		}
	}
}

const (
	// smallRead is the buffer of a direction that waits.
	smallRead = 2 << 10
	// splicedAtOnce bounds what the kernel carries before there is another read: while it waits it needs a pipe, which are
	// two more open files.
	splicedAtOnce = 4 << 20
)

// copyStream copies until the end, an error or the deadline. What waits has a small buffer, which it is given; when much
// comes it is a large one, and between two sockets the kernel carries it (splice).
func copyStream(to, from Conn, small []byte) (total int64, err error) {
	dst, plain := to.(*net.TCPConn)
	src, ok := from.(*net.TCPConn)
	plain = plain && ok
	buf := small
	defer func() {
		if len(buf) > len(small) {
			PutBuffer(buf)
		}
	}()
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return total, fmt.Errorf("%w: %s", errWrite, err.Error())
			}
			total += int64(n)
		}
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		switch large := len(buf) > len(small); {
		case large && n < len(small):
			PutBuffer(buf)
			buf = small
		case large && plain && n == len(buf):
			n, err := dst.ReadFrom(&io.LimitedReader{R: src, N: splicedAtOnce})
			if total += n; err != nil || n < splicedAtOnce {
				return total, err
			}
		case !large && n == len(buf):
			buf = GetBuffer()
		}
	}
}

// errWrite hides that a write has timed out: only a read is tried again.
var errWrite = errors.New("cannot write")

// CloseNow closes a connection without the alert that ends TLS: for that crypto/tls waits up to 5 s for a peer that reads
// nothing, and the caller may hold a lock that other Services wait for. A request has ended by its length by then.
func CloseNow(c net.Conn) {
	if t, is := c.(*tls.Conn); is {
		c = t.NetConn()
	}
	_ = c.Close()
}

// HasEnded reports whether the other end of a connection has closed it.
func HasEnded(conn net.Conn) bool {
	for {
		switch t := conn.(type) {
		case *net.TCPConn:
			return socket.Ended(t)
		case *Limited:
			return socket.Ended(t.TCPConn)
		case interface{ Unwrap() Conn }: // what was read of it says nothing about its end
			conn = t.Unwrap()
		default:
			return false
		}
	}
}
