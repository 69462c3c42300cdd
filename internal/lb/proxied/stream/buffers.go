package stream

import "sync"

// smallBuffers are for heads of requests, most of which fit.
var (
	smallBuffers = sync.Pool{New: func() any { return new([4 << 10]byte) }}
	buffers      = sync.Pool{New: func() any { return new([16 << 10]byte) }}
)

// GetBuffer returns a buffer of 16 KiB.
func GetBuffer() []byte { return buffers.Get().(*[16 << 10]byte)[:] }

// GetSmallBuffer returns a buffer of 4 KiB.
func GetSmallBuffer() []byte { return smallBuffers.Get().(*[4 << 10]byte)[:] }

// PutBuffer takes back what was got from one of the pools. Others were made for a large head.
func PutBuffer(b []byte) {
	switch cap(b) {
	case 4 << 10:
		smallBuffers.Put((*[4 << 10]byte)(b[:cap(b)]))
	case 16 << 10:
		buffers.Put((*[16 << 10]byte)(b[:cap(b)]))
	}
}
