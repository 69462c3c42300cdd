package http2

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// Windows that are open to a peer: what was not taken yet is in memory.
const (
	streamWindow = 256 << 10
	connWindow   = 1 << 20
	// maxOut is how much may wait to be written before bodies wait, and mostOut before no further stream is opened and the
	// connection of a client ends: heads, and frames that answer the peer's, wait for nothing.
	maxOut  = 64 << 10
	mostOut = 1 << 20
)

// Options are what a connection is for.
type Options struct {
	// Accept has a request on a stream, on the goroutine of Run: it must return soon. A client has none.
	Accept func(*Stream)
	// Go calls a function on another goroutine, which is waited for at the end.
	Go func(func())
	// MaxHead bounds the fields of a head, as SETTINGS_MAX_HEADER_LIST_SIZE counts them, and MaxStreams the requests at a time.
	MaxHead, MaxStreams int
	// HeadTimeout is how long a head, or another frame, may take from its first byte. IdleTimeout is how long the connection
	// stays without a stream: streams have deadlines of their users. WriteTimeout is how long a write may take.
	HeadTimeout, IdleTimeout, WriteTimeout time.Duration
}

// Conn is a connection.
type Conn struct {
	conn   stream.Conn
	text   []byte // read before
	writer func() // write
	o      Options
	client bool

	mu                sync.Mutex
	empty, frames     allowance // for frames that carry nothing, and for DATA
	carries, taken    int64     // see allowance.spend
	streams           map[uint32]*Stream
	reserved          int    // streams of Open that have no number yet
	last, next        uint32 // the highest stream of the peer's, and the next of our own
	refused           uint32 // the highest one that began after GOAWAY
	resets            [64]uint32
	nextReset         int
	out, spare        []byte
	writing, started  bool
	written           chan struct{} // closed when a write ends; nil if nobody waits
	window            int64         // to send
	owed              int           // of the window that is open to the peer
	received          int64         // of connWindow
	peer              settings
	stalled           []*Stream
	err               error
	leaving, goneAway bool // no stream begins here any more, or at the peer
	sized             bool // the peer knows that its dynamic table is not used
	idleSince         time.Time
}

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

// settings are the peer's.
type settings struct {
	window, frame, streams int64
	connect                bool // RFC 8441
}

// NewServer returns a connection of a client's, and NewClient one to a server. text was read of it before.
func NewServer(conn stream.Conn, text []byte, o Options) *Conn { return newConn(conn, text, o, false) }

// NewClient returns a connection to a server.
func NewClient(conn stream.Conn, o Options) *Conn { return newConn(conn, nil, o, true) }

func newConn(conn stream.Conn, text []byte, o Options, client bool) *Conn {
	c := &Conn{conn: conn, o: o, client: client, text: text, streams: map[uint32]*Stream{}, next: 1,
		window: defaultWindow, peer: settings{defaultWindow, maxFrame, 1 << 30, false}, idleSince: time.Now()}
	c.empty.left, c.frames.left = EmptyBurst, EmptyBurst
	c.writer = c.write
	c.greet()
	return c
}

// greet sends the preface: the settings, and a larger window.
func (c *Conn) greet() {
	if c.client {
		c.out = append(c.out, Preface...)
	}
	var s []byte
	s = appendSetting(s, settingInitialWindow, streamWindow)
	s = appendSetting(s, settingMaxHead, uint32(c.o.MaxHead)) //nolint:gosec // a constant
	if c.client {
		s = appendSetting(s, settingEnablePush, 0)
	} else {
		s = appendSetting(s, settingMaxStreams, uint32(c.o.MaxStreams)) //nolint:gosec // a constant
		s = appendSetting(s, settingConnectProtocol, 1)
	}
	c.out = append(appendHeader(c.out, len(s), frameSettings, 0, 0), s...)
	c.out = appendWindowUpdate(c.out, 0, connWindow-defaultWindow)
}

// Run reads until the connection ends, and returns why. It closes the connection, and all streams have an end then.
func (c *Conn) Run() (err error) {
	r := c.reader()
	err = panics.Err // if there is one
	defer func() {
		c.end(err)
		stream.PutBuffer(r.in)
	}()
	c.mu.Lock()
	c.started = true
	c.kick()
	c.mu.Unlock()
	err = r.run()
	return err
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

func (c *Conn) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.streams) == 0
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

