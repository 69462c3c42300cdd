package http2

import (
	"io"
	"os"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// Stream is a request and its answer. One goroutine reads and one writes at a time, and Close is the last call.
type Stream struct {
	c  *Conn
	id uint32

	// Request is what a client asks for. TooLarge reports that its fields were too many: then it is not whole.
	Request  http1.Request
	TooLarge bool
	// Socket reports a request for a WebSocket (RFC 8441), which Request has in the form of HTTP/1.1.
	Socket bool

	arena []byte // of the fields
	heads int    // the sizes of all heads, as SETTINGS_MAX_HEADER_LIST_SIZE counts them

	// What follows is guarded by c.mu.

	err         error
	gone        func()        // called at the end before the time
	recv, send  chan struct{} // wake who reads and who writes
	window      int64         // to send
	waits       bool          // for a window
	in          []byte        // from read on it was not taken yet
	read        int
	held, owed  int   // of the window that is open to the peer: not given back yet; and the part that is due
	length      int64 // of the body to come, -1 if that is not known
	ended, sent bool  // the peer's message is whole, and ours
	stopped     bool  // the peer does not want the rest of our message
	woken       bool
	answered    bool // a final answer has come
	isHead      bool
	answers     []http1.Response // heads that were not read
	fields      []http1.Field    // of the answers
	trailers    []http1.Field

	readTimer, sendTimer *time.Timer
}

var streams = sync.Pool{New: func() any { return &Stream{recv: make(chan struct{}, 1), send: make(chan struct{}, 1)} }}

// newStream returns a stream. The caller holds mu.
func newStream(c *Conn, id uint32) *Stream {
	s := streams.Get().(*Stream)
	s.c, s.id, s.window, s.length = c, id, c.peer.window, -1
	return s
}

// recycle gives a stream back of which nobody knows any more.
func (s *Stream) recycle() {
	stream.PutBuffer(s.in)
	drain(s.recv)
	drain(s.send)
	s.Request.Reset()
	if cap(s.Request.Fields) > 4*keptFields {
		s.Request.Fields = nil
	}
	if cap(s.arena) > 4*keptText {
		s.arena = nil
	}
	clear(s.answers)
	*s = Stream{recv: s.recv, send: s.send, Request: s.Request, arena: s.arena[:0], answers: s.answers[:0], fields: forget(s.fields),
		trailers: forget(s.trailers), readTimer: s.readTimer, sendTimer: s.sendTimer}
	streams.Put(s)
}

// forget returns room for further fields, unless that is large.
func forget(fields []http1.Field) []http1.Field {
	if cap(fields) > keptFields {
		return nil
	}
	clear(fields)
	return fields[:0]
}

func drain(c chan struct{}) {
	select {
	case <-c:
	default:
	}
}

// Open begins a stream to a server. It returns nil if the connection takes no further one, now or for good.
func (c *Conn) Open(isHead bool) *Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	most := min(c.peer.streams, int64(c.o.MaxStreams))
	if c.err != nil || c.leaving || c.goneAway || int64(len(c.streams)+c.reserved) >= most || c.next > maxWindow/2 || len(c.out) > mostOut {
		return nil
	}
	s := newStream(c, 0)
	s.isHead = isHead
	c.reserved++
	return s
}

// number gives a stream of Open its number: they begin in the order of these. The caller holds mu.
func (c *Conn) number(s *Stream) error {
	if c.err != nil || c.goneAway {
		s.err = &ResetError{Code: RefusedStream, Refused: true, Lost: c.err != nil}
		return s.err
	}
	c.reserved--
	s.id = c.next
	c.next += 2
	s.window = c.peer.window
	c.streams[s.id] = s
	return nil
}

// OnEnd has f called if the stream ends before its time; it must return at once.
func (s *Stream) OnEnd(f func()) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.gone = f; s.err != nil {
		f()
	}
}

// fail ends the stream for who reads and writes. The caller holds mu.
func (s *Stream) fail(err error) {
	if s.err != nil {
		return
	}
	s.err = err
	if s.gone != nil {
		s.gone()
	}
	s.wakeReader()
	s.wakeSender()
}

func (s *Stream) wakeReader() {
	select {
	case s.recv <- struct{}{}:
	default:
	}
}

func (s *Stream) wakeSender() {
	select {
	case s.send <- struct{}{}:
	default:
	}
}

