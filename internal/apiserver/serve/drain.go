package serve

import (
	"context"
	"net/http"
	"time"
)

// drainGrace is how long requests that are in flight when the server stops may take. The generic server gives each its own time-out of
// a minute, which all of them take while the store does not answer.
const drainGrace = 10 * time.Second

// Drain ends the requests that a server which stops cannot finish in time.
type Drain struct {
	over context.Context
	end  context.CancelFunc
}

// NewDrain returns a Drain of a server that does not stop.
func NewDrain() *Drain {
	over, end := context.WithCancel(context.Background())
	return &Drain{over, end}
}

// Begin is called when the server begins to stop.
func (d *Drain) Begin() { time.AfterFunc(drainGrace, d.end) }

// Bounded ends the contexts of requests to h when the time of the server is over.
func (d *Drain) Bounded(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		defer context.AfterFunc(d.over, cancel)()
		h.ServeHTTP(w, r.WithContext(ctx))
	})
}