// end ends the connection, after a last frame that tells why.
func (c *Conn) end(err error) {
	var why connError
	code := NoError
	if errors.As(err, &why) {
		code = why.code
	}
	c.mu.Lock()
	if c.err == nil {
		c.out = appendGoAway(c.out, c.last, code)
	}
	writing, finished := c.writing, c.err == errLast //nolint:errorlint // it is set nowhere else
	if writing && !finished {
		c.written = make(chan struct{})
	}
	written := c.written
	if !errors.Is(c.err, err) {
		c.err = errors.Join(c.err, err)
	}
	if c.err == nil {
		c.err = io.EOF
	}
	for _, s := range c.streams {
		s.fail(&ResetError{Code: Cancel, Lost: true})
	}
	last := c.out
	c.out = nil
	c.mu.Unlock()
	if written != nil { // what it writes comes before the last frame
		select {
		case <-written:
			writing = false
		case <-time.After(lastWrite):
		}
	}
	if finished {
		c.linger(lastAnswers)
	} else if !writing && len(last) < maxOut && c.conn.SetWriteDeadline(time.Now().Add(lastWrite)) == nil {
		if _, err := c.conn.Write(last); err == nil && code != NoError && code != EnhanceYourCalm {
			c.linger(lastRead)
		}
	}
	_ = c.conn.Close()
}

// linger sends the end, and reads what the peer still sends, so that it gets the last frame: what is closed with bytes unread
// is reset.
func (c *Conn) linger(most time.Duration) {
	if c.conn.CloseWrite() != nil || c.conn.SetReadDeadline(time.Now().Add(most)) != nil {
		return
	}
	buf := stream.GetSmallBuffer()
	defer stream.PutBuffer(buf)
	for n := 0; n < connWindow; {
		m, err := c.conn.Read(buf)
		if n += m; err != nil {
			return
		}
	}
}

// lastWrite is how long the last frame may take, and lastRead how long the peer has to read it, or lastAnswers those of the last
// streams.
const (
	lastWrite   = 100 * time.Millisecond
	lastRead    = 500 * time.Millisecond
	lastAnswers = 2 * time.Second
)

// errLast means that the last stream has ended of a connection that takes no further one.
var errLast error = connError{NoError, "the last stream has ended"}

// Leave has no further stream begin; the connection ends with the last one. It can be called often.
func (c *Conn) Leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving || c.err != nil {
		return
	}
	c.leaving = true
	if !c.client { // a server would ignore a stream of Open that has no number yet
		c.out = appendGoAway(c.out, c.last, NoError)
	}
	c.kick()
}

// kick has what waits be written. The caller holds mu.
func (c *Conn) kick() {
	if c.mustWrite() {
		c.o.Go(c.writer)
	}
}

// mustWrite reports whether the caller must call write, since nobody writes. The caller holds mu.
func (c *Conn) mustWrite() bool {
	if c.writing || !c.started || c.err != nil {
		return false
	}
	c.writing = true
	return true
}

// pooled returns b, or a buffer of the pool if there is none.
func pooled(b []byte) []byte {
	if b == nil {
		return stream.GetBuffer()[:0]
	}
	return b
}

// finished reports whether the last stream of a connection has ended that has no further one. The caller holds mu.
func (c *Conn) finished() bool {
	return len(c.streams)+c.reserved == 0 && (c.leaving || c.client && c.goneAway)
}

// was reports whether a stream was reset here: its peer may not know that. The caller holds mu.
func (c *Conn) was(id uint32) bool {
	for _, r := range c.resets {
		if r == id {
			return true
		}
	}
	return false
}

// reset sends RST_STREAM. The caller holds mu.
func (c *Conn) reset(id uint32, code Code) {
	c.resets[c.nextReset] = id
	c.nextReset = (c.nextReset + 1) % len(c.resets)
	c.out = appendReset(c.out, id, code)
	c.kick()
}

// peerSettings takes SETTINGS into account, in their order. The caller holds mu.
func (c *Conn) peerSettings(p []byte) error {
	for ; len(p) >= 6; p = p[6:] {
		value := int64(binary.BigEndian.Uint32(p[2:]))
		switch binary.BigEndian.Uint16(p) {
		case settingEnablePush:
			if value > 1 {
				return connError{ProtocolError, "SETTINGS_ENABLE_PUSH"}
			}
		case settingMaxStreams:
			c.peer.streams = value
		case settingInitialWindow:
			if value > maxWindow {
				return connError{FlowControl, "SETTINGS_INITIAL_WINDOW_SIZE"}
			}
			for _, s := range c.streams {
				if s.window += value - c.peer.window; s.window > maxWindow {
					return connError{FlowControl, "a window is too large"}
				}
				s.wakeSender()
			}
			c.peer.window = value
		case settingMaxFrame:
			if value < maxFrame || value > 1<<24-1 {
				return connError{ProtocolError, "SETTINGS_MAX_FRAME_SIZE"}
			}
			c.peer.frame = min(value, maxFrame)
		case settingConnectProtocol:
			if value > 1 {
				return connError{ProtocolError, "SETTINGS_ENABLE_CONNECT_PROTOCOL"}
			}
			c.peer.connect = value == 1
		}
	}
	return nil
}