// wakeStalled wakes who waits for the window of the connection, or until something was written. The caller holds mu.
func (c *Conn) wakeStalled() {
	for i, s := range c.stalled {
		if c.stalled[i] = nil; s.waits {
			s.waits = false
			s.wakeSender()
		}
	}
	c.stalled = c.stalled[:0]
}

// wait waits for a wake, at most so long.
func wait(c chan struct{}, timer **time.Timer, timeout time.Duration) error {
	t := *timer
	if t == nil {
		t = time.NewTimer(timeout)
		*timer = t
	} else {
		t.Reset(timeout)
	}
	select {
	case <-c:
		t.Stop()
		return nil
	case <-t.C:
		return os.ErrDeadlineExceeded
	}
}

// put adds data of the peer's body. The caller holds mu.
func (s *Stream) put(p []byte) {
	if s.in == nil {
		s.in = stream.GetBuffer()[:0]
	}
	if len(s.in)+len(p) > cap(s.in) && s.read > 0 {
		s.in, s.read = append(make([]byte, 0, len(s.in)-s.read+len(p)+(16<<10)), s.in[s.read:]...), 0 // who reads has the old one
	}
	s.in = append(s.in, p...)
	s.wakeReader()
}

// credit opens the window of the stream again. The caller holds mu.
func (s *Stream) credit(n int) {
	if s.owed += n; s.owed >= streamWindow/4 && !s.ended && s.err == nil {
		s.held -= s.owed
		s.c.out = appendWindowUpdate(s.c.out, s.id, uint32(s.owed)) //nolint:gosec // at most a window
		s.owed = 0
		s.c.kick()
	}
}

// Peek returns what has come of the body and was not taken yet, and whether the message ends with it.
func (s *Stream) Peek() (p []byte, last bool) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.in[s.read:], s.ended && len(s.trailers) == 0
}

// Take takes n bytes of what Peek has returned, which is not valid any more.
func (s *Stream) Take(n int) {
	if n == 0 {
		return
	}
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.read += n; s.read == len(s.in) {
		s.in, s.read = s.in[:0], 0
	}
	c.taken += int64(n)
	s.credit(n)
	release(c, n)
}

// Ended reports whether all of the peer's message has been taken.
func (s *Stream) Ended() bool {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.ended && s.read == len(s.in)
}

// Whole returns the rest of the body if all of it is there, and not longer than most.
func (s *Stream) Whole(most int) (p []byte, ok bool) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if !s.ended || len(s.in)-s.read > most || len(s.trailers) > 0 {
		return nil, false
	}
	return s.in[s.read:], true
}

// Fill waits until more of the body, or its end, has come. It fails with os.ErrDeadlineExceeded after timeout, and once Wake
// was called.
func (s *Stream) Fill(timeout time.Duration) error {
	for {
		s.c.mu.Lock()
		err, ready := s.err, s.read < len(s.in) || s.ended
		if err == nil && s.woken && !ready {
			err = os.ErrDeadlineExceeded
		}
		s.c.mu.Unlock()
		if ready && err == nil || err != nil {
			return err
		}
		if err := wait(s.recv, &s.readTimer, timeout); err != nil {
			return err
		}
	}
}

// Wake ends Fill.
func (s *Stream) Wake() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.woken = true
	s.wakeReader()
}

// Trailers returns the fields behind the body.
func (s *Stream) Trailers() []http1.Field {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.trailers
}

// Err returns why the stream has ended before its time, nil if it has not.
func (s *Stream) Err() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.err
}

// Answer waits for the next head of a server's answer.
func (s *Stream) Answer(r *http1.Response, timeout time.Duration) error {
	for {
		s.c.mu.Lock()
		err := s.err
		if len(s.answers) > 0 {
			takeHead(s, r)
			s.c.mu.Unlock()
			return nil
		}
		s.c.mu.Unlock()
		if err != nil {
			return err
		}
		if err := wait(s.recv, &s.readTimer, timeout); err != nil {
			return err
		}
	}
}

// takeHead moves the first head that was not read to r, whose fields stay its own. The caller holds mu.
func takeHead(s *Stream, r *http1.Response) {
	fields := r.Fields[:0]
	*r = s.answers[0]
	r.Fields = append(fields, r.Fields...)
	n := copy(s.answers, s.answers[1:])
	s.answers[n] = http1.Response{}
	s.answers = s.answers[:n]
}

// Head sends a head: interim, or that of the message, which has no body if end is set. It is written with what follows, or
// by Flush.
func (s *Stream) Head(e *Encoder, end bool) error {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if s.id == 0 {
		if err := c.number(s); err != nil {
			return err
		}
	}
	c.out = c.appendHead(pooled(c.out), e, s.id, end)
	s.sent = end
	c.carries++
	return nil
}

