package stream

import (
	"net"
	"sync"
	"time"
)

// Bandwidth limits the bytes per second to the clients of a Service. Its connections take turns.
type Bandwidth struct {
	mu sync.Mutex
	// each is how long a byte takes, in nanoseconds; 0 without a limit.
	each float64
	// free is when all bytes so far have gone out at that rate.
	free time.Time
}

// Burst is for how long a Service that was silent may exceed its limit.
const Burst = 100 * time.Millisecond

// Set makes the limit be so many Mbit/s, none with 0.
func (b *Bandwidth) Set(mbps int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.each = 0
	if mbps > 0 {
		b.each = 8e3 / float64(mbps)
	}
}

// Take returns how long to wait before n bytes are sent.
func (b *Bandwidth) Take(n int, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.each == 0 {
		return 0
	}
	if earliest := now.Add(-Burst); b.free.Before(earliest) {
		b.free = earliest
	}
	b.free = b.free.Add(time.Duration(float64(n) * b.each))
	return max(0, b.free.Sub(now))
}

// Limited is a connection to a client with a bandwidth.
type Limited struct {
	*net.TCPConn
	limit *Bandwidth
	ended <-chan struct{} // of the Server

	mu           sync.Mutex
	writeTimeout time.Duration // as of the last SetWriteDeadline, 0 without a limit
}

// NewLimited returns conn with a limit. What waits for its turn fails when ended is closed.
func NewLimited(conn *net.TCPConn, limit *Bandwidth, ended <-chan struct{}) *Limited {
	return &Limited{TCPConn: conn, limit: limit, ended: ended}
}

// SetWriteDeadline is for how long a write may take once it may begin.
func (l *Limited) SetWriteDeadline(t time.Time) error {
	l.mu.Lock()
	l.writeTimeout = 0
	if !t.IsZero() {
		l.writeTimeout = max(time.Until(t), 1)
	}
	l.mu.Unlock()
	return l.TCPConn.SetWriteDeadline(t)
}

// Write waits for its turn.
func (l *Limited) Write(p []byte) (n int, err error) {
	const most = 16 << 10
	for n < len(p) {
		part := p[n:min(n+most, len(p))]
		if wait := l.limit.Take(len(part), time.Now()); wait > 0 {
			timer := time.NewTimer(wait)
			select {
			case <-l.ended:
				timer.Stop()
				return n, net.ErrClosed
			case <-timer.C:
			}
			l.mu.Lock()
			writeTimeout := l.writeTimeout
			l.mu.Unlock()
			if writeTimeout > 0 {
				if err := l.TCPConn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
					return n, err
				}
			}
		}
		written, err := l.TCPConn.Write(part)
		if n += written; err != nil {
			return n, err
		}
	}
	return n, nil
}
