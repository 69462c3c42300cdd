package runner

import (
	"context"
	"fmt"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ending is the end of a pod under way.
type ending struct {
	at    time.Time
	grace time.Duration
}

func (e *ending) shorten(grace time.Duration) { e.grace = min(e.grace, max(grace, 0)) }

func (e *ending) deadline() time.Time { return e.at.Add(e.grace) }

// stopping is the end of a container under way.
type stopping struct {
	deadline time.Time
	killed   time.Time
}

// rekill is when SIGKILL is tried again on a container that will not go.
const rekill = 5 * time.Second

// endContainers brings the end of all containers one step on: the main ones
// and init containers together, then sidecars in reverse order. It returns
// when to look again and whether all have ended.
func (w *worker) endContainers(ctx context.Context) (next time.Time, ended bool) {
	ended = true
	for _, c := range w.ctrs {
		if c.running() && c.role != roleSidecar {
			ended = false
			c.stop(ctx, w.end.deadline(), "Stopping container "+c.spec.Name)
			next = sooner(next, c.pressStop(ctx))
		}
	}
	for i := len(w.ctrs) - 1; i >= 0 && ended; i-- {
		if c := w.ctrs[i]; c.running() {
			ended = false
			c.stop(ctx, w.end.deadline(), "Stopping container "+c.spec.Name)
			next = sooner(next, c.pressStop(ctx))
		}
	}
	return next, ended
}

// stop begins the end of a running container: the preStop hook, then SIGTERM,
// and SIGKILL at the deadline. If it has begun, the earlier deadline counts.
func (c *ctr) stop(ctx context.Context, deadline time.Time, why string) {
	if c.stopped != nil {
		if deadline.Before(c.stopped.deadline) {
			c.stopped.deadline = deadline
		}
		return
	}
	c.stopped = &stopping{deadline: deadline}
	pod := c.w.podNow()
	if pod != nil {
		c.w.r.event(pod, corev1.EventTypeNormal, "Killing", why)
	}
	if !time.Now().Before(deadline) {
		return // pressStop kills it
	}
	id := c.now.ID
	terminate := func() {
		if c.running() && c.now.ID == id {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			if err := c.w.sandbox.client.Signal(ctx, c.spec.Name, syscall.SIGTERM); err != nil {
				c.w.log.Error("send SIGTERM", "container", c.spec.Name, "err", err)
			}
		}
	}
	hook := (*corev1.LifecycleHandler)(nil)
	if c.spec.Lifecycle != nil && pod != nil {
		hook = c.spec.Lifecycle.PreStop
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
				c.w.r.event(pod, corev1.EventTypeWarning, "FailedPreStopHook", fmt.Sprintf("PreStopHook of container %s failed: %v", c.spec.Name, err))
			}
			terminate()
		})
	})
}

// pressStop kills the container when its time is over, and returns when to
// look again.
func (c *ctr) pressStop(ctx context.Context) time.Time {
	s := c.stopped
	if s == nil {
		return time.Time{}
	}
	if now := time.Now(); now.Before(s.deadline) {
		return s.deadline
	} else if now.Sub(s.killed) >= rekill {
		s.killed = now
		client, name := c.w.sandbox.client, c.spec.Name
		c.w.tasks.Go(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
			defer cancel()
			if err := client.Kill(ctx, name); err != nil {
				c.w.log.Error("kill container", "container", name, "err", err)
			}
		})
	}
	return s.killed.Add(rekill)
}

// podNow is the newest object, nil if there was none.
func (w *worker) podNow() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod
}

// postStart runs the hook beside the container, which is stopped if it fails.
func (c *ctr) postStart(pod *corev1.Pod) {
	if c.spec.Lifecycle == nil || c.spec.Lifecycle.PostStart == nil {
		return
	}
	run, id := c.hook(pod, c.spec.Lifecycle.PostStart), c.now.ID
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
		if err == nil || ctx.Err() != nil {
			return
		}
		c.w.post(func() {
			if !c.running() || c.now.ID != id {
				return
			}
			c.w.r.event(pod, corev1.EventTypeWarning, "FailedPostStartHook", fmt.Sprintf("PostStartHook of container %s failed: %v", c.spec.Name,
				err))
			c.stop(c.w.life, time.Now().Add(grace(pod)), "FailedPostStartHook: stopping container "+c.spec.Name)
		})
	})
}
