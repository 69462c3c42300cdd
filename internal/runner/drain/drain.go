// Package drain has what Pods and registered programs share of the wait, before they end, until no node sends them
// new connections. A controller sets the condition barrier.Drained when all nodes have reported that.
package drain

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/barrier"
)

// minSettle is how long requests of connections made before the nodes' reports have to end at least: a process may
// exit at SIGTERM at once.
const minSettle = 40 * time.Millisecond

// Settle returns how long to wait after the nodes' reports, which took from begin to seen. Where nodes took long to
// report, requests take long, too, and have half of that time.
func Settle(begin, seen time.Time) time.Duration { return max(minSettle, seen.Sub(begin)/2) }

// ReasonNotDrained is of the Event of an endpoint that ended while nodes may have sent it new connections.
const ReasonNotDrained = "NotDrained"

// Answer returns the condition by which the nodes have answered, nil before.
func Answer(st *corev1.PodStatus) *corev1.PodCondition {
	i := slices.IndexFunc(st.Conditions, func(k corev1.PodCondition) bool {
		return k.Type == barrier.Drained && k.Status == corev1.ConditionTrue
	})
	if i < 0 {
		return nil
	}
	return &st.Conditions[i]
}
