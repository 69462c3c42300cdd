package runner

import (
	"fmt"
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

// drainSettle is how long the requests of connections that were made until then have to end
// at least: a process may exit at SIGTERM at once. Where nodes took long to report, requests
// take long, too, and have half of that time.
const drainSettle = 40 * time.Millisecond

// settleAfter returns how long to wait after the nodes' reports, which took from begin to seen.
func settleAfter(begin, seen time.Time) time.Duration { return max(drainSettle, seen.Sub(begin)/2) }

// reasonNotDrained is of the Event of a pod that was ended while nodes may have sent it new
// connections.
const reasonNotDrained = "NotDrained"

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
	if !d.seen.IsZero() {
		until = d.seen.Add(settleAfter(w.end.at, d.seen))
	}
	switch {
	case d.over:
	case now.Before(until):
		return until
	default:
		d.over = true
		w.drained(pod, now.Sub(w.end.at))
	}
	return time.Time{}
}

// drained reports how the wait for nodes ended.
func (w *worker) drained(pod *corev1.Pod, waited time.Duration) {
	log := w.log.With("waited", waited.Round(time.Millisecond))
	switch {
	case !w.draining.seen.IsZero():
		log.Debug("no node sends the pod new connections; ending it")
	case w.r.o.DrainWait > 0 && w.end.grace > 0:
		log.Warn("ending the pod before all nodes have reported that they send it no new connections; some may fail")
		w.r.event(pod, corev1.EventTypeWarning, reasonNotDrained, fmt.Sprintf(
			"ended after %s, before all nodes had reported that they send it no new connections", waited.Round(time.Millisecond)))
	}
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
