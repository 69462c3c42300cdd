package pod

import (
	"context"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/status"
)

// advance takes the next step in running a Pod.
func (w *worker) advance(ctx context.Context, pod *corev1.Pod) time.Time {
	if !w.admitted {
		if why := w.node.ports.admit(pod, w.uid, !w.rec.Started.IsZero()); why != "" {
			w.fail(pod, status.Failure{Reason: "NodePorts", Message: "Pod was rejected: Predicate NodePorts failed: " + why})
			return time.Time{}
		}
		w.admitted = true
	}
	if w.rec.Started.IsZero() {
		w.rec.Started = time.Now()
	}
	deadline := time.Time{}
	if s := pod.Spec.ActiveDeadlineSeconds; s != nil {
		deadline = w.rec.Started.Add(time.Duration(*s) * time.Second)
	}
	if !deadline.IsZero() && !time.Now().Before(deadline) {
		w.fail(pod, status.Failure{Reason: "DeadlineExceeded", Message: "Pod was active on the node longer than the specified deadline"})
		return time.Time{}
	}
	return earlier(deadline, w.startPod(ctx, pod))
}

// fail records why the node ends the Pod.
func (w *worker) fail(pod *corev1.Pod, why status.Failure) {
	w.rec.Failure = &why
	w.cause = max(w.cause, causeFailed)
	err := os.MkdirAll(w.paths.Dir, 0o700)
	if err == nil {
		err = writePod(w.paths, w.rec)
	}
	if err != nil {
		w.log.Error("cannot record the end of the pod", "err", err)
	}
	w.event(pod, corev1.EventTypeWarning, why.Reason, why.Message)
}

// canStart reports whether what a new Pod needs is known: the Services, so that none is missing in its environment
// (behaviour 71), and the node's ranges. A static Pod starts without the API server: it gets the Services that are
// known, and an address of the ranges that the node had last.
func (w *worker) canStart(pod *corev1.Pod) bool {
	network := w.node.Network
	if w.static {
		return pod.Spec.HostNetwork || network.Usable()
	}
	return w.node.MayStart() && (network.Applied() || pod.Spec.HostNetwork && len(network.HostIPs()) > 0)
}

// startPod takes the next step in starting a Pod and its containers.
func (w *worker) startPod(ctx context.Context, pod *corev1.Pod) time.Time {
	for _, c := range w.containers {
		if c.Now != nil {
			continue
		}
		if err := w.node.checkContainer(&pod.Spec, c.Spec); err != nil {
			c.startFailed(pod, err)
			return time.Time{} // until the object changes
		}
	}
	w.files.watch(pod)
	if !w.sandbox.runs() {
		if next, ok := w.sandbox.start(ctx, pod); !ok {
			return next
		}
	}
	if w.sandbox.relink && w.canStart(pod) {
		w.sandbox.relink = false
		if err := w.sandbox.connect(); err != nil {
			w.log.Error("cannot connect the pod to the network again", "err", err)
		}
	}
	next, live := w.startContainers(ctx, pod)
	if !live {
		w.phase = phaseFinished
		return time.Time{}
	}
	return earlier(next, w.files.refresh(ctx, pod))
}

// startContainers starts what may run now. live is false when every main container
// has ended for good, or an init container has failed for good.
func (w *worker) startContainers(ctx context.Context, pod *corev1.Pod) (next time.Time, live bool) {
	for _, c := range w.containers {
		if c.Role == status.Main {
			break
		}
		if c.Role == status.Init && c.Succeeded() {
			continue
		}
		if c.Failed() {
			return time.Time{}, false
		}
		next = earlier(next, c.ensure(ctx, pod))
		if c.Role == status.Sidecar && c.Started {
			continue
		}
		return next, true // later containers wait for it
	}
	for _, c := range w.containers {
		if c.Role != status.Main {
			continue
		}
		next = earlier(next, c.ensure(ctx, pod))
		if c.Running() || c.Waiting != nil || c.Now == nil {
			live = true
		}
	}
	return next, live
}

// earlier returns the earlier of two times, where zero means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
