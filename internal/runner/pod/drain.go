package pod

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/drain"
)

// draining is the wait, before a Pod that is being deleted is ended, until no node sends it new connections.
type draining struct {
	w     *worker
	state drainState
	seen  time.Time // when the nodes' answer was seen
}

type drainState int

const (
	drainUnknown drainState = iota // whether a Service selects the Pod has not been asked
	drainWaiting
	drainDone
)

// wait returns when to look again, zero if the Pod may be ended now. The wait is part of the grace period, and
// leaves half of it to the processes.
func (d *draining) wait(pod *corev1.Pod) time.Time {
	w := d.w
	if d.state == drainUnknown {
		d.state = drainWaiting
		if !slices.ContainsFunc(w.containers, (*container).Running) || !w.node.Selected(pod) {
			d.state = drainDone
		}
	}
	if d.state == drainDone {
		return time.Time{}
	}
	now := time.Now()
	if d.seen.IsZero() && drain.Answer(&pod.Status) != nil {
		d.seen = now
	}
	until := w.ending.at.Add(min(w.node.DrainWait, w.ending.grace/2))
	if !d.seen.IsZero() {
		until = d.seen.Add(drain.Settle(w.ending.at, d.seen))
	}
	if now.Before(until) {
		return until
	}
	d.state = drainDone
	d.report(pod, now.Sub(w.ending.at))
	return time.Time{}
}

// report reports how the wait for nodes ended.
func (d *draining) report(pod *corev1.Pod, waited time.Duration) {
	log := d.w.log.With("waited", waited.Round(time.Millisecond))
	switch {
	case !d.seen.IsZero():
		log.Debug("no node sends the pod new connections; ending it")
	case d.w.node.DrainWait > 0 && d.w.ending.grace > 0:
		log.Warn("ending the pod before all nodes have reported that they send it no new connections; some may fail")
		d.w.event(pod, corev1.EventTypeWarning, drain.ReasonNotDrained, fmt.Sprintf(
			"ended after %s, before all nodes had reported that they send it no new connections", waited.Round(time.Millisecond)))
	}
}
