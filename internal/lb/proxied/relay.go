package proxied

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// stream is a connection of which one direction can be closed.
type stream interface {
	net.Conn
	CloseWrite() error
}

// relay carries bytes both ways until both ends have finished, one fails, or nothing was
// carried for idle; it may be a quarter more. It closes both, and returns how many bytes each was sent.
func relay(a, b stream, idle time.Duration) (toA, toB int64) {
	r := &idleness{limit: idle, began: time.Now()}
	var wg sync.WaitGroup
	half := func(to, from stream, total *int64) {
		if err := r.copy(to, from, total); err != nil {
			_, _ = a.Close(), b.Close()
			return
		}
		if to.CloseWrite() != nil {
			_, _ = a.Close(), b.Close()
		}
	}
	wg.Go(func() { half(a, b, &toA) })
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

var errIdle = errors.New("idle for too long")

// copy carries what from sends to to until from has finished (nil) or something fails, and adds to total how
// many bytes that were.
func (r *idleness) copy(to, from stream, total *int64) error {
	round := max(r.limit/4, 10*time.Millisecond)
	for {
		now := time.Now()
		// What is read is written before the next look at the clock: a writer may be stuck
		// for as long as a connection may be idle.
		if err := errors.Join(from.SetReadDeadline(now.Add(round)), to.SetWriteDeadline(now.Add(r.limit+2*round))); err != nil {
			return err
		}
		n, err := carry(to, from)
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
			return errIdle
		}
	}
}

var buffers = sync.Pool{New: func() any { return new([16 << 10]byte) }}

// carry copies until the end, an error or the deadline. Between two sockets the kernel does it
// (splice).
func carry(to, from stream) (int64, error) {
	if dst, ok := to.(*net.TCPConn); ok {
		if src, ok := from.(*net.TCPConn); ok {
			return dst.ReadFrom(src)
		}
	}
	buf := buffers.Get().(*[16 << 10]byte)
	defer buffers.Put(buf)
	var total int64
	for {
		n, err := from.Read(buf[:])
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
	}
}

// errWrite hides that a write has timed out: only a read is tried again.
var errWrite = errors.New("cannot write")
