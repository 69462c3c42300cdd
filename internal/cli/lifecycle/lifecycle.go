// Package lifecycle runs the components of a process: it starts them in order, reports to
// systemd that they are ready and alive, drains and stops them in reverse order, and keeps
// the memory of the process small.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/systemd"
)

// Component is one long-running part of a process.
type Component struct {
	Name string
	// Run works until ctx ends and returns when everything it started has
	// ended. An early return, even without an error, stops the process.
	Run func(ctx context.Context) error
	// Ready returns when the component does its work; nil means at once. The
	// next component starts after it.
	Ready func(ctx context.Context) error
	// Drain makes clients turn to others while Run still works, until it returns or
	// ctx ends; nil if there is nothing to do. All drain at once, and a component
	// is stopped when it has.
	Drain func(ctx context.Context)
	// Alive returns an error while the component hangs, as far as it can know; nil if it
	// cannot. systemd's watchdog restarts a process that is not alive (watchdog).
	Alive func(ctx context.Context) error
}

// readyReport is how often a component is named that is not ready yet. There is no bound: a server of several
// waits for the others, however late they are, and ending it would only begin its start again.
const readyReport = time.Minute

// stopTimeout bounds the wait for the end of one component. It is longer than
// any of them gives its own work to finish.
const stopTimeout = 60 * time.Second

// settleAfter is when the work of the start is over and its memory is released.
const settleAfter = 3 * time.Second

var errEndedEarly = errors.New("ended by itself")

// RunAll starts the components in order, each when the one before is ready,
// calls up once all are, and waits. When ctx ends or a component does, all drain,
// and they are stopped in reverse order, each waited for, so that a component can
// still use those it was started after. One that has not ended within stopTimeout
// is named in the log and left behind.
func RunAll(ctx context.Context, log *slog.Logger, up func(), components ...Component) error {
	dog := &watchdog{unit: systemd.OpenUnit(), log: log, components: components} // before a component could take the unit for its own
	failed := make(chan error, len(components))
	var running []*started
	defer func() {
		dog.notify(systemd.Stopping)
		for _, s := range running {
			go s.drain()
		}
		for _, s := range slices.Backward(running) {
			s.stop(log)
		}
	}()
	for _, c := range components {
		running = append(running, start(ctx, log, c, failed))
		if c.Ready == nil {
			continue
		}
		if err := dog.waitReady(ctx, c, failed); err != nil || ctx.Err() != nil {
			return err
		}
		log.Debug("component is ready", "component", c.Name)
	}
	up()
	dog.notify(systemd.Ready)
	settled := time.NewTimer(settleAfter)
	defer settled.Stop()
	ticks, stop := dog.ticks()
	defer stop()
	for {
		select {
		case <-settled.C:
			ReleaseMemory(log)
		case <-ticks:
			dog.look(ctx)
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		}
	}
}

// started is a component that runs or has run.
type started struct {
	Component
	cancel        context.CancelFunc // of run's context
	done, drained chan struct{}
}

// start runs c with a context that only stop ends.
func start(ctx context.Context, log *slog.Logger, c Component, failed chan<- error) *started {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &started{Component: c, cancel: cancel, done: make(chan struct{}), drained: make(chan struct{})}
	go func() {
		defer close(s.done)
		err := c.Run(own)
		switch {
		case own.Err() != nil && (err == nil || errors.Is(err, context.Canceled)):
			return
		case own.Err() != nil:
			log.Warn("component did not stop cleanly", "component", c.Name, "err", err)
		case err == nil:
			failed <- fmt.Errorf("%s %w", c.Name, errEndedEarly)
		default:
			failed <- fmt.Errorf("%s: %w", c.Name, err)
		}
	}()
	return s
}

// drain lets the component drain while it runs, for stopTimeout at most.
func (s *started) drain() {
	defer close(s.drained)
	if s.Component.Drain == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	go func() {
		select {
		case <-s.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	s.Component.Drain(ctx)
}

// stop ends the component when it has drained.
func (s *started) stop(log *slog.Logger) {
	<-s.drained
	s.cancel()
	limit := time.NewTimer(stopTimeout)
	defer limit.Stop()
	select {
	case <-s.done:
		log.Debug("component has stopped", "component", s.Name)
	case <-limit.C:
		log.Error("component does not stop; leaving it behind", "component", s.Name, "waited", stopTimeout)
	}
}

// waitReady waits until c is ready, and reports while it is not. It returns early, without an error, when ctx ends.
func (w *watchdog) waitReady(ctx context.Context, c Component, failed <-chan error) error {
	for begin := time.Now(); ; {
		late, err := askReady(ctx, c, failed)
		if !late || ctx.Err() != nil {
			return err
		}
		args := []any{"component", c.Name, "waited", time.Since(begin).Round(time.Second)}
		if err != context.DeadlineExceeded { //nolint:errorlint // without another error it has no more to report
			args = append(args, "err", err)
		}
		w.log.Warn("component is not ready yet; waiting for it", args...)
		w.notify(systemd.Extend(2 * readyReport))
	}
}

// askReady waits for readyReport until c is ready. late is set if it was not in that time.
func askReady(ctx context.Context, c Component, failed <-chan error) (late bool, err error) {
	limited, cancel := context.WithTimeout(ctx, readyReport)
	defer cancel()
	ready := make(chan error, 1)
	go func() { ready <- c.Ready(limited) }()
	select {
	case err := <-failed:
		cancel()
		if late := <-ready; late != nil && !errors.Is(late, context.Canceled) {
			return false, errors.Join(err, late)
		}
		return false, err
	case err := <-ready:
		switch {
		case err == nil || ctx.Err() != nil:
			return false, nil
		case limited.Err() != nil:
			return true, err
		}
		return false, fmt.Errorf("%s did not become ready: %w", c.Name, err)
	}
}

// UntilClosed returns a wait for the close of done, for component.ready.
func UntilClosed(done <-chan struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Beside runs f until the returned function is called, which waits for its end.
func Beside(ctx context.Context, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { f(ctx) })
	return func() { cancel(); running.Wait() }
}

// UntilTrue polls a cheap condition that signals nothing.
func UntilTrue(ctx context.Context, cond func() bool) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}
