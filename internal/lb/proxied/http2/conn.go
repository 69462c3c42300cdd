package http2

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// Windows that are open to a peer, in bytes. Bytes that were not taken yet are in memory: of a client at most connWindow for its
// connection, which opens again as bodies are taken. The connection to a server is of many clients: its window opens again as bytes
// come, or some that read nothing would stop the others. There each stream has its own window, and MaxStreams bounds all.
const (
	streamWindow = 256 << 10
	connWindow   = 1 << 20
	// maxOut is how much may wait to be written before bodies wait, and mostOut before no further stream is opened and the
	// connection of a client ends: heads, and frames that answer the peer's, wait for nothing.
	maxOut  = 64 << 10
	mostOut = 1 << 20
)

// PodStreams is how many requests of many clients a connection to a Pod has at a time, unless the Pod lets it have fewer: with more there
// is another connection. Each may have a window in memory that its client does not read, 25 MiB in all.
const PodStreams = 100

// Options are what a connection is for.
type Options struct {
	// Accept has a request on a stream, on the goroutine of Run: it must return soon. A client has none.
	Accept func(*Stream)
	// Go calls a function on another goroutine, which is waited for at the end.
	Go func(func())
	// MaxHead bounds the fields of a head, as SETTINGS_MAX_HEADER_LIST_SIZE counts them, and MaxStreams the requests at a time: a
	// client's, or what Open opens.
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

func (c *Conn) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.streams) == 0
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
