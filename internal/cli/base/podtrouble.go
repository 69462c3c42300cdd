package base

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// PodTrouble returns what keeps a Pod from being ready, in one line.
func PodTrouble(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		last := c.LastTerminationState.Terminated
		switch {
		case c.State.Terminated != nil && c.State.Terminated.Message != "":
			return c.State.Terminated.Message
		case c.State.Waiting != nil && last != nil && last.Message != "": // why it cannot be started
			return fmt.Sprintf("%s: %s", c.State.Waiting.Reason, last.Message)
		case c.State.Waiting != nil && c.State.Waiting.Message != "":
			return fmt.Sprintf("%s: %s", c.State.Waiting.Reason, c.State.Waiting.Message)
		case c.State.Waiting != nil && c.LastTerminationState.Terminated != nil:
			return fmt.Sprintf("%s, last exit code %d", c.State.Waiting.Reason, c.LastTerminationState.Terminated.ExitCode)
		case c.State.Terminated != nil:
			return fmt.Sprintf("ended with exit code %d", c.State.Terminated.ExitCode)
		case !c.Ready && c.State.Running != nil:
			return "running, its readiness probe does not pass"
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Message
		}
	}
	if p.Spec.NodeName == "" {
		return "no node has taken it"
	}
	return "node " + p.Spec.NodeName + " has not started it"
}
