package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/runner/status"
)

// container is one container of a pod. Its methods run on the worker's loop.
type container struct {
	status.Container
	w *worker

	back    backoff
	startAt time.Time // the earliest time of the next start
	stopped *stopping
	probes  context.CancelFunc
	ended   chan struct{} // of the current attempt
	// reported is the last error an Event was written for.
	reported string
}

// refresh takes over the part of a pod's spec that may change: the image.
func (c *container) refresh(pod *corev1.Pod) {
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == c.Spec.Name {
				c.Spec = &list[i]
			}
		}
	}
}

// adopt takes over the records of an earlier run of the agent. A record counts
// until the shim's watch reports the present state.
func (c *container) adopt(pod *corev1.Pod) {
	states := readStates(c.w.paths, c.Spec.Name)
	if len(states) == 0 {
		return
	}
	if len(states) > 1 {
		c.Last = &states[0]
	}
	now := states[len(states)-1]
	for i := range states {
		if states[i].Exited {
			c.keepMessage(&states[i])
		}
	}
	if !now.Exited && (!c.w.sandbox.runs() || now.Boot != process.BootID()) {
		now.Exited, now.ExitCode, now.Finished = true, unknownExit, time.Now()
		now.Error = "it ended while the agent was away"
	}
	c.Now = &now
	if now.Exited {
		c.scheduleRestart(pod)
		return
	}
	c.ended = make(chan struct{})
	// The status in the API is of this very attempt; probes correct it.
	for _, st := range append(pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses...) {
		if st.Name == c.Spec.Name && st.ContainerID == status.ContainerID(&now) {
			c.Ready, c.Started = st.Ready, ptr.Deref(st.Started, false)
		}
	}
	c.startProbes(pod)
}

// startFailed records why a container cannot be started.
func (c *container) startFailed(pod *corev1.Pod, err error) {
	var config configError
	reason := "CreateContainerError"
	if errors.As(err, &config) {
		reason = config.reason
	}
	c.Waiting = &corev1.ContainerStateWaiting{Reason: reason, Message: err.Error()}
	if c.reported != err.Error() {
		c.reported = err.Error()
		c.w.log.Warn("cannot start the container", "container", c.Spec.Name, "err", err)
		c.w.event(pod, corev1.EventTypeWarning, "Failed", fmt.Sprintf("container %s: %s: %v", c.Spec.Name, reason, err))
	}
}

// ensure starts the container if it is to run and its back-off is over, and returns
// when to call it again.
func (c *container) ensure(ctx context.Context, pod *corev1.Pod) time.Time {
	if c.Running() {
		return c.enforceStop(ctx)
	}
	if c.Now != nil && c.Waiting == nil {
		return time.Time{} // ended for good
	}
	if time.Now().Before(c.startAt) {
		return c.startAt
	}
	if !c.w.canStart(pod) {
		return time.Time{} // the runner wakes all workers when it can
	}
	c.start(ctx, pod)
	if c.Running() {
		return time.Time{}
	}
	return c.startAt
}

// start runs the next attempt.
func (c *container) start(ctx context.Context, pod *corev1.Pod) {
	attempt := 0
	if c.Now != nil {
		attempt = c.Now.Attempt + 1
	}
	spec, err := c.shimSpec(ctx, pod, attempt)
	if err == nil {
		err = makeContainerDir(c.w.paths, c.Spec.Name, attempt)
	}
	var st shim.State
	if err == nil {
		st, err = c.w.sandbox.shim.client.Start(ctx, spec)
	}
	if err != nil {
		if ctx.Err() != nil {
			return
		}
		c.w.node.Metrics.started(c.containerType(), attempt, true)
		c.startFailed(pod, err)
		c.startAt = time.Now().Add(max(c.back.next(0), time.Second))
		return
	}
	c.w.node.Metrics.started(c.containerType(), attempt, st.Exited && st.Error != "")
	c.Last, c.Now, c.Waiting, c.reported, c.stopped = c.Now, &st, nil, "", nil
	c.Started, c.Ready = false, false
	c.ended = make(chan struct{})
	if st.Exited && st.Error != "" {
		c.w.log.Warn("cannot start the container", "container", c.Spec.Name, "attempt", attempt, "err", st.Error)
		c.w.event(pod, corev1.EventTypeWarning, "Failed", fmt.Sprintf("container %s: %s", c.Spec.Name, st.Error))
		close(c.ended)
		c.scheduleRestart(pod)
		return
	}
	c.w.event(pod, corev1.EventTypeNormal, "Started", "Started container "+c.Spec.Name)
	c.w.log.Info("container started", "container", c.Spec.Name, "attempt", attempt, "pid", st.Process.Pid)
	if st.Exited {
		close(c.ended)
		c.keepMessage(&st)
		c.scheduleRestart(pod)
		return
	}
	c.postStart(pod)
}

// observe takes in a state that the shim reports.
func (c *container) observe(st shim.State) {
	if c.Now == nil || st.ID != c.Now.ID || c.Now.Exited {
		return
	}
	*c.Now = st
	if !st.Exited {
		return
	}
	c.w.log.Info("container ended", "container", c.Spec.Name, "exit-code", st.ExitCode)
	c.exited()
}

// keepMessage reads the termination message of an attempt, which is now or last.
func (c *container) keepMessage(st *shim.State) {
	text, err := c.w.paths.readMessage(c.w.life, c.Spec, st)
	if err != nil {
		c.w.log.Error("cannot read the termination message of the container", "container", c.Spec.Name, "err", err)
	}
	kept := map[string]string{st.ID: text}
	if c.Last != nil && c.Messages[c.Last.ID] != "" {
		kept[c.Last.ID] = c.Messages[c.Last.ID]
	}
	c.Messages = kept
}

// exited follows up on the end of the current attempt.
func (c *container) exited() {
	c.keepMessage(c.Now)
	c.stopProbes()
	c.Started, c.Ready = false, false
	if c.ended != nil {
		close(c.ended)
		c.ended = nil
	}
	if pod := c.w.object(); pod != nil && c.w.ending == nil {
		c.scheduleRestart(pod)
	}
}

// shimDied records the end of an attempt whose shim is dead; why is the reason.
func (c *container) shimDied(why string) {
	if !c.Running() {
		return
	}
	c.Now.Exited, c.Now.ExitCode, c.Now.Finished, c.Now.Error = true, unknownExit, time.Now(), why
	if err := c.save(); err != nil {
		c.w.log.Error("cannot record the end of the container", "container", c.Spec.Name, "err", err)
	}
	c.exited()
}

// save writes the record, which a live shim would write.
func (c *container) save() error {
	b, err := json.Marshal(c.Now)
	if err != nil {
		return err
	}
	return fileio.Replace(c.w.paths.record(c.Now.Name, c.Now.Attempt), b, 0o600)
}

// scheduleRestart decides, after an end, whether and when to restart.
func (c *container) scheduleRestart(pod *corev1.Pod) {
	if !status.Restarts(pod.Spec.RestartPolicy, c.Role, c.Now) {
		c.Waiting = nil
		return
	}
	delay := c.back.next(c.Now.Finished.Sub(c.Now.Started))
	c.startAt = c.Now.Finished.Add(delay)
	c.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
	if delay > 0 {
		c.Waiting = &corev1.ContainerStateWaiting{
			Reason:  "CrashLoopBackOff",
			Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)", delay, c.Spec.Name, pod.Name, pod.Namespace, pod.UID),
		}
		c.w.event(pod, corev1.EventTypeWarning, "BackOff", "Back-off restarting failed container "+c.Spec.Name)
	}
}
