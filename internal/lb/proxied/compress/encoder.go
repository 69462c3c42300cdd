package compress

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// Bounds of the answers that are compressed.
const (
	// maxEncoders is how many a process compresses at a time: each takes up to 1.3 MB. Further answers go out as they are.
	maxEncoders = 128
	// window of zstd is what a client must keep, in bytes.
	window = 128 << 10
	// gzipLevel takes half of the time of the default, 6, for answers that are 7 % longer (docs/loadbalancer.md: 1.5 and 3.2 ms).
	gzipLevel = 3
)

var running atomic.Int64

// writer is what both libraries have.
type writer interface {
	io.WriteCloser
	Flush() error
	Reset(io.Writer)
}

// pools have encoders that are not in use, by their codings.
//
//nolint:gochecknoglobals // of the process, as its memory is
var pools = map[string]*sync.Pool{
	"gzip": {New: func() any {
		w, _ := gzip.NewWriterLevel(nil, gzipLevel) // the level is valid
		return writer(w)
	}},
	"zstd": {New: func() any {
		w, _ := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
			zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true)) // the options are valid
		return writer(w)
	}},
}

// Encoder compresses an answer.
type Encoder struct {
	coding string
	w      writer
	out    bytes.Buffer
	fresh  bool // something was written since the last flush
	closed bool
}

// New returns an Encoder of a coding, nil if too many are in use.
func New(coding string) *Encoder {
	if running.Add(1) > maxEncoders {
		running.Add(-1)
		return nil
	}
	e := &Encoder{coding: coding, w: pools[coding].Get().(writer)}
	e.w.Reset(&e.out)
	return e
}

// Write adds a part of the answer. After an error of the library the answer is lost.
func (e *Encoder) Write(p []byte) error {
	e.fresh = true
	_, err := e.w.Write(p)
	return err
}

// Flush has Bytes return all that was written. It reports whether that is anything new.
func (e *Encoder) Flush() (bool, error) {
	if !e.fresh {
		return false, nil
	}
	e.fresh = false
	return true, e.w.Flush()
}

// Close ends the answer: the rest of it is in Bytes.
func (e *Encoder) Close() error {
	if e.closed {
		return nil
	}
	e.closed, e.fresh = true, false
	return e.w.Close()
}

// Closed reports whether Close was called.
func (e *Encoder) Closed() bool { return e.closed }

// Bytes are what is compressed and was not taken. They are valid until the next call of another method.
func (e *Encoder) Bytes() []byte { return e.out.Bytes() }

// Take takes n of Bytes.
func (e *Encoder) Take(n int) { e.out.Next(n) }

// Release is the last call.
func (e *Encoder) Release() {
	e.w.Reset(nil)
	pools[e.coding].Put(e.w)
	e.w = nil
	running.Add(-1)
}
