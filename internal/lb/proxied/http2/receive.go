package http2

import (
	"encoding/binary"

	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// frame takes a frame; of DATA what is before the data. Floods of any end the connection.
func (c *reader) frame(h header, p []byte) error {
	if c.block.stream != 0 && (h.kind != frameContinuation || h.stream != c.block.stream) {
		return connError{ProtocolError, "a header block is interrupted"}
	}
	c.mu.Lock()
	enough := c.client || h.kind == frameData || c.empty.spend(emptyEach, &c.carries)
	full := len(c.out) > c.mostOut()
	c.mu.Unlock()
	if !enough || full {
		return errFlood
	}
	switch h.kind {
	case frameData:
		return c.beginData(h, p)
	case frameHeaders:
		return c.headers(h, p)
	case frameContinuation:
		if c.block.stream == 0 {
			return connError{ProtocolError, "CONTINUATION without a block"}
		}
		return c.fragment(h, p)
	case framePush:
		return connError{ProtocolError, "PUSH_PROMISE"}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch h.kind {
	case framePriority:
		return c.priority(h, p)
	case frameReset:
		return c.peerReset(h, p)
	case frameSettings:
		c.greeted = c.greeted || !h.has(flagAck)
		return c.settings(h, p)
	case framePing:
		return c.ping(h, p)
	case frameGoAway:
		return c.goAway(h, p)
	case frameWindowUpdate:
		return c.windowUpdate(h, p)
	}
	return nil
}

var errFlood = connError{EnhanceYourCalm, "too many frames that carry nothing, or whose answers are not read"}

// mostOut returns how much may wait to be written when a frame comes. To a Pod that is more: heads of many clients wait for it at
// the same time, and Open has no further ones wait.
func (c *Conn) mostOut() int {
	if c.client {
		return 4 * mostOut
	}
	return mostOut
}

// priority ignores priorities, which RFC 9113 has abolished. A wrong one resets its stream (section 6.3), also one that has ended, so that
// nothing of that follows the reset. A stream that has not begun cannot be reset (section 6.4): then the connection ends, unless it is to
// a Pod and has the requests of many clients.
func (c *Conn) priority(h header, p []byte) error {
	code := FrameSize
	switch {
	case h.stream == 0:
		return connError{ProtocolError, "PRIORITY without a stream"}
	case len(p) == 5 && binary.BigEndian.Uint32(p)&maxWindow != h.stream:
		return nil
	case len(p) == 5:
		code = ProtocolError
	}
	switch idle := c.idleStream(h.stream); {
	case idle && !c.client:
		return connError{code, "PRIORITY"}
	case !idle && !c.was(h.stream):
		c.reset(h.stream, code)
		if s := c.streams[h.stream]; s != nil {
			s.fail(&ResetError{Code: code})
		}
	}
	return nil
}

// idleStream reports whether a stream has not begun.
func (c *Conn) idleStream(id uint32) bool {
	if own := id%2 == 1 == c.client; own {
		return id >= c.next
	}
	return id > max(c.last, c.refused)
}

func (c *Conn) peerReset(h header, p []byte) error {
	switch {
	case len(p) != 4:
		return connError{FrameSize, "RST_STREAM"}
	case h.stream == 0 || c.idleStream(h.stream):
		return connError{ProtocolError, "RST_STREAM without a stream"}
	}
	if s := c.streams[h.stream]; s != nil {
		code := Code(binary.BigEndian.Uint32(p))
		// The answer is whole, and the rest of the request is not wanted. A server of net/http that answers without reading all of
		// it also says StreamClosed, for what was still on its way.
		if s.ended && c.client {
			s.stopped = true
			s.wakeSender()
			return nil
		}
		s.fail(&ResetError{Code: code, Refused: code == RefusedStream})
	}
	return nil
}

func (c *Conn) settings(h header, p []byte) error {
	switch {
	case h.stream != 0:
		return connError{ProtocolError, "SETTINGS with a stream"}
	case h.has(flagAck) && len(p) != 0, len(p)%6 != 0:
		return connError{FrameSize, "SETTINGS"}
	case h.has(flagAck):
		return nil
	}
	if err := c.peerSettings(p); err != nil {
		return err
	}
	c.out = appendHeader(c.out, 0, frameSettings, flagAck, 0)
	c.kick()
	return nil
}

func (c *Conn) ping(h header, p []byte) error {
	switch {
	case h.stream != 0:
		return connError{ProtocolError, "PING with a stream"}
	case len(p) != 8:
		return connError{FrameSize, "PING"}
	case !h.has(flagAck):
		c.out = append(appendHeader(c.out, 8, framePing, flagAck, 0), p...)
		c.kick()
	}
	return nil
}

func (c *Conn) goAway(h header, p []byte) error {
	if h.stream != 0 {
		return connError{ProtocolError, "GOAWAY with a stream"}
	}
	if len(p) < 8 {
		return connError{FrameSize, "GOAWAY"}
	}
	c.goneAway = true
	last := binary.BigEndian.Uint32(p) & maxWindow
	for id, s := range c.streams {
		if c.client && id > last {
			s.fail(&ResetError{Code: RefusedStream, Refused: true})
		}
	}
	if c.finished() {
		return connError{NoError, "the peer goes away"}
	}
	return nil
}

func (c *Conn) windowUpdate(h header, p []byte) error {
	if len(p) != 4 {
		return connError{FrameSize, "WINDOW_UPDATE"}
	}
	n := int64(binary.BigEndian.Uint32(p) & maxWindow)
	if h.stream == 0 {
		if c.window += n; n == 0 || c.window > maxWindow {
			return connError{windowCode(n), "WINDOW_UPDATE"}
		}
		c.wakeStalled()
		return nil
	}
	if c.idleStream(h.stream) {
		return connError{ProtocolError, "WINDOW_UPDATE without a stream"}
	}
	s := c.streams[h.stream]
	if s == nil || s.err != nil { // it was reset
		return nil
	}
	if s.window += n; n == 0 || s.window > maxWindow {
		c.reset(s.id, windowCode(n))
		s.fail(&ResetError{Code: windowCode(n)})
		return nil
	}
	s.wakeSender()
	return nil
}

func windowCode(n int64) Code {
	if n == 0 {
		return ProtocolError
	}
	return FlowControl
}

// beginData takes the head of a DATA frame.
func (c *reader) beginData(h header, p []byte) error {
	if h.stream == 0 {
		return connError{ProtocolError, "DATA without a stream"}
	}
	c.data, c.left, c.pad = h, h.length, 0
	if h.has(flagPadded) {
		if len(p) == 0 || int(p[0]) > h.length-1 {
			return connError{ProtocolError, "padding"}
		}
		c.pad = int(p[0])
		c.left -= 1 + c.pad
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	enough := true
	switch {
	case c.client:
	case h.length > 0:
		enough = c.frames.spend(1, &c.taken)
	case !h.has(flagEndStream):
		enough = c.empty.spend(emptyEach, &c.carries)
	}
	if !enough {
		return errFlood
	}
	if c.idleStream(h.stream) {
		return connError{ProtocolError, "DATA before HEADERS"}
	}
	if c.received += int64(h.length); c.received > connWindow {
		return connError{FlowControl, "more DATA than the window allows for"}
	}
	if c.client {
		c.credit(h.length)
	}
	s := c.streams[h.stream]
	switch {
	case s == nil || s.err != nil || s.ended:
		if !c.was(h.stream) {
			c.reset(h.stream, StreamClosed)
			if s != nil {
				s.fail(&ResetError{Code: StreamClosed})
			}
		}
		c.data.stream = 0
		release(c.Conn, h.length)
	case s.held+h.length > streamWindow:
		return connError{FlowControl, "more DATA than the window of a stream allows for"}
	default:
		s.held += h.length
		if padding := h.length - c.left; padding > 0 {
			release(c.Conn, padding)
			s.credit(padding)
		}
		if s.length >= 0 {
			if s.length -= int64(c.left); s.length < 0 {
				c.malformed(s)
			}
		}
	}
	if c.left == 0 && c.pad == 0 {
		c.endDataLocked()
	}
	return nil
}

// malformed ends a stream whose message is none. The caller holds mu.
func (c *Conn) malformed(s *Stream) {
	c.reset(s.id, ProtocolError)
	s.fail(&ResetError{Code: ProtocolError})
}

// deliver gives data to the stream of the DATA frame.
func (c *reader) deliver(p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.data.stream == 0 {
		return // all of the frame was given back
	}
	if s := c.streams[c.data.stream]; s != nil && s.err == nil {
		s.put(p)
	} else {
		release(c.Conn, len(p))
		if s != nil {
			s.credit(len(p))
		}
	}
}

func (c *reader) endData() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endDataLocked()
}

// endDataLocked takes the end of a DATA frame into account. The caller holds mu.
func (c *reader) endDataLocked() {
	if s := c.streams[c.data.stream]; s != nil && s.err == nil && c.data.has(flagEndStream) {
		c.endStream(s)
	}
	c.data = header{}
}

// endStream takes the end of a stream's message into account. The caller holds mu.
func (c *Conn) endStream(s *Stream) {
	if s.length > 0 {
		c.malformed(s)
		return
	}
	s.ended = true
	s.wakeReader()
}

// release takes into account that bytes of bodies are not in memory any more. The caller holds mu.
func release(c *Conn, n int) {
	if !c.client { // see connWindow
		c.credit(n)
	}
}

// credit opens the window of the connection again. The caller holds mu.
func (c *Conn) credit(n int) {
	if c.owed += n; c.owed >= connWindow/4 {
		c.received -= int64(c.owed)
		c.out = appendWindowUpdate(c.out, 0, uint32(c.owed)) //nolint:gosec // at most a window
		c.owed = 0
		c.kick()
	}
}

// block is a header block as it comes.
type block struct {
	stream  uint32 // 0 for none
	end     bool   // END_STREAM
	self    bool   // it depends on itself
	bytes   int    // of it so far
	size    int    // as SETTINGS_MAX_HEADER_LIST_SIZE counts it
	tooLong bool
	text    []byte
	fields  []http1.Field
}

func (c *reader) headers(h header, p []byte) error {
	rest, depends, ok := unpad(h, p)
	switch {
	case h.stream == 0 || h.stream%2 == 0:
		return connError{ProtocolError, "HEADERS of no stream"}
	case !ok:
		return connError{ProtocolError, "padding"}
	}
	c.block = block{stream: h.stream, end: h.has(flagEndStream), text: c.block.text[:0], fields: c.block.fields[:0]}
	c.block.self = h.has(flagPriority) && depends == h.stream
	return c.fragment(h, rest)
}

// fragment takes a part of a header block.
func (c *reader) fragment(h header, p []byte) error {
	b := &c.block
	if b.bytes += len(p); b.bytes > 2*c.o.MaxHead {
		return connError{EnhanceYourCalm, "a header block has no end"}
	}
	if _, err := c.decoder.Write(p); err != nil {
		return connError{Compression, err.Error()}
	}
	if !h.has(flagEndHeaders) {
		return nil
	}
	if err := c.decoder.Close(); err != nil {
		return connError{Compression, err.Error()}
	}
	id := b.stream
	err := c.endBlock(id)
	if b.stream = 0; cap(b.text) > keptText || cap(b.fields) > keptFields { // of a connection that may be idle for long
		b.text, b.fields = nil, nil
	}
	return err
}

// keptText and keptFields bound what is kept of a head for the next one.
const (
	keptText   = 4 << 10
	keptFields = 64
)

// emit has a field of a block.
func (c *reader) emit(f hpack.HeaderField) {
	b := &c.block
	if b.size += len(f.Name) + len(f.Value) + 32; b.size > c.o.MaxHead || b.tooLong {
		b.tooLong = true
		return
	}
	at := len(b.text)
	b.text = append(append(b.text, f.Name...), f.Value...)
	middle := at + len(f.Name)
	b.fields = append(b.fields, http1.Field{Name: b.text[at:middle:middle], Value: b.text[middle:len(b.text):len(b.text)]})
}

// endBlock takes a whole block.
func (c *reader) endBlock(id uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[id]
	switch {
	case s != nil && s.err == nil && !s.ended:
		c.laterBlock(s)
		return nil
	case s != nil && s.err == nil:
		c.reset(id, StreamClosed)
		s.fail(&ResetError{Code: StreamClosed})
		return nil
	case c.was(id):
		return nil
	case c.client:
		if c.idleStream(id) {
			return connError{ProtocolError, "an answer without a request"}
		}
		return nil
	case s != nil, id <= c.last:
		return connError{StreamClosed, "HEADERS of a stream that has ended"}
	case c.leaving: // the peer has not read the GOAWAY yet; what it still sends on the stream is no error
		c.refused = max(c.refused, id)
		c.reset(id, RefusedStream)
		return nil
	}
	c.last = id
	switch {
	case c.block.self:
		c.reset(id, ProtocolError)
		return nil
	case len(c.streams) >= c.o.MaxStreams:
		c.reset(id, RefusedStream)
		return nil
	}
	s = newStream(c.Conn, id)
	if !s.takeRequest(&c.block) {
		c.reset(id, ProtocolError)
		s.recycle()
		return nil
	}
	s.ended = c.block.end
	c.streams[id] = s
	c.fresh = append(c.fresh, s)
	return nil
}

// laterBlock takes a block that is not the first one of a request: an answer's head, or trailers. The caller holds mu.
func (c *reader) laterBlock(s *Stream) {
	ok := !c.block.self
	if ok && c.client && !s.answered {
		ok = s.takeAnswer(&c.block)
	} else if ok {
		ok = c.block.end && s.takeTrailers(&c.block)
	}
	switch {
	case !ok:
		c.malformed(s)
	case c.block.end:
		c.endStream(s)
	default:
		s.wakeReader()
	}
}
