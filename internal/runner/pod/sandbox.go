package pod

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/runner/volumes"
)

// sandbox is what the containers of a Pod share: a shim, the network, and control groups. Its methods run on the
// worker's loop.
type sandbox struct {
	w       *worker
	shim    *runningShim // nil while there is none
	relink  bool         // the node's end of the network was removed while the agent was away
	retry   backoff      // of start
	retryAt time.Time
}

type runningShim struct {
	client shim.Client
	id     process.ID
	cancel context.CancelFunc // ends the watch
}

// runs reports whether there is a shim.
func (b *sandbox) runs() bool { return b.shim != nil }

// start starts the sandbox if that is possible now, and returns when to call it again otherwise.
func (b *sandbox) start(ctx context.Context, pod *corev1.Pod) (next time.Time, ok bool) {
	if time.Now().Before(b.retryAt) {
		return b.retryAt, false
	}
	if !b.w.canStart(pod) {
		return time.Time{}, false // the node wakes all workers when it can
	}
	if err := b.create(ctx, pod); err != nil {
		wait := max(b.retry.next(0), time.Second)
		b.retryAt = time.Now().Add(wait)
		b.w.log.Error("cannot start the pod; retrying", "err", err, "after", wait)
		b.w.event(pod, corev1.EventTypeWarning, "FailedCreatePodSandBox", err.Error())
		return b.retryAt, false
	}
	return time.Time{}, true
}

