package http2

import (
	"runtime"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// write writes what waits, until nothing does. Only one goroutine does that at a time.
func (c *Conn) write() {
	runtime.Gosched() // who is about to add something does it first: one system call is for all of it
	c.mu.Lock()
	defer c.mu.Unlock()
	by := time.Time{}
	for len(c.out) > 0 && c.err == nil {
		out := c.out
		c.out, c.spare = c.spare[:0], nil
		c.mu.Unlock()
		var err error
		if now := time.Now(); by.Sub(now) < c.o.WriteTimeout {
			by = now.Add(c.o.WriteTimeout + c.o.WriteTimeout/2)
			err = c.conn.SetWriteDeadline(by)
		}
		if err == nil {
			_, err = c.conn.Write(out)
		}
		c.mu.Lock()
		if c.spare = out[:0]; err != nil && c.err == nil {
			c.err = err
			_ = c.conn.Close()
		}
		c.wakeStalled()
	}
	if c.written != nil {
		close(c.written)
	}
	if c.writing = false; c.err == nil && c.finished() {
		c.err = errLast
		if c.client || c.conn.SetReadDeadline(time.Unix(1, 0)) != nil { // Run sends the end, and lingers
			_ = c.conn.CloseWrite()
			_ = c.conn.Close()
		}
	}
	if len(c.out) == 0 {
		stream.PutBuffer(c.out)
		c.out = nil
	}
	stream.PutBuffer(c.spare)
	c.spare = nil
}
