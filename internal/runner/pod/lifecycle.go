package pod

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// phase is how far a Pod is. It only grows.
type phase int

const (
	phaseActive   phase = iota // its containers are started and kept running
	phaseFinished              // its main containers have ended for good; sidecars may still run
	phaseEnded                 // no container runs, and the sandbox is gone
	phaseLeft                  // the worker has nothing left to do
)

// cause is why a Pod is ended before its containers have ended by themselves. It only grows: of several causes the
// last one in this order counts.
type cause int

const (
	causeNone     cause = iota
	causeFailed         // the node ends it: see record.Failure
	causeDeleting       // its object is being deleted
	causeStopping       // the agent ends, and its Pods with it
	causeRemoved        // its object, or the file of a static Pod, is gone
)

// outcome is what follows when the containers of a Pod have ended.
type outcome int

const (
	keepRecords  outcome = iota // records and logs stay until the object is deleted
	deleteObject                // the API server may delete the object
	leaveRecords                // the next agent finds them
	removeAll                   // nothing of it stays
)

// endings has what each cause asks for.
var endings = [...]struct {
	drains bool // nodes first stop sending it new connections
	then   outcome
}{
	causeNone:     {false, keepRecords},
	causeFailed:   {false, keepRecords},
	causeDeleting: {true, deleteObject},
	causeStopping: {false, leaveRecords},
	causeRemoved:  {false, removeAll},
}

// causeOf returns why a Pod is ended; asked is what Remove and stop have set.
func (w *worker) causeOf(pod *corev1.Pod, asked cause) cause {
	switch {
	case asked > causeDeleting:
		return asked
	case pod.DeletionTimestamp != nil:
		return causeDeleting
	case w.rec.Failure != nil:
		return causeFailed
	}
	return causeNone
}

// step takes the next possible step and returns when to call it again, zero for never.
func (w *worker) step(ctx context.Context) time.Time {
	w.mu.Lock()
	pod, asked := w.pod, w.asked
	w.mu.Unlock()
	if pod == nil && asked == causeNone {
		return time.Time{} // adopted; the informer brings the object
	}
	if pod != nil {
		w.setPod(pod)
		if isTerminal(pod) {
			w.phase = max(w.phase, phaseFinished)
		}
	}
	w.cause = max(w.cause, w.causeOf(pod, asked))
	var next time.Time
	if w.cause == causeNone && w.phase == phaseActive {
		next = w.advance(ctx, pod)
	}
	if w.cause != causeNone || w.phase != phaseActive { // advance may have found out
		next = w.end(ctx, pod)
	}
	w.publish(pod)
	return next
}

// isTerminal reports whether the API has a Pod whose containers have ended for good.
func isTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// end takes the next step in ending a Pod. pod is nil if its object was deleted while the agent was away.
func (w *worker) end(ctx context.Context, pod *corev1.Pod) time.Time {
	if w.ending == nil {
		w.ending = &ending{at: time.Now(), grace: w.rec.Grace}
	}
	if pod == nil && len(w.containers) == 0 {
		w.loadContainers()
	}
	switch {
	case w.cause >= causeDeleting && pod != nil && pod.DeletionGracePeriodSeconds != nil:
		w.ending.shorten(time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second)
	case w.cause == causeStopping:
		w.ending.shorten(w.node.StopTimeout)
	}
	if endings[w.cause].drains && !w.static {
		if next := w.draining.wait(pod); !next.IsZero() {
			return next
		}
	}
	if next, ended := w.endContainers(ctx); !ended {
		return next
	}
	w.sandbox.drop(ctx)
	w.conclude(pod)
	return time.Time{}
}

// conclude does what follows when the containers have ended.
func (w *worker) conclude(pod *corev1.Pod) {
	w.phase = phaseEnded
	switch endings[w.cause].then {
	case keepRecords:
		if w.rec.Failure != nil {
			w.endWaits()
		}
	case removeAll:
		if err := w.paths.Remove(); err != nil {
			w.log.Error("cannot remove the pod's state", "err", err)
		}
		w.phase = phaseLeft
	case leaveRecords:
		w.phase = phaseLeft
	case deleteObject:
		if pod.Spec.RestartPolicy == corev1.RestartPolicyAlways {
			w.endWaits()
		}
		w.pub.Remove(pod, w.state(pod).Status(time.Now()))
	}
}

// endWaits has containers that have run show how they ended, not that they wait for their next start.
func (w *worker) endWaits() {
	for _, c := range w.containers {
		if c.Now != nil {
			c.Waiting = nil
		}
	}
}

// publish hands on what has become of the Pod: to the endpoint, the proxy, and the API.
func (w *worker) publish(pod *corev1.Pod) {
	w.publishSnapshot(pod)
	w.publishHostPorts()
	if w.phase >= phaseEnded {
		w.node.ports.release(w.uid)
	}
	if pod == nil || w.cause == causeRemoved || w.phase == phaseLeft {
		return
	}
	st := w.state(pod).Status(time.Now())
	w.apiPhase.Store(&st.Phase)
	w.pub.Set(pod, st)
}
