package web

import (
	"errors"
	"net"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// wire is a connection of HTTP/1.1 with a read buffer and a write buffer. One goroutine reads and one
// writes at a time.
type wire struct {
	conn stream.Conn
	tcp  *net.TCPConn // conn, if that is one whose bytes the kernel can carry

	in         []byte // from r to w, not taken yet; nil while there is nothing
	smallFirst bool   // a head is read into a small buffer: very many connections may wait for one
	r, w       int
	out        []byte

	written         bool      // something was, since that was set to false
	readBy, writeBy time.Time // the deadlines of conn
}

func newWire(conn stream.Conn) wire {
	tcp, _ := conn.(*net.TCPConn)
	return wire{conn: conn, tcp: tcp}
}

// buffered returns the bytes that were read and not taken yet.
func (c *wire) buffered() []byte { return c.in[c.r:c.w] }

// take takes n bytes of buffered, which are valid until the next fill.
func (c *wire) take(n int) { c.r += n }

// release gives the buffers back, if nothing is in them.
func (c *wire) release() {
	c.releaseIn()
	c.releaseOut()
}

func (c *wire) releaseIn() {
	if c.r == c.w && c.in != nil {
		stream.PutBuffer(c.in)
		c.in, c.r, c.w = nil, 0, 0
	}
}

func (c *wire) releaseOut() {
	if len(c.out) == 0 && c.out != nil {
		stream.PutBuffer(c.out)
		c.out = nil
	}
}

// errFull means that a head is larger than may be.
var errFull = errors.New("head too large")

// fill reads more, which takes at least as long as timeout before it fails with os.ErrDeadlineExceeded. Of a head
// there are at most limit bytes; for a body that is 0, as it is taken bit by bit.
func (c *wire) fill(timeout time.Duration, limit int) error {
	if c.r == c.w {
		c.r, c.w = 0, 0
		if c.in != nil && limit == 0 && len(c.in) < 16<<10 {
			c.releaseIn() // not out, which may belong to another goroutine
		}
	}
	switch {
	case c.in == nil && c.smallFirst && limit > 0:
		c.in = stream.GetSmallBuffer()
	case c.in == nil:
		c.in = stream.GetBuffer()
	case c.w == len(c.in) && c.r > 0:
		c.w = copy(c.in, c.in[c.r:c.w])
		c.r = 0
	}
	if c.w == len(c.in) {
		if c.w >= limit {
			return errFull
		}
		larger := stream.GetBuffer()
		if len(c.in) >= len(larger) {
			larger = make([]byte, min(4*len(c.in), limit))
		}
		copy(larger, c.in)
		stream.PutBuffer(c.in)
		c.in = larger
	}
	if now := time.Now(); c.readBy.Sub(now) < timeout {
		c.readBy = now.Add(timeout + timeout/2)
		if err := c.conn.SetReadDeadline(c.readBy); err != nil {
			return err
		}
	}
	n, err := c.conn.Read(c.in[c.w:])
	if c.w += n; n > 0 {
		return nil
	}
	return err
}

// flush writes the buffered output, within timeout and half of it.
func (c *wire) flush(timeout time.Duration) error {
	if len(c.out) == 0 {
		return nil
	}
	err := c.write(c.out, timeout)
	c.out = c.out[:0]
	return err
}

func (c *wire) write(p []byte, timeout time.Duration) error {
	if now := time.Now(); c.writeBy.Sub(now) < timeout {
		c.writeBy = now.Add(timeout + timeout/2)
		if err := c.conn.SetWriteDeadline(c.writeBy); err != nil {
			return err
		}
	}
	c.written = true
	_, err := c.conn.Write(p)
	return err
}

// put adds to the output.
func (c *wire) put(p []byte) {
	c.free()
	c.out = append(c.out, p...)
}

// free returns how much can be added without growing.
func (c *wire) free() int {
	if c.out == nil {
		c.out = stream.GetBuffer()[:0]
	}
	return cap(c.out) - len(c.out)
}

var crlf = []byte("\r\n")
