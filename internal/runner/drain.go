package runner

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/barrier"
)

// draining is the wait, before a pod that is being deleted is ended, until no node sends
// it new connections: the condition barrier.Drained, which a controller sets.
type draining struct {
	over  bool
	asked bool      // whether a Service selects the pod is known
	seen  time.Time // when Drained was seen
}

// drainSettle is how long the requests of connections that were made until then have to
// end: a process may exit at SIGTERM at once.
const drainSettle = 40 * time.Millisecond

// awaitDrain returns when to look again, zero if the pod is to be ended now. The wait is
// part of the grace period, and leaves half of it to the processes.
func (w *worker) awaitDrain(pod *corev1.Pod) time.Time {
	d := &w.draining
	if d.over {
		return time.Time{}
	}
	now := time.Now()
	until := w.end.at.Add(min(w.r.o.DrainWait, w.end.grace/2))
	if !d.asked {
		d.asked = true
		d.over = !slices.ContainsFunc(w.containers, (*container).running) || !w.r.selected(pod)
	}
	if d.seen.IsZero() && slices.ContainsFunc(pod.Status.Conditions, isDrained) {
		d.seen = now
	}
	if settled := d.seen.Add(drainSettle); !d.seen.IsZero() && settled.Before(until) {
		until = settled
	}
	d.over = d.over || !now.Before(until)
	if d.over {
		w.log.Debug("ending the pod", "waited", now.Sub(w.end.at), "drained", !d.seen.IsZero())
		return time.Time{}
	}
	return until
}

func isDrained(k corev1.PodCondition) bool {
	return k.Type == barrier.Drained && k.Status == corev1.ConditionTrue
}

// selected reports whether a Service selects the pod, true if that is not known.
func (r *Runner) selected(pod *corev1.Pod) bool {
	r.mu.Lock()
	services, synced := r.services, r.synced
	r.mu.Unlock()
	if services == nil || !synced {
		return true
	}
	list, err := services.Services(pod.Namespace).List(everything)
	return err != nil || slices.ContainsFunc(list, func(s *corev1.Service) bool { return selects(s.Spec.Selector, pod.Labels) })
}

// selects reports whether labels have all of a selector; an empty one selects nothing.
func selects(selector, labels map[string]string) bool {
	for k, v := range selector {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return len(selector) > 0
}
