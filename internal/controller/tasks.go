package controller

import (
	"context"
	"sync"
)

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
