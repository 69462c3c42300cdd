package pod

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
	startup, liveness, readiness := c.Spec.StartupProbe, c.Spec.LivenessProbe, c.Spec.ReadinessProbe
	if startup == nil {
		c.Started = true
	}
	if readiness == nil {
		c.Ready = c.Started
	}
	if startup == nil && liveness == nil && readiness == nil {
		return
	}
	ctx, cancel := context.WithCancel(c.w.life)
	c.probes = cancel
	target, since, id, started, container := c.target(pod), c.Now.Started, c.Now.ID, c.Started, c.Spec.Name
	// now has f called on the loop if the attempt still runs.
	now := func(f func()) {
		c.w.post(func() {
			if c.Running() && c.Now.ID == id {
				f()
			}
		})
	}
	watch := func(ctx context.Context, name string, p *corev1.Probe, eager bool, answer func(ok bool)) {
		probe.Watcher{
			Probe: p, Since: since, Eager: eager, Answer: answer,
			Failed: func(err error) {
				now(func() {
					c.w.event(pod, corev1.EventTypeWarning, "Unhealthy", fmt.Sprintf("%s probe failed: %v", name, err))
				})
			},
		}.Run(ctx, func(ctx context.Context) error {
			begin := time.Now()
			err := target.Once(ctx, p.ProbeHandler)
			c.w.node.Metrics.Probed(pod, container, name, time.Since(begin), err)
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
					c.Started = true
					c.Ready = c.Ready || readiness == nil
				})
				up()
			})
			up()
		}
		var both sync.WaitGroup
		if readiness != nil {
			both.Go(func() {
				watch(ctx, "Readiness", readiness, true, func(ok bool) { now(func() { c.Ready = ok }) })
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
	if c.stopped != nil || c.w.ending != nil {
		return
	}
	wait := grace(pod)
	if g := p.TerminationGracePeriodSeconds; g != nil {
		wait = time.Duration(*g) * time.Second
	}
	c.stop(c.w.life, time.Now().Add(wait), fmt.Sprintf("Container %s failed %s probe, will be restarted", c.Spec.Name, name))
}

// target is the container as probes and hooks see it.
func (c *container) target(pod *corev1.Pod) probe.Target {
	t := probe.Target{Ports: c.Spec.Ports}
	if ips := c.w.state(pod).IPs; len(ips) > 0 {
		t.IP = ips[0]
	}
	client, name := shim.Client{Dir: c.w.paths.Dir}, c.Spec.Name
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

// capture runs a command in a container and returns its exit code and output.
func capture(ctx context.Context, client shim.Client, container string, args []string) (int, []byte, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, nil, err
	}
	defer r.Close()
	out := make(chan []byte, 1)
	go func() { // ends when every writer has closed, or r is
		b, _ := io.ReadAll(io.LimitReader(r, probe.MaxOutput))
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
