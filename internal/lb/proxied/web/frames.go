package web

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// frames follows what a client sends and bounds what package net/http does not, if that is HTTP/2 (RFC 9113): how long
// a header may take, and how many frames carry nothing. It sees the bytes after TLS.
type frames struct {
	net.Conn
	web *clientConn
	// must is set if nothing else than HTTP/2 was agreed on.
	must    bool
	timeout time.Duration
	err     error

	preface int // bytes of it so far
	is, not bool

	head  [9]byte // of a frame (section 4.1)
	have  int     // bytes of head
	left  int     // bytes of its payload to come
	block bool    // a header block has begun and not ended (section 4.3)
	// since is when what is incomplete has begun, zero if nothing is.
	since time.Time

	// empty is for frames that carry nothing, data for frames with parts of bodies, also of closed streams.
	empty, data allowance

	mu     sync.Mutex
	limits [2]time.Time // deadlines for reading: net/http's and our own
}

const (
	// emptyBurst and emptyRate (each second) bound frames other than DATA, as PING, SETTINGS, RST_STREAM, and HEADERS of
	// requests that are reset, beside emptyEach for every answer or part of a body that was carried: a client that has
	// answers has reason to ask more, to open windows and to measure round trips. Of DATA there may be as many beside one
	// for each byte that a Pod's request has taken.
	emptyBurst = 2000
	emptyRate  = 200
	emptyEach  = 8
)

// Types and flags of frames: RFC 9113, section 6.
const (
	frameData         = 0
	frameHeaders      = 1
	frameContinuation = 9

	flagEndStream  = 1
	flagEndHeaders = 4
)

var (
	errPreface = errors.New("no preface of HTTP/2")
	errFlood   = errors.New("too many frames that carry nothing")
)

// Read fails when a client asks for too much: then net/http closes the connection.
func (f *frames) Read(p []byte) (n int, err error) {
	err = panics.Err                                                      // if there is one
	defer f.web.engine.host.Panics().Recover(f.web.config.Service, f.web) // goroutines of net/http read
	return f.read(p)
}

func (f *frames) read(p []byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	n, err := f.Conn.Read(p)
	if n == 0 || f.not {
		return n, err
	}
	began := f.since
	if f.err = f.feed(p[:n]); f.err != nil {
		f.web.log("closed a connection of HTTP/2", f.err)
		return 0, f.err
	}
	if f.since != began {
		limit := time.Time{}
		if !f.since.IsZero() {
			limit = f.since.Add(f.timeout)
		}
		_ = f.limit(1, limit)
	}
	return n, err
}

// ownAnswer is how package net/http ends its answers to invalid requests (badRequestError in server.go, and 431).
const ownAnswer = "\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"

// Write records answers for which there is no exchange.
func (f *frames) Write(p []byte) (int, error) {
	n, err := f.Conn.Write(p)
	if c := f.web.config; c.Logs() && !f.is && len(p) < 512 && bytes.HasPrefix(p, []byte("HTTP/1.1 ")) &&
		bytes.Contains(p, []byte(ownAnswer)) {
		e := accesslog.Entry{Client: f.web.client, Before: -1, During: -1, After: -1}
		_, _ = fmt.Sscanf(string(p), "HTTP/1.1 %d", &e.Status)
		if f.web.secure {
			e.TLS(f.web.tls)
		}
		c.Record(e)
	}
	return n, err
}

// SetReadDeadline sets the deadline of net/http; the earlier of two counts.
func (f *frames) SetReadDeadline(t time.Time) error { return f.limit(0, t) }

// SetDeadline sets both.
func (f *frames) SetDeadline(t time.Time) error {
	return errors.Join(f.SetReadDeadline(t), f.SetWriteDeadline(t))
}

func (f *frames) limit(which int, t time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits[which] = t
	if other := f.limits[1-which]; t.IsZero() || !other.IsZero() && other.Before(t) {
		t = other
	}
	return f.Conn.SetReadDeadline(t)
}

// CloseWrite sends the end.
func (f *frames) CloseWrite() error {
	if s, ok := f.Conn.(stream.Conn); ok {
		return s.CloseWrite()
	}
	return nil
}

// feed takes the next bytes.
func (f *frames) feed(p []byte) error {
	for !f.is {
		if len(p) == 0 {
			return nil
		}
		if p[0] != wholePreface[f.preface] {
			if f.must {
				return errPreface
			}
			f.not = true
			return nil
		}
		p = p[1:]
		if f.preface++; f.preface == len(wholePreface) {
			f.is = true
			f.empty.left, f.data.left = emptyBurst, emptyBurst
			f.web.multiplexed.Store(true)
		}
	}
	whole := false // something has been completed
	for len(p) > 0 {
		if f.left > 0 {
			n := min(f.left, len(p))
			f.left -= n
			p = p[n:]
		} else {
			n := copy(f.head[f.have:], p)
			f.have += n
			p = p[n:]
			if f.have < len(f.head) {
				break
			}
			f.have, f.left = 0, int(f.head[0])<<16|int(f.head[1])<<8|int(f.head[2])
			if err := f.begin(); err != nil {
				return err
			}
		}
		whole = whole || f.left == 0 && !f.block
	}
	switch {
	case f.have == 0 && !f.block && (f.left == 0 || f.head[3] == frameData):
		f.since = time.Time{}
	case f.since.IsZero() || whole:
		f.since = time.Now()
	}
	return nil
}

// begin takes the head of a frame.
func (f *frames) begin() error {
	kind, flags := f.head[3], f.head[4]
	switch kind {
	case frameHeaders, frameContinuation:
		f.block = flags&flagEndHeaders == 0
	case frameData:
		if f.left > 0 {
			return f.data.spend(1, &f.web.taken)
		}
		if flags&flagEndStream != 0 {
			return nil
		}
	}
	return f.empty.spend(emptyEach, &f.web.carries)
}

// allowance is how many frames a client may still send.
type allowance struct {
	left float64
	paid time.Time
}

// spend takes a frame into account. earned is what has been carried since the last time, each of which allows for
// so many more.
func (a *allowance) spend(each float64, earned *atomic.Int64) error {
	if a.left--; a.left >= 0 {
		return nil
	}
	now := time.Now()
	a.left = min(emptyBurst, a.left+emptyRate*min(1, now.Sub(a.paid).Seconds())+each*float64(earned.Swap(0)))
	a.paid = now
	if a.left < 0 {
		return errFlood
	}
	return nil
}
