// Package loop works through a queue of keys with several workers.
package loop

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
)

// Timeout bounds one pass of a loop over one key, all its calls together.
const Timeout = 30 * time.Second

// Loop works through a queue of keys. A key is worked on by one worker at a time;
// one that fails is retried with a backoff of up to maxBackoff.
type Loop[K comparable] struct {
	// Queue is where keys to work on are added.
	Queue   workqueue.TypedRateLimitingInterface[K]
	name    string
	log     *slog.Logger
	workers int
	sync    func(ctx context.Context, key K) error

	failures Failures
}

const (
	minBackoff = 5 * time.Millisecond
	maxBackoff = 30 * time.Second
)

// New returns a Loop whose workers call sync with one key after the other. name is for the
// log.
func New[K comparable](log *slog.Logger, name string, workers int, sync func(ctx context.Context, key K) error) *Loop[K] {
	return &Loop[K]{
		name: name, log: log, workers: workers, sync: sync,
		Queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[K](minBackoff, maxBackoff),
			workqueue.TypedRateLimitingQueueConfig[K]{Name: name}),
	}
}

// Run works until ctx ends and returns when the last worker has stopped.
func (l *Loop[K]) Run(ctx context.Context) {
	var workers sync.WaitGroup
	for range l.workers {
		workers.Go(func() {
			for l.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	l.Queue.ShutDown()
	workers.Wait()
}

func (l *Loop[K]) next(ctx context.Context) bool {
	key, stop := l.Queue.Get()
	if stop {
		return false
	}
	defer l.Queue.Done(key)
	if ctx.Err() != nil {
		return true
	}
	bounded, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	err := l.sync(bounded, key)
	switch {
	case err == nil:
		l.Queue.Forget(key)
	case ctx.Err() == nil:
		l.failures.Log(l.log, l.Queue.NumRequeues(key), err, "cannot sync; retrying", "controller", l.name, "object", key)
		l.Queue.AddRateLimited(key)
	}
	return true
}
