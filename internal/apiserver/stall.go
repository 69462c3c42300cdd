package apiserver

import (
	"bufio"
	"net"
	"net/http"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// stallChunk is what a client must read within Options.StallTimeout, in bytes.
const stallChunk = 32 << 10

// stallGrace is the part of that time after which the whole connection of a stream is
// ended that could not be ended alone.
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

// endStalled ends watches and answers that their clients do not read: each holds the
// encoded object that it could not send, and the events behind it. The watch cache drops
// such a watcher only when there are further events, and leaves its goroutine blocked.
// Logs, proxies and the like may pause.
func (s *Server) endStalled(next http.Handler, c *genericapiserver.Config) http.Handler {
	count := stalledResponses()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, err := c.RequestInfoResolver.NewRequestInfo(r)
		if err != nil || info.Verb != "watch" && c.LongRunningFunc(r, info) {
			next.ServeHTTP(w, r)
			return
		}
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		g := &stallGuard{ResponseWriter: w, limit: s.opts.StallTimeout}
		began := time.Now()
		g.timedOut = func() {
			if r.Context().Err() == nil { // else the client has gone
				s.log.Warn("a request was not answered in time", "method", r.Method, "path", r.URL.Path, "client", r.RemoteAddr,
					"after", time.Since(began).Round(time.Millisecond))
			}
		}
		g.ended = func() {
			count.Inc()
			s.log.Info("a client does not read; ending the response", "client", r.RemoteAddr, "path", r.URL.Path, "after", s.opts.StallTimeout)
		}
		g.reset = func() {
			if local != nil {
				s.listener.reset(r.RemoteAddr, local)
			}
		}
		defer g.stop()
		next.ServeHTTP(responsewriter.WrapForHTTP1Or2(g), r)
	})
}

// stallGuard is a response whose writes end when the client reads nothing of them for
// limit.
type stallGuard struct {
	http.ResponseWriter
	limit        time.Duration
	ended, reset func()
	timedOut     func() // called when the answer is 504

	mu      sync.Mutex
	timer   *time.Timer // made by the first write
	writing bool
	stalled bool
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
func (g *stallGuard) Write(p []byte) (n int, err error) {
	for err == nil {
		var k int
		g.begin()
		k, err = g.ResponseWriter.Write(p[n:min(len(p), n+stallChunk)])
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

// Hijack gives the connection to a watch over WebSocket.
func (g *stallGuard) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(g.ResponseWriter).Hijack()
	if err != nil {
		return conn, rw, err
	}
	c := stallConn{conn, g.limit}
	return c, bufio.NewReadWriter(rw.Reader, bufio.NewWriter(c)), nil
}

// stallConn is a connection whose writes end when the peer does not read.
type stallConn struct {
	net.Conn
	limit time.Duration
}

// Write sends p.
func (c stallConn) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (g *stallGuard) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writing = true
	if g.timer == nil {
		g.timer = time.AfterFunc(g.limit, g.expired)
		return
	}
	g.timer.Reset(g.limit)
}

func (g *stallGuard) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writing = false
	g.timer.Stop()
}

func (g *stallGuard) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer != nil {
		g.timer.Stop()
	}
}

// expired ends the response, and the connection if that does not help: HTTP/2 cannot
// even say that it ends a stream on a connection from which the client does not read.
func (g *stallGuard) expired() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.writing {
		return // the write has ended meanwhile
	}
	if g.stalled {
		g.reset()
		return
	}
	g.stalled = true
	g.ended()
	_ = http.NewResponseController(g.ResponseWriter).SetWriteDeadline(time.Now().Add(-time.Second))
	g.timer.Reset(max(g.limit/stallGrace, time.Second))
}
