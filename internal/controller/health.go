package controller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// HealthTimeout is how long the leader may go without a successful request before it
// counts as cut off. It renews its Lease every two seconds.
const HealthTimeout = 20 * time.Second

// Health is what Run tells about itself; its zero value is that of controllers that
// have not begun. It may be used by several goroutines.
type Health struct {
	// Timeout overrides HealthTimeout.
	Timeout time.Duration

	mu        sync.Mutex
	working   bool
	led       bool      // since the last success at the latest
	succeeded time.Time // the last request that did, or the begin of the work
	failure   error     // of the last request; nil if it succeeded
}

// Check returns an error if these controllers lead, or have led until they were cut
// off, and no request of theirs succeeds. Those that wait for the Lease are healthy.
func (h *Health) Check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	limit := h.Timeout
	if limit == 0 {
		limit = HealthTimeout
	}
	since := time.Since(h.succeeded)
	if !h.led || h.failure == nil || since < limit {
		return nil
	}
	return fmt.Errorf("no request to the API has succeeded for %s: %w", since.Round(time.Second), h.failure)
}

// during calls work as the leader's.
func (h *Health) during(ctx context.Context, work func(context.Context) error) error {
	h.mu.Lock()
	h.working, h.led, h.succeeded = true, true, time.Now()
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.working = false
	}()
	return work(ctx)
}

// observe has the results of all requests of a client counted.
func (h *Health) observe(c *rest.Config) {
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return observed{next, h} })
}

func (h *Health) record(failure error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failure = failure
	if failure == nil {
		h.succeeded, h.led = time.Now(), h.working
	}
}

type observed struct {
	next   http.RoundTripper
	health *Health
}

// RoundTrip counts as failed what no request should meet: no answer, a client that is
// not recognized or may not, a server that cannot. One whose store is full can.
func (o observed) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := o.next.RoundTrip(r)
	switch {
	case errors.Is(err, context.Canceled):
	case err != nil:
		o.health.record(err)
	case resp.StatusCode == http.StatusUnauthorized, resp.StatusCode == http.StatusForbidden,
		resp.StatusCode >= http.StatusInternalServerError && resp.StatusCode != http.StatusInsufficientStorage:
		o.health.record(errors.New(resp.Status))
	default:
		o.health.record(nil)
	}
	return resp, err
}
