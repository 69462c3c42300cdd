package pod

import (
	"context"
	"fmt"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/status"
)

// ending is the termination of a pod in progress.
type ending struct {
	at    time.Time
	grace time.Duration
}

func (e *ending) shorten(grace time.Duration) { e.grace = min(e.grace, max(grace, 0)) }

func (e *ending) deadline() time.Time { return e.at.Add(e.grace) }

// stopping is the termination of a container in progress.
type stopping struct {
	deadline time.Time
	killed   time.Time
}

// killRetry is the time between two SIGKILLs to a container that does not end.
const killRetry = 5 * time.Second

// endContainers takes the next step in stopping the containers: the main ones
// and init containers together, then sidecars in reverse order. It returns
// when to call it again and whether all have ended.
func (w *worker) endContainers(ctx context.Context) (next time.Time, ended bool) {
	ended = true
	for _, c := range w.containers {
		if c.Running() && c.Role != status.Sidecar {
			ended = false
			c.stop(ctx, w.ending.deadline(), "Stopping container "+c.Spec.Name)
			next = earlier(next, c.enforceStop(ctx))
		}
	}
	for i := len(w.containers) - 1; i >= 0 && ended; i-- {
		if c := w.containers[i]; c.Running() {
			ended = false
			c.stop(ctx, w.ending.deadline(), "Stopping container "+c.Spec.Name)
			next = earlier(next, c.enforceStop(ctx))
		}
	}
	return next, ended
}

// stop starts to stop a running container: the preStop hook, then SIGTERM, and
// SIGKILL at the deadline. Of several calls the earliest deadline counts.
func (c *container) stop(ctx context.Context, deadline time.Time, why string) {
	if c.stopped != nil {
		if deadline.Before(c.stopped.deadline) {
			c.stopped.deadline = deadline
		}
		return
	}
	c.stopped = &stopping{deadline: deadline}
	pod := c.w.object()
	if pod != nil {
		c.w.event(pod, corev1.EventTypeNormal, "Killing", why)
	}
	if !time.Now().Before(deadline) {
		return // enforceStop kills it at once
	}
	id := c.Now.ID
	terminate := func() {
		if c.Running() && c.Now.ID == id {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			if err := c.w.sandbox.shim.client.Signal(ctx, c.Spec.Name, syscall.SIGTERM); err != nil {
				c.w.log.Error("cannot send SIGTERM", "container", c.Spec.Name, "err", err)
			}
		}
	}
	hook := (*corev1.LifecycleHandler)(nil)
	if c.Spec.Lifecycle != nil && pod != nil {
		hook = c.Spec.Lifecycle.PreStop
	}
	if hook == nil {
		terminate()
		return
	}
	run := c.hook(pod, hook)
	c.w.tasks.Go(func() {
		ctx, cancel := context.WithDeadline(ctx, deadline)
		defer cancel()
		err := run(ctx)
		c.w.post(func() {
			if err != nil {
				c.w.event(pod, corev1.EventTypeWarning, "FailedPreStopHook", fmt.Sprintf("PreStopHook of container %s failed: %v", c.Spec.Name, err))
			}
			terminate()
		})
	})
}

// enforceStop kills the container after its deadline, and returns when to call
// it again.
func (c *container) enforceStop(ctx context.Context) time.Time {
	s := c.stopped
	if s == nil {
		return time.Time{}
	}
	if now := time.Now(); now.Before(s.deadline) {
		return s.deadline
	} else if now.Sub(s.killed) >= killRetry {
		s.killed = now
		client, name := c.w.sandbox.shim.client, c.Spec.Name
		c.w.tasks.Go(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
			defer cancel()
			if err := client.Kill(ctx, name); err != nil {
				c.w.log.Error("cannot kill the container; retrying", "container", name, "err", err, "after", killRetry)
			}
		})
	}
	return s.killed.Add(killRetry)
}

// postStart runs the hook beside the container, which is stopped if it fails, and then starts
// the probes: a container is not ready before its hook has ended.
func (c *container) postStart(pod *corev1.Pod) {
	if c.Spec.Lifecycle == nil || c.Spec.Lifecycle.PostStart == nil {
		c.startProbes(pod)
		return
	}
	run, id := c.hook(pod, c.Spec.Lifecycle.PostStart), c.Now.ID
	ctx, cancel := context.WithCancel(c.w.life)
	done := c.ended
	c.w.tasks.Go(func() {
		defer cancel()
		go func() { // ends with the container or with the hook
			select {
			case <-done:
				cancel()
			case <-ctx.Done():
			}
		}()
		err := run(ctx)
		if ctx.Err() != nil {
			return
		}
		c.w.post(func() {
			if !c.Running() || c.Now.ID != id {
				return
			}
			if err == nil {
				if c.stopped == nil {
					c.startProbes(pod)
				}
				return
			}
			c.w.event(pod, corev1.EventTypeWarning, "FailedPostStartHook",
				fmt.Sprintf("PostStartHook of container %s failed: %v", c.Spec.Name, err))
			c.stop(c.w.life, time.Now().Add(grace(pod)), "FailedPostStartHook: stopping container "+c.Spec.Name)
		})
	})
}