// appendHead adds a block, the first one of a connection with the news that the dynamic table is not used: a size of 0.
func (c *Conn) appendHead(to []byte, e *Encoder, id uint32, end bool) []byte {
	if !c.sized {
		c.sized = true
		e.Block = append([]byte{0x20}, e.Block...)
	}
	return appendBlock(to, e.Block, id, end, int(c.peer.frame))
}

// Write sends a part of the body, the last one with end. It waits until the peer's windows allow for it, and fails with
// os.ErrDeadlineExceeded when they have not moved for timeout. What it returns nil for is written by Flush.
func (s *Stream) Write(p []byte, end bool, timeout time.Duration) error {
	c := s.c
	until := time.Time{}
	for {
		c.mu.Lock()
		if err := s.sendable(); err != nil {
			c.mu.Unlock()
			return err
		}
		n := int(min(int64(len(p)), s.window, c.window, c.peer.frame))
		if len(c.out) >= maxOut {
			n = 0
		}
		if n > 0 || len(p) == 0 {
			flags := byte(0)
			if end && n == len(p) {
				flags, s.sent = flagEndStream, true
			}
			c.out = append(appendHeader(pooled(c.out), n, frameData, flags, s.id), p[:n]...)
			s.window -= int64(n)
			c.window -= int64(n)
			p = p[n:]
			c.carries++
			c.mu.Unlock()
			if len(p) == 0 {
				return nil
			}
			until = time.Time{}
			continue
		}
		if !s.waits && s.window > 0 {
			s.waits = true
			c.stalled = append(c.stalled, s)
		}
		c.kick()
		c.mu.Unlock()
		now := time.Now()
		if until.IsZero() {
			until = now.Add(timeout)
		}
		if err := wait(s.send, &s.sendTimer, until.Sub(now)); err != nil {
			return err
		}
	}
}

// sendable returns why nothing can be sent. The caller holds mu.
func (s *Stream) sendable() error {
	if s.err == nil && s.stopped {
		return io.ErrClosedPipe
	}
	return s.err
}

// End sends the end of the message, with trailers if e is not nil. It is written by Flush.
func (s *Stream) End(e *Encoder) error {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.sendable(); err != nil || s.sent {
		return err
	}
	if s.sent = true; e != nil {
		c.out = c.appendHead(c.out, e, s.id, true)
	} else {
		c.out = appendHeader(c.out, 0, frameData, flagEndStream, s.id)
	}
	return nil
}

// Flush has what waits be written.
func (s *Stream) Flush() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.c.kick()
}

// Abort ends the stream for who reads and writes. Close is still to come.
func (s *Stream) Abort(code Code) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.err == nil {
		if s.id != 0 {
			s.c.reset(s.id, code)
		}
		s.fail(&ResetError{Code: code})
	}
}

// Close ends the stream: whose messages are not whole is reset, by a code unless all was sent. Nobody uses it afterwards.
func (s *Stream) Close(code Code) {
	c := s.c
	c.mu.Lock()
	if c.close(s, code) {
		c.kick()
	}
	c.mu.Unlock()
	s.recycle()
}

// CloseAndWrite is Close for a goroutine that has nothing else to do: it writes what waits, of other streams too, unless another
// goroutine does so already.
func (s *Stream) CloseAndWrite(code Code) {
	c := s.c
	c.mu.Lock()
	write := c.close(s, code) && c.mustWrite()
	c.mu.Unlock()
	s.recycle()
	if write {
		c.write()
	}
}

// close ends a stream, and reports whether something waits to be written. The caller holds mu.
func (c *Conn) close(s *Stream, code Code) bool {
	release(c, len(s.in)-s.read)
	switch {
	case s.id == 0:
		c.reserved--
	case s.err != nil || s.ended && s.sent:
	case s.sent && !c.client:
		c.reset(s.id, NoError) // the answer is whole: RFC 9113, section 8.1
	default:
		c.reset(s.id, code)
	}
	delete(c.streams, s.id) // without a number it is not there
	if s.waits {
		for i, other := range c.stalled {
			if other == s {
				c.stalled = append(c.stalled[:i], c.stalled[i+1:]...)
				break
			}
		}
	}
	if len(c.streams)+c.reserved == 0 {
		c.idleSince = time.Now()
	}
	return len(c.out) > 0 || c.finished()
}
