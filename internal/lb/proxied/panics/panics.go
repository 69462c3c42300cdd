// Package panics is how the proxied way survives a panic: it costs a connection or a request, and not the process.
package panics

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Counter counts and reports panics of goroutines that serve foreign bytes: each ends what that goroutine served, and not the
// process.
type Counter struct {
	log   *slog.Logger
	count atomic.Uint64

	mu     sync.Mutex
	logged time.Time
}

// panicInterval is how often a panic is logged at most.
const panicInterval = time.Second

// Err is what a function returns that recovers from a panic.
var Err = errors.New("a panic, which was logged")

// New returns a Counter that reports to log.
func New(log *slog.Logger) *Counter { return &Counter{log: log} }

// Count returns how many panics there were.
func (c *Counter) Count() uint64 { return c.count.Load() }

// Recover ends a panic of the function that defers it, counts and reports it, and closes the served connections.
func (c *Counter) Recover(service svc.Name, served ...io.Closer) {
	value := recover()
	if value == nil {
		return
	}
	c.report(service, value)
	for _, s := range served {
		_ = s.Close()
	}
}

// Abort does as Recover does for a handler of package net/http, which then resets the stream or closes the connection.
func (c *Counter) Abort(service svc.Name) {
	value := recover()
	if value == nil {
		return
	}
	if err, _ := value.(error); !errors.Is(err, http.ErrAbortHandler) { // which package httputil has when an answer breaks off
		c.report(service, value)
	}
	panic(http.ErrAbortHandler)
}

// report is called by the function that has recovered, so that the stack is that of the panic.
func (c *Counter) report(service svc.Name, value any) {
	c.count.Add(1)
	now := time.Now()
	c.mu.Lock()
	due := now.Sub(c.logged) >= panicInterval
	if due {
		c.logged = now
	}
	c.mu.Unlock()
	if due {
		c.log.Error("dropped a connection, request or datagram after a panic", "service", service, "err", fmt.Sprint(value),
			"stack", string(debug.Stack()))
	}
}