// create makes the shim, the network and the files of a Pod.
func (b *sandbox) create(ctx context.Context, pod *corev1.Pod) (err error) {
	n := b.w.node
	select {
	case n.starts <- struct{}{}:
		defer func() { <-n.starts }()
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := os.MkdirAll(b.w.paths.etc(""), 0o700); err != nil {
		return err
	}
	if !pod.Spec.HostNetwork && len(b.w.rec.IPs) == 0 {
		if b.w.rec.IPs, err = n.Network.Allocate(); err != nil {
			return err
		}
		b.w.rec.Shown, b.w.rec.Device = b.w.rec.IPs, podnet.DeviceName(b.w.uid)
	}
	// First on disk, then in the kernel: after a crash in between the next run
	// finds the record.
	if err := writePod(b.w.paths, b.w.rec); err != nil {
		return err
	}
	if err := n.writeEtc(b.w.paths, pod, b.w.rec.IPs); err != nil {
		return err
	}
	if err := volumes.MountMemory(pod, b.w.paths.volume, n.memory); err != nil {
		return err
	}
	group, err := n.Groups.Add(pod)
	if err != nil {
		return err
	}
	if group == "" && confinement.Limited(pod) {
		b.w.event(pod, corev1.EventTypeWarning, "LimitsNotEnforced", "the pod runs without its limits: "+n.Groups.Err.Error())
	}
	id, err := shim.Start(ctx, shim.Options{
		Command: n.ShimCommand, Dir: b.w.paths.Dir, HostNetwork: pod.Spec.HostNetwork, HostIPC: pod.Spec.HostIPC, Hostname: hostnameOf(pod),
		Cgroup: group, OwnPIDs: confinement.Confined(pod) && !pod.Spec.HostPID,
	})
	if err != nil {
		return err
	}
	n.Metrics.pods.Inc()
	b.adopt(id)
	if err := b.connect(); err != nil {
		b.dropShim(ctx)
		return err
	}
	b.retry.reset()
	return nil
}

// adopt takes over a running shim: from now on its watch posts what happens.
func (b *sandbox) adopt(id process.ID) {
	watchCtx, cancel := context.WithCancel(b.w.life)
	s := &runningShim{client: shim.Client{Dir: b.w.paths.Dir}, id: id, cancel: cancel}
	b.shim = s
	observe := func(st shim.State) {
		for _, c := range b.w.containers {
			if c.Spec.Name == st.Name {
				c.observe(st)
			}
		}
	}
	b.w.tasks.Go(func() {
		for watchCtx.Err() == nil {
			err := s.client.Watch(watchCtx, func(st shim.State) { b.w.post(func() { observe(st) }) }, func() {})
			if watchCtx.Err() != nil {
				return
			}
			if !s.id.Alive() {
				b.w.post(func() { b.shimDied(s, err) })
				return
			}
			select { // cut off for being slow: list again
			case <-watchCtx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
}

// shimDied follows up on the unexpected end of the shim, which ends the first
// processes of its containers.
func (b *sandbox) shimDied(s *runningShim, err error) {
	if b.shim != s {
		return
	}
	b.w.log.Error("the pod's shim died; its containers end with it", "err", err)
	b.killRemains()
	for _, c := range b.w.containers {
		c.shimDied("the pod's shim was killed")
	}
	s.cancel()
	b.shim = nil
	b.disconnect()
}

// killRemains kills the processes that a dead shim left behind.
func (b *sandbox) killRemains() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := errors.Join(b.w.node.Groups.Remove(ctx, b.w.uid), process.KillMountedFrom(ctx, b.w.paths.Dir)); err != nil {
		b.w.log.Error("cannot kill the pod's remaining processes", "err", err)
	}
}

// drop ends the shim and frees the network. It is idempotent.
func (b *sandbox) drop(ctx context.Context) {
	for _, c := range b.w.containers {
		c.stopProbes()
	}
	if b.runs() {
		b.dropShim(ctx)
	}
	if err := b.w.node.Groups.Remove(ctx, b.w.uid); err != nil {
		b.w.log.Error("cannot remove the pod's control group", "err", err)
	}
	if err := volumes.UnmountMemory(b.w.paths.volume("")); err != nil {
		b.w.log.Error("cannot give back the memory of the pod's volumes", "err", err)
	}
	if len(b.w.rec.IPs) == 0 {
		return
	}
	b.disconnect()
	b.w.node.Network.Release(b.w.rec.IPs)
	b.w.rec.IPs = nil
	if err := writePod(b.w.paths, b.w.rec); err != nil && !errors.Is(err, os.ErrNotExist) {
		b.w.log.Error("cannot record the end of the pod", "err", err)
	}
}

func (b *sandbox) dropShim(ctx context.Context) {
	s := b.shim
	b.shim = nil
	s.end(ctx, b.w.log)
}

// end ends the shim within 15 s.
func (s *runningShim) end(ctx context.Context, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
	defer cancel()
	s.cancel()
	if err := s.client.Shutdown(ctx); err != nil {
		log.Error("cannot end the pod's shim", "err", err)
	}
	for wait := time.Millisecond; s.id.Alive(); wait = min(2*wait, 50*time.Millisecond) {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			_ = s.id.Signal(syscall.SIGKILL)
			return
		}
	}
}

// connect joins the Pod's network namespace to the node.
func (b *sandbox) connect() error {
	if b.w.rec.HostNetwork {
		return nil
	}
	return b.w.node.Network.Connect(podnet.Endpoint{Device: b.w.rec.Device, Pod: b.w.String(), PID: b.shim.id.Pid, IPs: b.w.rec.IPs})
}

// disconnect removes the node's end.
func (b *sandbox) disconnect() {
	if b.w.rec.Device == "" {
		return
	}
	if err := b.w.node.Network.Disconnect(b.w.rec.Device); err != nil {
		b.w.log.Error("cannot remove the pod's network", "err", err)
	}
}

// limitAgain gives the groups of an adopted Pod the limits that release has taken from them.
func (b *sandbox) limitAgain(pod *corev1.Pod) {
	groups := b.w.node.Groups
	if groups.Err != nil || !groups.Pod(b.w.uid).Exists() { // the latter for a Pod of a run that had no tree
		return
	}
	_, err := groups.Add(pod)
	for _, c := range b.w.containers {
		if err == nil && c.Running() {
			_, err = groups.Container(b.w.uid, c.Spec)
		}
	}
	if err != nil {
		b.w.log.Error("cannot limit an adopted pod again", "err", err)
		b.w.event(pod, corev1.EventTypeWarning, "LimitsNotEnforced", "the pod runs without its limits: "+err.Error())
	}
}
