package controller

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
)

// writeTimeout bounds one pass of a loop over one key, all its calls together.
const writeTimeout = 30 * time.Second

// loop works through a queue of keys. A key is worked on by one worker at a time;
// one that fails is retried with a backoff of up to maxBackoff.
type loop[K comparable] struct {
	name    string
	log     *slog.Logger
	queue   workqueue.TypedRateLimitingInterface[K]
	workers int
	sync    func(ctx context.Context, key K) error
}

const (
	minBackoff = 5 * time.Millisecond
	maxBackoff = 30 * time.Second
	// warnAfter is how many failures in a row are logged as a warning.
	warnAfter = 8
)

func newLoop[K comparable](s *controllerContext, name string, workers int, sync func(ctx context.Context, key K) error) *loop[K] {
	return &loop[K]{
		name: name, log: s.log, workers: workers, sync: sync,
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[K](minBackoff, maxBackoff),
			workqueue.TypedRateLimitingQueueConfig[K]{Name: name}),
	}
}

// run works until ctx ends and returns when the last worker has stopped.
func (l *loop[K]) run(ctx context.Context) {
	var workers sync.WaitGroup
	for range l.workers {
		workers.Go(func() {
			for l.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	l.queue.ShutDown()
	workers.Wait()
}

func (l *loop[K]) next(ctx context.Context) bool {
	key, stop := l.queue.Get()
	if stop {
		return false
	}
	defer l.queue.Done(key)
	if ctx.Err() != nil {
		return true
	}
	bounded, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := l.sync(bounded, key)
	switch {
	case err == nil:
		l.queue.Forget(key)
	case ctx.Err() == nil:
		l.log.Debug("cannot sync; retrying", "controller", l.name, "object", key, "err", err)
		if l.queue.NumRequeues(key) == warnAfter {
			l.log.Warn("cannot sync; still retrying", "controller", l.name, "object", key, "failures", warnAfter, "err", err)
		}
		l.queue.AddRateLimited(key)
	}
	return true
}

// tasks are functions that run side by side until their context ends.
type tasks struct {
	list []func(ctx context.Context)
}

func (t *tasks) add(run func(ctx context.Context)) { t.list = append(t.list, run) }

func (t *tasks) run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, run := range t.list {
		wg.Go(func() { run(ctx) })
	}
	wg.Wait()
}
