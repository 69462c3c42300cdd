// Package act does on a cluster what the steps of a migration need: it applies and removes the objects of a manifest, waits for
// a condition, and runs a Pod once. What it does may be done again after an interruption.
package act

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/kubernetes"
)

// Manager is the field manager of what a migration writes.
const Manager = "fairlead-migrate"

// poll is the time between two looks at an object that is waited for.
const poll = 500 * time.Millisecond

// Cluster is a cluster on which a migration acts.
type Cluster struct {
	Client kubernetes.Interface
	// Timeout bounds each wait.
	Timeout time.Duration
}

// Within is Await with a context that ends after the Timeout.
func (c *Cluster) Within(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	return c.Await(ctx, func() error { return check(ctx) })
}

// Await calls check until it returns nil or ctx ends. Its error is the last of check before that.
func (c *Cluster) Await(ctx context.Context, check func() error) (err error) {
	again := time.NewTicker(poll)
	defer again.Stop()
	for {
		now := check()
		if now == nil {
			return nil
		}
		if err == nil || ctx.Err() == nil { // not that of a request that was cut off
			err = now
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (waited %s)", err, c.Timeout)
		case <-again.C:
		}
	}
}
