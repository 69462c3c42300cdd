package pod

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

func table() rest.TableConvertor {
	return store.NewTable([]store.Column{
		{Name: "Ready", Description: "Containers that are ready, of all."},
		{Name: "Status", Description: "The phase, or the reason why the pod is not as it should be."},
		{Name: "Restarts", Description: "How often containers were restarted, and when last."},
		{Name: "Age"},
		{Name: "IP", Wide: true}, {Name: "Node", Wide: true},
		{Name: "Nominated Node", Wide: true}, {Name: "Readiness Gates", Wide: true},
	}, func(p *corev1.Pod) []any {
		s := summarize(p)
		return []any{
			fmt.Sprintf("%d/%d", s.ready, s.total), s.reason, s.restartsText(), store.Age(p.CreationTimestamp),
			store.OrNone(p.Status.PodIP), store.OrNone(p.Spec.NodeName), store.OrNone(p.Status.NominatedNodeName), gates(p),
		}
	})
}

// summary is what one line says about a Pod.
type summary struct {
	ready, total int
	reason       string
	restarts     int
	lastRestart  metav1.Time
}

func (s summary) restartsText() string {
	if s.restarts == 0 || s.lastRestart.IsZero() {
		return strconv.Itoa(s.restarts)
	}
	return fmt.Sprintf("%d (%s ago)", s.restarts, store.Age(s.lastRestart))
}

func summarize(p *corev1.Pod) summary {
	s := summary{total: len(p.Spec.Containers), reason: string(p.Status.Phase)}
	if p.Status.Reason != "" {
		s.reason = p.Status.Reason
	}
	if condition(p, corev1.PodScheduled, func(c corev1.PodCondition) bool { return c.Reason == corev1.PodReasonSchedulingGated }) {
		s.reason = corev1.PodReasonSchedulingGated
	}
	initializing := s.addInit(p)
	if !initializing {
		s.addContainers(p)
	}
	if p.DeletionTimestamp != nil {
		if s.reason = "Terminating"; p.Status.Reason == "NodeLost" {
			s.reason = "Unknown"
		}
	}
	return s
}

// addInit counts the init containers and says whether one is not done yet.
func (s *summary) addInit(p *corev1.Pod) bool {
	sidecar := map[string]bool{}
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecar[c.Name] = true
			s.total++
		}
	}
	for i, c := range p.Status.InitContainerStatuses {
		s.countRestarts(c)
		t, w := c.State.Terminated, c.State.Waiting
		switch {
		case t != nil && t.ExitCode == 0:
			continue
		case sidecar[c.Name] && c.Started != nil && *c.Started:
			if c.Ready {
				s.ready++
			}
			continue
		case t != nil:
			s.reason = "Init:" + terminated(t)
		case w != nil && w.Reason != "" && w.Reason != "PodInitializing":
			s.reason = "Init:" + w.Reason
		default:
			s.reason = fmt.Sprintf("Init:%d/%d", i, len(p.Spec.InitContainers))
		}
		return true
	}
	return false
}

func (s *summary) addContainers(p *corev1.Pod) {
	s.restarts, s.lastRestart = 0, metav1.Time{}
	running := false
	for i := len(p.Status.ContainerStatuses) - 1; i >= 0; i-- {
		c := p.Status.ContainerStatuses[i]
		s.countRestarts(c)
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			s.reason = c.State.Waiting.Reason
		case c.State.Terminated != nil:
			s.reason = terminated(c.State.Terminated)
		case c.Ready && c.State.Running != nil:
			running = true
			s.ready++
		}
	}
	// One container is done and another still runs.
	if s.reason == "Completed" && running {
		s.reason = "NotReady"
		if condition(p, corev1.PodReady, func(c corev1.PodCondition) bool { return c.Status == corev1.ConditionTrue }) {
			s.reason = "Running"
		}
	}
}

func (s *summary) countRestarts(c corev1.ContainerStatus) {
	s.restarts += int(c.RestartCount)
	if t := c.LastTerminationState.Terminated; t != nil && s.lastRestart.Before(&t.FinishedAt) {
		s.lastRestart = t.FinishedAt
	}
}

func terminated(t *corev1.ContainerStateTerminated) string {
	switch {
	case t.Reason != "":
		return t.Reason
	case t.Signal != 0:
		return fmt.Sprintf("Signal:%d", t.Signal)
	}
	return fmt.Sprintf("ExitCode:%d", t.ExitCode)
}

func condition(p *corev1.Pod, t corev1.PodConditionType, is func(corev1.PodCondition) bool) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == t {
			return is(c)
		}
	}
	return false
}

func gates(p *corev1.Pod) string {
	if len(p.Spec.ReadinessGates) == 0 {
		return "<none>"
	}
	open := 0
	for _, g := range p.Spec.ReadinessGates {
		if condition(p, g.ConditionType, func(c corev1.PodCondition) bool { return c.Status == corev1.ConditionTrue }) {
			open++
		}
	}
	return fmt.Sprintf("%d/%d", open, len(p.Spec.ReadinessGates))
}
