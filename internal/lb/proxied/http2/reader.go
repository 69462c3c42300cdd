package http2

import (
	"errors"
	"os"
	"time"

	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// reader is what the goroutine of Run has.
type reader struct {
	*Conn
	in      []byte // from r to w, not taken yet
	r, w    int
	left    int    // of the payload of a DATA frame
	pad     int    // the padding behind it
	data    header // of that frame
	greeted bool   // the peer's first SETTINGS have come
	readBy  time.Time
	since   time.Time // when what is incomplete has begun, zero if nothing is
	decoder *hpack.Decoder
	block   block
	fresh   []*Stream // requests that Accept has not had yet
}

func (c *Conn) reader() *reader {
	r := &reader{Conn: c, in: c.text, w: len(c.text)}
	r.decoder = hpack.NewDecoder(4096, r.emit)
	r.decoder.SetMaxStringLength(4 * c.o.MaxHead)
	c.text = nil
	return r
}

func (c *reader) run() error {
	if !c.client {
		if err := c.readPreface(); err != nil {
			return err
		}
	}
	for {
		done, err := c.consume()
		if err != nil {
			for _, s := range c.fresh { // Accept has not had them
				s.Close(Cancel)
			}
			return err
		}
		for i, s := range c.fresh {
			c.fresh[i] = nil
			c.o.Accept(s)
		}
		c.fresh = c.fresh[:0]
		c.note(done)
		if err := c.fill(); err != nil {
			return err
		}
	}
}

func (c *reader) readPreface() error {
	for {
		b := c.in[c.r:c.w]
		n := min(len(b), len(Preface))
		if string(b[:n]) != Preface[:n] {
			return connError{ProtocolError, "no preface"}
		}
		if n == len(Preface) {
			c.r += n
			return nil
		}
		c.note(false)
		if err := c.fill(); err != nil {
			return err
		}
	}
}

// note notes since when something is incomplete. done reports whether something was completed before.
func (c *reader) note(done bool) {
	switch {
	case c.r == c.w && c.block.stream == 0, c.left > 0, c.pad > 0:
		c.since = time.Time{}
	case done || c.since.IsZero():
		c.since = time.Now()
	}
}

// fill reads more.
func (c *reader) fill() error {
	for {
		c.room() // a smaller buffer once the streams have ended
		if err := c.setDeadline(); err != nil {
			return err
		}
		n, err := c.conn.Read(c.in[c.w:])
		if c.w += n; n > 0 {
			return nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}

// room makes room to read into.
func (c *reader) room() {
	if c.r == c.w {
		c.r, c.w = 0, 0
		if c.idle() {
			stream.PutBuffer(c.in)
			c.in = stream.GetSmallBuffer()
		} else if len(c.in) != 16<<10 {
			stream.PutBuffer(c.in)
			c.in = stream.GetBuffer()
		}
		return
	}
	if c.r > 0 {
		c.w = copy(c.in, c.in[c.r:c.w])
		c.r = 0
	}
	if c.w < len(c.in) {
		return
	}
	larger := stream.GetBuffer()
	if c.w >= len(larger) {
		larger = make([]byte, headSize+maxFrame+4096)
	}
	copy(larger, c.in[:c.w])
	stream.PutBuffer(c.in)
	c.in = larger
}

// setDeadline sets the deadline of the next read, unless the connection has ended: then who has ended it has set one that has passed.
func (c *reader) setDeadline() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	by, err := c.deadline()
	if err != nil || by.Equal(c.readBy) {
		return err
	}
	c.readBy = by
	return c.conn.SetReadDeadline(by)
}

// deadline returns until when the next bytes must come, or why the connection ends. The caller holds mu.
func (c *reader) deadline() (time.Time, error) {
	now := time.Now()
	if !c.since.IsZero() {
		by := c.since.Add(c.o.HeadTimeout)
		if !now.Before(by) {
			return time.Time{}, connError{EnhanceYourCalm, "a frame or head takes too long"}
		}
		return by, nil
	}
	if len(c.streams)+c.reserved > 0 {
		if c.readBy.After(now) {
			return c.readBy, nil
		}
		return now.Add(c.o.IdleTimeout / 4), nil // a look whether they are still there
	}
	left := c.o.IdleTimeout - now.Sub(c.idleSince)
	switch {
	case left <= 0:
		return time.Time{}, connError{NoError, "idle"}
	case c.readBy.After(now) && c.readBy.Sub(now) < left && left-c.readBy.Sub(now) < c.o.IdleTimeout/4:
		return c.readBy, nil // it is moved when it has passed
	}
	return now.Add(left), nil
}

// consume takes all frames that are whole, and DATA as it comes. It reports whether something was completed.
func (c *reader) consume() (done bool, err error) {
	for {
		b := c.in[c.r:c.w]
		if c.left > 0 || c.pad > 0 {
			if len(b) == 0 {
				return done, nil
			}
			n := min(c.left, len(b))
			if c.left -= n; n > 0 {
				c.deliver(b[:n])
			} else {
				n = min(c.pad, len(b))
				c.pad -= n
			}
			c.r += n
			if c.left == 0 && c.pad == 0 {
				done = true
				c.endData()
			}
			continue
		}
		if len(b) < headSize {
			return done, nil
		}
		h := headerOf(b)
		if h.length > maxFrame {
			return done, connError{FrameSize, "a frame is too large"}
		}
		if !c.greeted && h.kind != frameSettings {
			return done, connError{ProtocolError, "no SETTINGS at the beginning"}
		}
		whole := headSize + h.length
		if h.kind == frameData {
			whole = headSize
			if h.has(flagPadded) && h.length > 0 {
				whole++
			}
		}
		if len(b) < whole {
			return done, nil
		}
		c.r += whole
		if err := c.frame(h, b[headSize:whole]); err != nil {
			return done, err
		}
		done = done || c.block.stream == 0 && c.left == 0 && c.pad == 0
	}
}
