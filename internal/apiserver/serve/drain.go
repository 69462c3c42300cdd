package serve

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// drainGrace is how long requests that are in flight when the server stops may take. The generic server gives each its own time-out of
// a minute, which all of them take while the store does not answer.
const drainGrace = 10 * time.Second

// endGrace is how long a server may take to end after its context. The client of etcd waits 20 s for a connection, whatever the context
// of the request that needs one.
const endGrace = drainGrace + 25*time.Second

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

// Over returns a context that ends when the time of the server is over.
func (d *Drain) Over() context.Context { return d.over }

// Run calls run, and returns what it returns. A run that has not returned endGrace after the end of ctx is left behind: the process
// ends.
func (d *Drain) Run(ctx context.Context, run func(context.Context) error) error {
	returned := make(chan error, 1)
	go func() { returned <- run(ctx) }()
	select {
	case err := <-returned:
		return err
	case <-ctx.Done():
	}
	limit := time.NewTimer(endGrace)
	defer limit.Stop()
	select {
	case err := <-returned:
		return err
	case <-limit.C:
		return fmt.Errorf("requests have not ended within %s; the store may not answer", endGrace)
	}
}

// Bounded ends the contexts of requests to h when the time of the server is over.
func (d *Drain) Bounded(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		defer context.AfterFunc(d.over, cancel)()
		h.ServeHTTP(w, r.WithContext(ctx))
	})
}
