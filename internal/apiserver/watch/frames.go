package watch

import (
	"encoding/binary"
	"io"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
)

// wholeFrame is up to which size, in bytes, an event is copied behind its length.
const wholeFrame = 64 << 10

// WholeFrames is a serializer whose watches write an event in protobuf in one piece.
// Package framer of k8s.io/apimachinery writes its length and then the rest, and each of
// these goes through every layer of the response.
type WholeFrames struct{ runtime.NegotiatedSerializer }

// SupportedMediaTypes returns the media types of the serializer.
func (s WholeFrames) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := slices.Clone(s.NegotiatedSerializer.SupportedMediaTypes())
	for i, info := range infos {
		if info.MediaType != runtime.ContentTypeProtobuf || info.StreamSerializer == nil {
			continue
		}
		stream := *info.StreamSerializer
		stream.Framer = wholeFramer{stream.Framer}
		infos[i].StreamSerializer = &stream
	}
	return infos
}

// wholeFramer is a framer that puts the length of a frame before it.
type wholeFramer struct{ runtime.Framer }

// NewFrameWriter returns a writer of frames to w.
func (wholeFramer) NewFrameWriter(w io.Writer) io.Writer { return frameWriter{w} }

// frameWriter writes each p behind its length.
type frameWriter struct{ w io.Writer }

// frameBuffers are not kept by watches, which are many and mostly idle.
var frameBuffers = sync.Pool{New: func() any { return new([]byte) }} //nolint:gochecknoglobals // a pool

// Write writes p as one frame.
func (f frameWriter) Write(p []byte) (int, error) {
	buf := frameBuffers.Get().(*[]byte)
	frame := binary.BigEndian.AppendUint32((*buf)[:0], uint32(len(p)))
	rest := p
	if len(p) <= wholeFrame {
		frame, rest = append(frame, p...), nil
	}
	err := writeAll(f.w, frame)
	if err == nil && rest != nil {
		err = writeAll(f.w, rest)
	}
	if err != nil {
		return 0, err // the response may still refer to the buffer
	}
	*buf = frame
	frameBuffers.Put(buf)
	return len(p), nil
}

// writeAll writes p, or fails.
func writeAll(w io.Writer, p []byte) error {
	n, err := w.Write(p)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return err
}
