package proxied

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

// panics counts and reports panics of goroutines that serve foreign bytes: each ends what that goroutine served, and not the
// process.
type panics struct {
	log   *slog.Logger
	count atomic.Uint64

	mu     sync.Mutex
	logged time.Time
}

// panicInterval is how often a panic is logged at most.
const panicInterval = time.Second

// errPanic is what a function returns that recovers from a panic.
var errPanic = errors.New("a panic, which was logged")

// recover ends a panic of the function that defers it, counts and reports it, and closes the served connections.
func (p *panics) recover(service svc.Name, served ...io.Closer) {
	value := recover()
	if value == nil {
		return
	}
	p.report(service, value)
	for _, c := range served {
		_ = c.Close()
	}
}

// abort does as recover does for a handler of package net/http, which then resets the stream or closes the connection.
func (p *panics) abort(service svc.Name) {
	value := recover()
	if value == nil {
		return
	}
	if err, _ := value.(error); !errors.Is(err, http.ErrAbortHandler) { // which package httputil has when an answer breaks off
		p.report(service, value)
	}
	panic(http.ErrAbortHandler)
}

// report is called by the function that has recovered, so that the stack is that of the panic.
func (p *panics) report(service svc.Name, value any) {
	p.count.Add(1)
	now := time.Now()
	p.mu.Lock()
	due := now.Sub(p.logged) >= panicInterval
	if due {
		p.logged = now
	}
	p.mu.Unlock()
	if due {
		p.log.Error("dropped a connection, request or datagram after a panic", "service", service, "err", fmt.Sprint(value),
			"stack", string(debug.Stack()))
	}
}
