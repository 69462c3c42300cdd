package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/probe"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// startProbes starts to probe the current attempt. A container without a
// readiness probe is ready as soon as it is started, one without a startup
// probe is started as soon as it runs.
func (c *container) startProbes(pod *corev1.Pod) {
	startup, liveness, readiness := c.spec.StartupProbe, c.spec.LivenessProbe, c.spec.ReadinessProbe
	if startup == nil {
		c.started = true
	}
	if readiness == nil {
		c.ready = c.started
	}
	if startup == nil && liveness == nil && readiness == nil {
		return
	}
	ctx, cancel := context.WithCancel(c.w.life)
	c.probes = cancel
	target, since, id, started, container := c.target(pod), c.now.Started, c.now.ID, c.started, c.spec.Name
	// now has f called on the loop if the attempt still runs.
	now := func(f func()) {
		c.w.post(func() {
			if c.running() && c.now.ID == id {
				f()
			}
		})
	}
	watch := func(ctx context.Context, name string, p *corev1.Probe, eager bool, answer func(ok bool)) {
		probe.Watcher{
			Probe: p, Since: since, Eager: eager, Answer: answer,
			Failed: func(err error) {
				now(func() {
					c.w.r.event(pod, corev1.EventTypeWarning, "Unhealthy", fmt.Sprintf("%s probe failed: %v", name, err))
				})
			},
		}.Run(ctx, func(ctx context.Context) error {
			begin := time.Now()
			err := target.Once(ctx, p.ProbeHandler)
			c.w.r.metrics.probed(pod, container, name, time.Since(begin), err)
			return err
		})
	}
	c.w.tasks.Go(func() {
		defer cancel()
		if startup != nil && !started {
			upCtx, up := context.WithCancel(ctx)
			watch(upCtx, "Startup", startup, true, func(ok bool) {
				if !ok {
					now(func() { c.unhealthy(pod, "startup", startup) })
					return
				}
				now(func() {
					c.started = true
					c.ready = c.ready || readiness == nil
				})
				up()
			})
			up()
		}
		var both sync.WaitGroup
		if readiness != nil {
			both.Go(func() {
				watch(ctx, "Readiness", readiness, true, func(ok bool) { now(func() { c.ready = ok }) })
			})
		}
		if liveness != nil {
			both.Go(func() {
				watch(ctx, "Liveness", liveness, false, func(ok bool) {
					if !ok {
						now(func() { c.unhealthy(pod, "liveness", liveness) })
					}
				})
			})
		}
		both.Wait()
	})
}

// stopProbes ends the probes of the current attempt.
func (c *container) stopProbes() {
	if c.probes != nil {
		c.probes()
		c.probes = nil
	}
}

// unhealthy stops a container that failed a probe, so that it is restarted.
func (c *container) unhealthy(pod *corev1.Pod, name string, p *corev1.Probe) {
	if c.stopped != nil || c.w.end != nil {
		return
	}
	wait := grace(pod)
	if g := p.TerminationGracePeriodSeconds; g != nil {
		wait = time.Duration(*g) * time.Second
	}
	c.stop(c.w.life, time.Now().Add(wait), fmt.Sprintf("Container %s failed %s probe, will be restarted", c.spec.Name, name))
}

// target is the container as probes and hooks see it.
func (c *container) target(pod *corev1.Pod) probe.Target {
	t := probe.Target{Ports: c.spec.Ports}
	if ips := c.w.state(pod).ips; len(ips) > 0 {
		t.IP = ips[0]
	}
	client, name := shim.Client{Dir: c.w.paths.dir}, c.spec.Name
	t.Exec = func(ctx context.Context, args []string) (int, []byte, error) { return capture(ctx, client, name, args) }
	return t
}

// hook prepares a lifecycle hook.
func (c *container) hook(pod *corev1.Pod, h *corev1.LifecycleHandler) func(context.Context) error {
	t := c.target(pod)
	return func(ctx context.Context) error {
		switch {
		case h.Exec != nil:
			return t.Once(ctx, corev1.ProbeHandler{Exec: h.Exec})
		case h.HTTPGet != nil:
			return t.HTTP(ctx, h.HTTPGet)
		case h.Sleep != nil:
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(h.Sleep.Seconds) * time.Second):
			}
			return nil
		}
		return errors.New("the hook has neither exec, httpGet nor sleep")
	}
}

// maxCapture is how much of a probe's output is kept.
const maxCapture = 10 << 10

// capture runs a command in a container and returns its exit code and output.
func capture(ctx context.Context, client shim.Client, container string, args []string) (int, []byte, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, nil, err
	}
	defer r.Close()
	out := make(chan []byte, 1)
	go func() { // ends when every writer has closed, or r is
		b, _ := io.ReadAll(io.LimitReader(r, maxCapture))
		_, _ = io.Copy(io.Discard, r)
		out <- b
	}()
	code, err := client.Exec(ctx, shim.Exec{Container: container, Args: args}, shim.Streams{Stdout: w, Stderr: w}, func() { _ = w.Close() })
	_ = w.Close()
	if err != nil {
		return 0, nil, err
	}
	_ = r.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // a child left behind may hold the pipe
	return code, <-out, nil
}
