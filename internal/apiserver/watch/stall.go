package watch

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// stallChunk is what a client must read within StallOptions.Limit, in bytes.
const stallChunk = 32 << 10

// stallGrace is the part of that time after which the whole connection of a stream ends that could not be
// ended by itself.
const stallGrace = 4

// stalledResponses counts the responses that no client read.
var stalledResponses = sync.OnceValue(func() *metrics.Counter { //nolint:gochecknoglobals // the registry is global, too
	c := metrics.NewCounter(&metrics.CounterOpts{
		Name: "fairlead_apiserver_stalled_responses_total", StabilityLevel: metrics.ALPHA,
		Help: "Watches and other responses that were ended because the client did not read.",
	})
	legacyregistry.MustRegister(c)
	return c
})

// StallOptions configure EndStalled.
type StallOptions struct {
	// Limit is how long a client may not read at all while there is something to send to it.
	Limit time.Duration
	// Requests and LongRunning tell requests apart, as the server does.
	Requests    request.RequestInfoResolver
	LongRunning request.LongRunningRequestCheck
	// Reset ends the connection of a client at once.
	Reset func(client string, local net.Addr)
	Log   *slog.Logger
}

// EndStalled ends watches and answers that their clients do not read: each holds the
// encoded object that it could not send, and the events behind it. The watch cache drops
// such a watcher only when there are further events, and leaves its goroutine blocked.
// Logs, proxies and the like may pause.
func EndStalled(next http.Handler, o StallOptions) http.Handler {
	count := stalledResponses()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, err := o.Requests.NewRequestInfo(r)
		if err != nil || info.Verb != "watch" && o.LongRunning(r, info) {
			next.ServeHTTP(w, r)
			return
		}
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		g := &stallGuard{ResponseWriter: w, client: r.RemoteAddr, limit: o.Limit, began: time.Now()}
		g.timedOut = func() {
			if r.Context().Err() == nil { // else the client has gone
				o.Log.Warn("a request was not answered in time", "method", r.Method, "path", r.URL.Path, "client", r.RemoteAddr,
					"after", time.Since(g.began).Round(time.Millisecond))
			}
		}
		g.ended = func() {
			count.Inc()
			o.Log.Info("a client does not read; ending the response", "client", r.RemoteAddr, "path", r.URL.Path,
				"after", g.idle().Round(time.Millisecond))
		}
		g.reset = func() {
			if local != nil {
				o.Reset(r.RemoteAddr, local)
			}
		}
		defer g.stop()
		if info.Verb == "watch" {
			r = r.WithContext(context.WithValue(r.Context(), guardKey{}, g))
		}
		next.ServeHTTP(responsewriter.WrapForHTTP1Or2(g), r)
	})
}

// stallGuard is a response whose writes end when the client reads nothing of them for
// limit.
type stallGuard struct {
	http.ResponseWriter
	client       string // the peer of the connection
	limit        time.Duration
	ended, reset func()
	timedOut     func() // called when the answer is 504

	budget *Budget // nil for a request that is not a watch
	owner  *userWatches

	// writing is when the write that goes on began, by now; 0 while there is none. armed is
	// whether the timer will look at it. A write thus costs neither a lock nor a timer.
	writing atomic.Int64
	armed   atomic.Bool
	began   time.Time

	mu       sync.Mutex
	timer    *time.Timer // made by the first write
	hijacked net.Conn    // of a watch over WebSocket
	stalled  bool
	stopped  bool
}

// Unwrap returns the response below.
func (g *stallGuard) Unwrap() http.ResponseWriter { return g.ResponseWriter }

// WriteHeader sends the header.
func (g *stallGuard) WriteHeader(code int) {
	if code == http.StatusGatewayTimeout {
		g.timedOut()
	}
	g.ResponseWriter.WriteHeader(code)
}

// Write sends p.
func (g *stallGuard) Write(p []byte) (n int, err error) { return g.write(g.ResponseWriter, p) }

