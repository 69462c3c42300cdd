package web

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// wire is a connection of HTTP/1.1 with a read buffer and a write buffer. One goroutine reads and one
// writes at a time.
type wire struct {
	conn stream.Conn
	tcp  *net.TCPConn // conn, if that is one whose bytes the kernel can carry

	in         []byte // what is between r and w is not taken yet; nil while nothing is
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

// Which end of a pump has failed.
var (
	errSource = errors.New("cannot read a body")
	errSink   = errors.New("cannot write a body")
	// errAbandoned means that the rest of a body is not wanted.
	errAbandoned = errors.New("the rest of a body is not wanted")
)

// spliceAt is how much of a body must be left for the kernel to carry it: a pipe costs some system calls.
const spliceAt = 64 << 10

// pump carries a body.
type pump struct {
	to, from *wire
	body     http1.Body
	chunked  bool // how it goes on
	trailers bool // pass trailers on
	timeout  time.Duration
	bytes    *atomic.Int64 // of the body
	of       pumping
	ended    atomic.Bool // all of the body was read
	// abandoned is set before a deadline in the past, which ends the pump.
	abandoned atomic.Bool
	fields    []http1.Field
}

// pumping is what a body is part of.
type pumping interface {
	// touch is called when something was carried, and waited when nothing has come for a while: its error ends the pump.
	touch()
	waited() error
}

// run carries the body to its end, and calls waited when nothing has come for poll. What was put to p.to before goes out with it.
func (p *pump) run(poll time.Duration) error {
	for !p.body.Done() {
		if p.abandoned.Load() {
			return errAbandoned
		}
		data, taken, fields, err := p.body.Next(p.from.buffered(), p.fields[:0])
		p.fields = fields
		if err != nil {
			return err
		}
		if taken > 0 {
			if err := p.pass(data); err != nil {
				return fmt.Errorf("%w: %w", errSink, err)
			}
			p.from.take(taken)
			continue
		}
		if left, ok := p.body.Sized(); ok && left >= spliceAt && p.to.tcp != nil && p.from.tcp != nil {
			if err := p.splice(left); err != nil {
				return err
			}
			continue
		}
		if len(p.to.out) > 0 {
			if err := p.to.flush(p.timeout); err != nil {
				return fmt.Errorf("%w: %w", errSink, err)
			}
			p.of.touch()
		}
		switch err := p.from.fill(poll, 0); {
		case err == nil:
			p.of.touch()
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := p.of.waited(); err != nil {
				return err
			}
		case errors.Is(err, io.EOF) && p.body.Endless():
			return p.finish()
		default:
			return fmt.Errorf("%w: %w", errSource, err)
		}
	}
	return p.finish()
}

// pass adds data to the output, and writes it once it is large.
func (p *pump) pass(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	p.bytes.Add(int64(len(data)))
	const around = 24 // bytes of the size and of line ends, at most
	if p.to.free() < around {
		if err := p.to.flush(p.timeout); err != nil {
			return err
		}
	}
	if p.chunked {
		p.to.out = append(strconv.AppendUint(p.to.out, uint64(len(data)), 16), crlf...)
	}
	if len(data)+len(crlf) <= p.to.free() {
		p.to.put(data)
	} else if err := errors.Join(p.to.flush(p.timeout), p.to.write(data, p.timeout)); err != nil {
		return err
	}
	if p.chunked {
		p.to.put(crlf)
	}
	return nil
}

var crlf = []byte("\r\n")

// finish writes the rest of the output, and the end.
func (p *pump) finish() error {
	p.ended.Store(true)
	if p.chunked {
		p.to.put([]byte("0\r\n"))
		if p.trailers {
			for _, f := range p.fields {
				if f.Kind == http1.Other {
					p.to.out = appendField(p.to.out, f.Name, f.Value)
				}
			}
		}
		p.to.put(crlf)
	}
	if err := p.to.flush(p.timeout); err != nil {
		return fmt.Errorf("%w: %w", errSink, err)
	}
	return nil
}

// splice has the kernel carry the rest of a body, of which nothing is buffered.
func (p *pump) splice(left uint64) error {
	if err := p.to.flush(p.timeout); err != nil {
		return fmt.Errorf("%w: %w", errSink, err)
	}
	round := p.timeout / 4
	last := time.Now()
	p.to.written = true
	for left > 0 {
		if p.abandoned.Load() {
			return errAbandoned
		}
		now := time.Now()
		// What is read is written before the next look at the clock: see idleness.
		p.from.readBy, p.to.writeBy = now.Add(round), now.Add(p.timeout+2*round)
		if err := errors.Join(p.from.conn.SetReadDeadline(p.from.readBy), p.to.conn.SetWriteDeadline(p.to.writeBy)); err != nil {
			return err
		}
		n, err := p.to.tcp.ReadFrom(&io.LimitedReader{R: p.from.tcp, N: int64(left)}) //nolint:gosec // of at most 18 digits
		if n > 0 {
			last = time.Now()
			p.of.touch()
			p.bytes.Add(n)
			left -= uint64(n)
			p.body.Skip(uint64(n))
		}
		switch {
		case left == 0:
		case err == nil:
			return fmt.Errorf("%w: %w", errSource, io.ErrUnexpectedEOF)
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w: %w", errSource, err)
		case time.Since(last) >= p.timeout:
			return fmt.Errorf("%w: %w", errSource, stream.ErrIdle)
		}
	}
	return nil
}
