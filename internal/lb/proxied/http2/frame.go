package http2

import (
	"encoding/binary"
	"fmt"
)

// Preface is how a client begins: RFC 9113, section 3.4.
const Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// Types of frames: RFC 9113, section 6.
const (
	frameData         = 0
	frameHeaders      = 1
	framePriority     = 2
	frameReset        = 3
	frameSettings     = 4
	framePush         = 5
	framePing         = 6
	frameGoAway       = 7
	frameWindowUpdate = 8
	frameContinuation = 9
)

// Flags of frames.
const (
	flagAck        = 1
	flagEndStream  = 1
	flagEndHeaders = 4
	flagPadded     = 8
	flagPriority   = 32
)

// Settings: RFC 9113, section 6.5.2, and RFC 8441.
const (
	settingEnablePush      = 2
	settingMaxStreams      = 3
	settingInitialWindow   = 4
	settingMaxFrame        = 5
	settingMaxHead         = 6
	settingConnectProtocol = 8
)

// Code is why a stream or a connection ends: RFC 9113, section 7.
type Code uint32

// The codes in use.
const (
	NoError         Code = 0
	ProtocolError   Code = 1
	InternalError   Code = 2
	FlowControl     Code = 3
	StreamClosed    Code = 5
	FrameSize       Code = 6
	RefusedStream   Code = 7
	Cancel          Code = 8
	Compression     Code = 9
	EnhanceYourCalm Code = 11
)

const (
	headSize = 9 // of a frame
	// maxFrame bounds the payload of frames to us: the initial SETTINGS_MAX_FRAME_SIZE. Of larger ones to the peer nobody
	// would have an advantage.
	maxFrame = 16 << 10
	// defaultWindow is a window at the beginning, and maxWindow what none exceeds.
	defaultWindow = 64<<10 - 1
	maxWindow     = 1<<31 - 1
)

// connError ends the connection.
type connError struct {
	code Code
	why  string
}

func (e connError) Error() string { return fmt.Sprintf("HTTP/2: %s (code %d)", e.why, e.code) }

// ResetError is why a stream has ended before its messages: the peer, or the connection, has ended it.
type ResetError struct {
	Code Code
	// Refused reports that the peer has done nothing with the request: it may be sent again.
	Refused bool
	// Lost reports that the connection has ended.
	Lost bool
}

func (e *ResetError) Error() string { return fmt.Sprintf("the stream was reset (code %d)", e.Code) }

// header is the head of a frame: section 4.1.
type header struct {
	length      int
	kind, flags byte
	stream      uint32
}

func headerOf(b []byte) header {
	return header{int(b[0])<<16 | int(b[1])<<8 | int(b[2]), b[3], b[4], binary.BigEndian.Uint32(b[5:]) & maxWindow}
}

func (h header) has(flag byte) bool { return h.flags&flag != 0 }

func appendHeader(to []byte, length int, kind, flags byte, stream uint32) []byte {
	to = append(to, byte(length>>16), byte(length>>8), byte(length), kind, flags) //nolint:gosec // three bytes of it
	return binary.BigEndian.AppendUint32(to, stream)
}

func appendReset(to []byte, stream uint32, code Code) []byte {
	return binary.BigEndian.AppendUint32(appendHeader(to, 4, frameReset, 0, stream), uint32(code))
}

func appendWindowUpdate(to []byte, stream, n uint32) []byte {
	return binary.BigEndian.AppendUint32(appendHeader(to, 4, frameWindowUpdate, 0, stream), n)
}

func appendGoAway(to []byte, last uint32, code Code) []byte {
	to = binary.BigEndian.AppendUint32(appendHeader(to, 8, frameGoAway, 0, 0), last)
	return binary.BigEndian.AppendUint32(to, uint32(code))
}

func appendSetting(to []byte, id uint16, value uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(to, id), value)
}

// appendBlock adds the frames of a header block.
func appendBlock(to, block []byte, stream uint32, end bool, most int) []byte {
	kind, flags := byte(frameHeaders), byte(0)
	if end {
		flags = flagEndStream
	}
	for {
		n := min(len(block), most)
		if n == len(block) {
			flags |= flagEndHeaders
		}
		to = append(appendHeader(to, n, kind, flags, stream), block[:n]...)
		if block = block[n:]; len(block) == 0 {
			return to
		}
		kind, flags = frameContinuation, 0
	}
}

// unpad takes the padding away, and what of a HEADERS frame is about priority. It returns the stream that this depends on.
func unpad(h header, p []byte) (rest []byte, depends uint32, ok bool) {
	pad := 0
	if h.has(flagPadded) {
		if len(p) == 0 {
			return nil, 0, false
		}
		pad, p = int(p[0]), p[1:]
	}
	if h.kind == frameHeaders && h.has(flagPriority) {
		if len(p) < 5 {
			return nil, 0, false
		}
		depends, p = binary.BigEndian.Uint32(p)&maxWindow, p[5:]
	}
	if pad > len(p) {
		return nil, 0, false
	}
	return p[:len(p)-pad], depends, true
}