// write sends p to the writer below, in parts, so that a client that reads slowly counts as one that reads.
func (g *stallGuard) write(below io.Writer, p []byte) (n int, err error) {
	// What is small is not worth the lock. It waits in other places, too.
	if g.budget != nil && len(p) > stallChunk {
		g.budget.add(g, int64(len(p)))
		defer g.budget.add(g, -int64(len(p)))
	}
	for err == nil {
		var k int
		g.begin()
		k, err = below.Write(p[n:min(len(p), n+stallChunk)])
		g.end()
		if n += k; n >= len(p) {
			break
		}
	}
	return n, err
}

// Flush sends what is buffered.
func (g *stallGuard) Flush() {
	if f, ok := g.ResponseWriter.(http.Flusher); ok {
		g.begin()
		defer g.end()
		f.Flush()
	}
}

// Hijack gives the connection to a watch over WebSocket, whose writes count and end like others.
func (g *stallGuard) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(g.ResponseWriter).Hijack()
	if err != nil {
		return conn, rw, err
	}
	g.mu.Lock()
	g.hijacked = conn
	g.mu.Unlock()
	c := stallConn{conn, g}
	return c, bufio.NewReadWriter(rw.Reader, bufio.NewWriter(c)), nil
}

// stallConn is a connection whose writes end when the peer does not read.
type stallConn struct {
	net.Conn
	guard *stallGuard
}

// Write sends p.
func (c stallConn) Write(p []byte) (int, error) { return c.guard.write(c.Conn, p) }

// now is the time since the request began, never 0.
func (g *stallGuard) now() time.Duration { return time.Since(g.began) + 1 }

func (g *stallGuard) begin() {
	g.writing.Store(int64(g.now()))
	if !g.armed.Load() {
		g.arm(g.limit)
	}
}

func (g *stallGuard) end() { g.writing.Store(0) }

// idle returns how long the client has not read what is being written, 0 if nothing is.
func (g *stallGuard) idle() time.Duration {
	since := g.writing.Load()
	if since == 0 {
		return 0
	}
	return g.now() - time.Duration(since)
}

// cut ends the response at once.
func (g *stallGuard) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped || g.stalled {
		return
	}
	grace := g.finish()
	if g.timer != nil {
		g.timer.Reset(grace)
	}
}

// arm calls expired after d, unless the timer is set already.
func (g *stallGuard) arm(d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped || !g.armed.CompareAndSwap(false, true) {
		return
	}
	if g.timer == nil {
		g.timer = time.AfterFunc(d, g.expired)
		return
	}
	g.timer.Reset(d)
}

// stop must be called before the handler of the request returns: a response must not be
// touched after that.
func (g *stallGuard) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped = true
	if g.timer != nil {
		g.timer.Stop()
	}
}

// expired ends the response if a write goes on for too long, and the connection if that
// does not help: HTTP/2 cannot announce the end of a stream on a connection from which the client does not
// read.
func (g *stallGuard) expired() {
	g.armed.Store(false)
	since := g.writing.Load()
	if since == 0 {
		return // the next write arms it again
	}
	if again := g.check(since); again > 0 {
		g.arm(again)
	}
}

// check ends the response or the connection if the write that began at since goes on for
// too long, and returns after which time to look again, 0 for never.
func (g *stallGuard) check(since int64) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	limit := g.limit
	if g.stalled {
		limit = g.grace()
	}
	if g.stopped {
		return 0
	}
	if left := limit - (g.now() - time.Duration(since)); left > 0 {
		return left
	}
	if g.stalled {
		g.reset()
		return 0
	}
	return g.finish()
}

// finish ends the response, and returns after which time to look whether that helped. The caller holds g.mu.
func (g *stallGuard) finish() time.Duration {
	g.stalled = true
	g.ended()
	over := time.Now().Add(-time.Second)
	if g.hijacked != nil {
		_ = g.hijacked.SetWriteDeadline(over)
	} else {
		_ = http.NewResponseController(g.ResponseWriter).SetWriteDeadline(over)
	}
	if since := g.writing.Load(); since != 0 {
		g.writing.CompareAndSwap(since, int64(g.now())) // the grace begins now
	}
	return g.grace()
}

// grace is how long a response that was ended may go on until its connection ends.
func (g *stallGuard) grace() time.Duration { return max(g.limit/stallGrace, time.Second) }
