package registered

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/runner/drain"
	"github.com/fairlead/fairlead/internal/systemd"
)

// stopOfUnit is the wait of a unit that is being stopped, and that has the hook of package
// systemd, until no node sends its program new connections.
type stopOfUnit struct {
	invocation string
	at         time.Time
	seen       time.Time // when the outcome was known
	released   bool
	late       bool // the hook waits no longer
	// wake has the registration looked at again, once; nil before the first wait.
	wake *time.Timer
}

// reasonStopping is of the condition barrier.Drained by which the node asks for the outcome.
const reasonStopping = "Stopping"

// drainMessage is that of the condition: of each stop another, so that the answer to an
// earlier one does not pass for this one's.
func (s *stopOfUnit) drainMessage() string { return "invocation " + s.invocation }

// stopping follows the state of the program; "" is for one that is not being stopped.
func (g *registered) stopping(invocation string) {
	if g.stop.invocation == invocation {
		return
	}
	if g.stop.released {
		if err := systemd.Forget(g.stop.invocation); err != nil {
			g.log.Warn("cannot remove the mark of a stopped unit", "err", err)
		}
	}
	if g.stop.wake != nil {
		g.stop.wake.Stop()
	}
	g.stop = stopOfUnit{invocation: invocation, at: time.Now()}
}

// drainCondition makes the condition barrier.Drained of a status what the program's state
// asks for: there is none but while its unit is being stopped.
func (g *registered) drainCondition(st *corev1.PodStatus) {
	st.Conditions = slices.DeleteFunc(st.Conditions, func(k corev1.PodCondition) bool { return k.Type == barrier.Drained })
	if g.stop.invocation != "" {
		st.Conditions = append(st.Conditions, corev1.PodCondition{
			Type: barrier.Drained, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(g.stop.at),
			Reason: reasonStopping, Message: g.stop.drainMessage(),
		})
	}
}

// release lets the unit's hook go on when no node sends the program new connections any
// more, and earlier requests have had their time (drain.Settle).
func (g *registered) release(pod *corev1.Pod) {
	s := &g.stop
	if s.invocation == "" || s.released {
		return
	}
	now := time.Now()
	if answer := drain.Answer(&pod.Status); s.seen.IsZero() && answer != nil && answer.Message == s.drainMessage() {
		s.seen = now
	}
	until, selected := s.at.Add(systemd.HookWait), g.o.Selected(pod)
	switch {
	case !selected:
		until = now
	case !s.seen.IsZero():
		until = s.seen.Add(drain.Settle(s.at, s.seen))
	}
	switch {
	case now.Before(until):
		if s.wake == nil {
			s.wake = time.AfterFunc(until.Sub(now), g.wake.Set)
		} else {
			s.wake.Reset(until.Sub(now))
		}
		return
	case selected && s.seen.IsZero():
		g.late(pod) // an answer still counts: the update of the Pod that has it is looked at
		return
	}
	if err := systemd.Release(s.invocation); err != nil {
		g.log.Warn("cannot let the unit stop early; it waits for a whole second", "err", err)
	}
	s.released = true
}

// late reports that the hook has waited without an answer.
func (g *registered) late(pod *corev1.Pod) {
	if g.stop.late {
		return
	}
	g.stop.late = true
	g.log.Warn("the unit is being stopped before all nodes have reported that they send it no new connections; some may fail")
	g.o.Events.Event(pod, corev1.EventTypeWarning, drain.ReasonNotDrained, fmt.Sprintf(
		"stopped %s ago, and not all nodes have reported that they send it no new connections", systemd.HookWait))
}
