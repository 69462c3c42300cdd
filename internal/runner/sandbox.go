package runner

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// sandbox is a running shim.
type sandbox struct {
	client shim.Client
	id     process.ID
	cancel context.CancelFunc // ends the watch
}

// createSandbox makes the shim, the network and the files of a pod.
func (w *worker) createSandbox(ctx context.Context, pod *corev1.Pod) (err error) {
	select {
	case w.r.starts <- struct{}{}:
		defer func() { <-w.r.starts }()
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := os.MkdirAll(w.paths.etc(""), 0o700); err != nil {
		return err
	}
	if !pod.Spec.HostNetwork && len(w.rec.IPs) == 0 {
		if w.rec.IPs, err = w.r.ipam.allocate(); err != nil {
			return err
		}
		w.rec.Shown = w.rec.IPs
		w.r.saveLastAddresses()
		w.rec.Device = deviceName(w.uid)
	}
	// First on disk, then in the kernel: after a crash in between the next run
	// finds the record.
	if err := writePod(w.paths, w.rec); err != nil {
		return err
	}
	if err := w.r.writeEtc(w.paths, pod, w.rec.IPs); err != nil {
		return err
	}
	if err := w.r.mountMemory(pod, w.paths); err != nil {
		return err
	}
	group, err := w.r.cgroups.add(pod, w.r.podPIDs(pod))
	if err != nil {
		return err
	}
	if group == "" && limited(pod) {
		w.r.event(pod, corev1.EventTypeWarning, "LimitsNotEnforced", "the pod runs without its limits: "+w.r.cgroups.err.Error())
	}
	id, err := shim.Start(ctx, shim.Options{
		Command: w.r.o.ShimCommand, Dir: w.paths.dir, HostNetwork: pod.Spec.HostNetwork, HostIPC: pod.Spec.HostIPC, Hostname: hostnameOf(pod),
		Cgroup: group, OwnPIDs: confined(pod) && !pod.Spec.HostPID,
	})
	if err != nil {
		return err
	}
	w.r.metrics.pods.Inc()
	w.adoptShim(id)
	if err := w.connect(); err != nil {
		w.dropShim(ctx)
		return err
	}
	w.retry.reset()
	return nil
}

// adoptShim takes over a running shim: from now on its watch posts what happens.
func (w *worker) adoptShim(id process.ID) {
	watchCtx, cancel := context.WithCancel(w.life)
	s := &sandbox{client: shim.Client{Dir: w.paths.dir}, id: id, cancel: cancel}
	w.sandbox = s
	w.tasks.Go(func() {
		for watchCtx.Err() == nil {
			err := s.client.Watch(watchCtx, func(st shim.State) { w.post(func() { w.observe(st) }) }, func() {})
			if watchCtx.Err() != nil {
				return
			}
			if !s.id.Alive() {
				w.post(func() { w.shimDied(s, err) })
				return
			}
			select { // cut off for being slow: list again
			case <-watchCtx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
}

// observe takes in a state that the shim reports.
func (w *worker) observe(st shim.State) {
	for _, c := range w.containers {
		if c.spec.Name == st.Name {
			c.observe(st)
		}
	}
}

// shimDied follows up on the unexpected end of the shim, which ends the first
// processes of its containers.
func (w *worker) shimDied(s *sandbox, err error) {
	if w.sandbox != s {
		return
	}
	w.log.Error("the pod's shim died; its containers end with it", "err", err)
	w.killRemains()
	for _, c := range w.containers {
		c.shimDied("the pod's shim was killed")
	}
	s.cancel()
	w.sandbox = nil
	w.disconnect()
}

// killRemains kills the processes that a dead shim left behind.
func (w *worker) killRemains() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := errors.Join(w.r.cgroups.remove(ctx, w.uid), process.KillMountedFrom(ctx, w.paths.dir)); err != nil {
		w.log.Error("cannot kill the pod's remaining processes", "err", err)
	}
}

// dropSandbox ends the shim and frees the network. It is idempotent.
func (w *worker) dropSandbox(ctx context.Context) {
	for _, c := range w.containers {
		c.stopProbes()
	}
	if w.sandbox != nil {
		w.dropShim(ctx)
	}
	if err := w.r.cgroups.remove(ctx, w.uid); err != nil {
		w.log.Error("cannot remove the pod's control group", "err", err)
	}
	if err := unmountMemory(w.paths); err != nil {
		w.log.Error("cannot give back the memory of the pod's volumes", "err", err)
	}
	if len(w.rec.IPs) == 0 {
		return
	}
	w.disconnect()
	w.r.ipam.release(w.rec.IPs)
	w.rec.IPs = nil
	if err := writePod(w.paths, w.rec); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.log.Error("cannot record the end of the pod", "err", err)
	}
}

func (w *worker) dropShim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
	defer cancel()
	s := w.sandbox
	s.cancel()
	w.sandbox = nil
	if err := s.client.Shutdown(ctx); err != nil {
		w.log.Error("cannot end the pod's shim", "err", err)
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
