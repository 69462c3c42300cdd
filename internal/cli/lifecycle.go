package cli

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

// component is one long-running part of a process.
type component struct {
	name string
	// run works until ctx ends and returns when everything it started has
	// ended. An early return, even without an error, stops the process.
	run func(ctx context.Context) error
	// ready returns when the component does its work; nil means at once. The
	// next component starts after it.
	ready func(ctx context.Context) error
	// drain has clients turn to others while run still works, until it returns or
	// ctx ends; nil if there is nothing to do. All drain at once, and a component
	// is stopped when it has.
	drain func(ctx context.Context)
	// alive returns an error while the component hangs, as far as it can know; nil if it
	// cannot. systemd's watchdog restarts a process that is not alive (watchdog).
	alive func(ctx context.Context) error
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

// runAll starts the components in order, each when the one before is ready,
// calls up once all are, and waits. When ctx ends or a component does, all drain,
// and they are stopped in reverse order, each waited for, so that a component can
// still use those it was started after. One that has not ended within stopTimeout
// is named in the log and left behind.
func runAll(ctx context.Context, log *slog.Logger, up func(), components ...component) error {
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
		if c.ready == nil {
			continue
		}
		if err := dog.waitReady(ctx, c, failed); err != nil || ctx.Err() != nil {
			return err
		}
		log.Debug("component is ready", "component", c.name)
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
			releaseMemory(log)
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
	component
	cancel        context.CancelFunc // of run's context
	done, drained chan struct{}
}

// start runs c with a context that only stop ends.
func start(ctx context.Context, log *slog.Logger, c component, failed chan<- error) *started {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &started{component: c, cancel: cancel, done: make(chan struct{}), drained: make(chan struct{})}
	go func() {
		defer close(s.done)
		err := c.run(own)
		switch {
		case own.Err() != nil && (err == nil || errors.Is(err, context.Canceled)):
			return
		case own.Err() != nil:
			log.Warn("component did not stop cleanly", "component", c.name, "err", err)
		case err == nil:
			failed <- fmt.Errorf("%s %w", c.name, errEndedEarly)
		default:
			failed <- fmt.Errorf("%s: %w", c.name, err)
		}
	}()
	return s
}

// drain lets the component drain while it runs, for stopTimeout at most.
func (s *started) drain() {
	defer close(s.drained)
	if s.component.drain == nil {
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
	s.component.drain(ctx)
}

// stop ends the component when it has drained.
func (s *started) stop(log *slog.Logger) {
	<-s.drained
	s.cancel()
	limit := time.NewTimer(stopTimeout)
	defer limit.Stop()
	select {
	case <-s.done:
		log.Debug("component has stopped", "component", s.name)
	case <-limit.C:
		log.Error("component does not stop; leaving it behind", "component", s.name, "waited", stopTimeout)
	}
}

// waitReady waits until c is ready, and reports while it is not. It returns early, without an error, when ctx ends.
func (w *watchdog) waitReady(ctx context.Context, c component, failed <-chan error) error {
	for begin := time.Now(); ; {
		late, err := askReady(ctx, c, failed)
		if !late || ctx.Err() != nil {
			return err
		}
		args := []any{"component", c.name, "waited", time.Since(begin).Round(time.Second)}
		if err != context.DeadlineExceeded { //nolint:errorlint // alone it says no more than that
			args = append(args, "err", err)
		}
		w.log.Warn("component is not ready yet; waiting for it", args...)
		w.notify(systemd.Extend(2 * readyReport))
	}
}

// askReady waits for readyReport until c is ready. late is set if it was not in that time.
func askReady(ctx context.Context, c component, failed <-chan error) (late bool, err error) {
	limited, cancel := context.WithTimeout(ctx, readyReport)
	defer cancel()
	ready := make(chan error, 1)
	go func() { ready <- c.ready(limited) }()
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
		return false, fmt.Errorf("%s did not become ready: %w", c.name, err)
	}
}

// untilClosed returns a wait for the close of done, for component.ready.
func untilClosed(done <-chan struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// beside runs f until the returned function is called, which waits for its end.
func beside(ctx context.Context, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { f(ctx) })
	return func() { cancel(); running.Wait() }
}
