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
	spec, status := corev1.PodSpec{}.SwaggerDoc(), corev1.PodStatus{}.SwaggerDoc()
	return store.WithConditions(store.NewTable([]store.Column{
		{Name: "Ready", Description: "The aggregate readiness state of this pod for accepting traffic."},
		{Name: "Status", Description: "The aggregate status of the containers in this pod."},
		{Name: "Restarts", Description: "The number of times the containers in this pod have been restarted and " +
			"when the last container in this pod has restarted."},
		store.AgeColumn(),
		{Name: "IP", Wide: true, Description: status["podIP"]},
		{Name: "Node", Wide: true, Description: spec["nodeName"]},
		{Name: "Nominated Node", Wide: true, Description: status["nominatedNodeName"]},
		{Name: "Readiness Gates", Wide: true, Description: spec["readinessGates"]},
	}, func(p *corev1.Pod) []any {
		s := summarize(p)
		return []any{
			fmt.Sprintf("%d/%d", s.ready, s.total), s.reason, s.restarts.String(), store.Age(p.CreationTimestamp),
			podIP(p), store.OrNone(p.Spec.NodeName), store.OrNone(p.Status.NominatedNodeName), gates(p),
		}
	}), completed)
}

// completed returns the row condition of a Pod that has ended.
func completed(p *corev1.Pod) []metav1.TableRowCondition {
	c := metav1.TableRowCondition{Type: metav1.RowCompleted, Status: metav1.ConditionTrue, Reason: string(p.Status.Phase)}
	switch p.Status.Phase {
	case corev1.PodSucceeded:
		c.Message = "The pod has completed successfully."
	case corev1.PodFailed:
		c.Message = "The pod failed."
	default:
		return nil
	}
	return []metav1.TableRowCondition{c}
}

// summary is what one line says about a Pod.
type summary struct {
	ready, total int
	reason       string
	restarts
}

// restarts counts the restarts of some containers.
type restarts struct {
	count int
	last  metav1.Time
}

func (r restarts) String() string {
	if r.count == 0 || r.last.IsZero() {
		return strconv.Itoa(r.count)
	}
	return fmt.Sprintf("%d (%s ago)", r.count, store.Age(r.last))
}

func summarize(p *corev1.Pod) summary {
	s := summary{total: len(p.Spec.Containers), reason: string(p.Status.Phase)}
	if p.Status.Reason != "" {
		s.reason = p.Status.Reason
	}
	if condition(p, corev1.PodScheduled, func(c corev1.PodCondition) bool { return c.Reason == corev1.PodReasonSchedulingGated }) {
		s.reason = corev1.PodReasonSchedulingGated
	}
	sidecars, initializing := s.addInit(p)
	if !initializing || condition(p, corev1.PodInitialized, isTrue) {
		s.restarts = sidecars
		s.addContainers(p)
	}
	switch {
	case p.DeletionTimestamp == nil:
	case p.Status.Reason == "NodeLost":
		s.reason = "Unknown"
	case p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed:
		s.reason = "Terminating"
	}
	return s
}

func isTrue(c corev1.PodCondition) bool { return c.Status == corev1.ConditionTrue }

// addInit counts the init containers. It returns the restarts of those among
// them that go on running, and whether one is not done yet.
func (s *summary) addInit(p *corev1.Pod) (sidecars restarts, initializing bool) {
	sidecar := map[string]bool{}
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecar[c.Name] = true
			s.total++
		}
	}
	for i, c := range p.Status.InitContainerStatuses {
		s.add(c)
		if sidecar[c.Name] {
			sidecars.add(c)
		}
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
		return sidecars, true
	}
	return sidecars, false
}

func (s *summary) addContainers(p *corev1.Pod) {
	running, failure := false, ""
	for i := len(p.Status.ContainerStatuses) - 1; i >= 0; i-- {
		c := p.Status.ContainerStatuses[i]
		s.add(c)
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			s.reason = c.State.Waiting.Reason
		case c.State.Terminated != nil:
			if s.reason = terminated(c.State.Terminated); c.State.Terminated.ExitCode != 0 {
				failure = s.reason
			}
		case c.Ready && c.State.Running != nil:
			running = true
			s.ready++
		}
	}
	if s.reason != "Completed" {
		return
	}
	// The first container is done; the others may not be.
	switch {
	case running && condition(p, corev1.PodReady, isTrue):
		s.reason = "Running"
	case failure != "":
		s.reason = failure
	case running:
		s.reason = "NotReady"
	}
}

func (r *restarts) add(c corev1.ContainerStatus) {
	r.count += int(c.RestartCount)
	if t := c.LastTerminationState.Terminated; t != nil && r.last.Before(&t.FinishedAt) {
		r.last = t.FinishedAt
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

func podIP(p *corev1.Pod) string {
	if len(p.Status.PodIPs) == 0 {
		return "<none>"
	}
	return store.OrNone(p.Status.PodIPs[0].IP)
}

func gates(p *corev1.Pod) string {
	if len(p.Spec.ReadinessGates) == 0 {
		return "<none>"
	}
	open := 0
	for _, g := range p.Spec.ReadinessGates {
		if condition(p, g.ConditionType, isTrue) {
			open++
		}
	}
	return fmt.Sprintf("%d/%d", open, len(p.Spec.ReadinessGates))
}
