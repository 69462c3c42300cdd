// Package status turns the state of a Pod into its status, and writes that to the API server.
package status

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// Role is what a container is to its pod.
type Role int

const (
	// Main is a container of spec.containers.
	Main Role = iota
	// Init is an init container that ends before the next one starts.
	Init
	// Sidecar is an init container with restartPolicy Always: it goes on
	// running beside the main ones.
	Sidecar
)

// Container is all that is known about one container.
type Container struct {
	Spec *corev1.Container
	Role Role
	// Now is the current attempt, nil before the first; last the one before.
	Now, Last *shim.State
	// Waiting is why nothing runs while Now is nil or has ended and will be
	// restarted.
	Waiting *corev1.ContainerStateWaiting
	// Messages are the termination messages of Now and Last, by their ID.
	Messages map[string]string
	Started  bool
	Ready    bool
}

// Running reports whether the current attempt runs.
func (c *Container) Running() bool { return c.Now != nil && !c.Now.Exited }

// Succeeded reports whether the container has ended for good with success.
func (c *Container) Succeeded() bool {
	return c.Now != nil && c.Now.Exited && c.Now.ExitCode == 0 && c.Now.Error == "" && c.Waiting == nil
}

// Failed reports whether the container has ended for good without success.
func (c *Container) Failed() bool {
	return c.Now != nil && c.Now.Exited && !c.Succeeded() && c.Waiting == nil
}

// Failure is the reason and message in the status of a pod that the node has ended.
type Failure struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// Pod is all that is known about one pod.
type Pod struct {
	Pod          *corev1.Pod
	IPs, HostIPs []netip.Addr
	Started      time.Time
	Sandbox      bool
	Containers   []*Container
	// Over is set when nothing runs and nothing will be restarted.
	Over bool
	// Failure is why the node ends the pod, nil if it does not.
	Failure *Failure
}

// Restarts reports whether a container that ended must be restarted.
func Restarts(policy corev1.RestartPolicy, r Role, st *shim.State) bool {
	switch {
	case r == Sidecar:
		return true
	case policy == corev1.RestartPolicyNever:
		return false
	case policy == corev1.RestartPolicyOnFailure, r == Init:
		return st.ExitCode != 0 || st.Error != ""
	}
	return true
}

// Status returns the pod status of v. Conditions set by others and transition
// times come from v.Pod.
func (v Pod) Status(now time.Time) corev1.PodStatus {
	old := &v.Pod.Status
	st := *old.DeepCopy()
	st.Phase = v.phase()
	st.Message, st.Reason = old.Message, old.Reason
	if v.Over && v.Failure != nil {
		st.Message, st.Reason = v.Failure.Message, v.Failure.Reason
	}
	st.QOSClass = confinement.QOSClass(v.Pod)
	if !v.Started.IsZero() {
		t := metav1.NewTime(v.Started.Truncate(time.Second))
		st.StartTime = &t
	}
	st.PodIP, st.PodIPs = "", nil
	if len(v.HostIPs) > 0 { // else the node's own object is not known yet
		st.HostIP, st.HostIPs = "", nil
	}
	for i, ip := range v.IPs {
		if i == 0 {
			st.PodIP = ip.String()
		}
		st.PodIPs = append(st.PodIPs, corev1.PodIP{IP: ip.String()})
	}
	for i, ip := range v.HostIPs {
		if i == 0 {
			st.HostIP = ip.String()
		}
		st.HostIPs = append(st.HostIPs, corev1.HostIP{IP: ip.String()})
	}
	st.InitContainerStatuses, st.ContainerStatuses = nil, nil
	for _, c := range v.Containers {
		if c.Role == Main {
			st.ContainerStatuses = append(st.ContainerStatuses, v.container(c))
		} else {
			st.InitContainerStatuses = append(st.InitContainerStatuses, v.container(c))
		}
	}
	st.ObservedGeneration = v.Pod.Generation
	v.conditions(&st, now)
	return st
}

// phase follows kubelet: a pod is Pending until every main container has run
// once, and over only when none will run again.
func (v Pod) phase() corev1.PodPhase {
	if p := v.Pod.Status.Phase; p == corev1.PodSucceeded || p == corev1.PodFailed {
		return p
	}
	failed, waiting := false, false
	for _, c := range v.Containers {
		switch {
		case c.Role != Main && c.Failed():
			failed = true
		case c.Role != Main:
		case c.Now == nil:
			waiting = true
		case c.Failed():
			failed = true
		}
	}
	switch {
	case v.Over && (failed || v.Failure != nil):
		return corev1.PodFailed
	case v.Over && !waiting:
		return corev1.PodSucceeded
	case v.Over:
		return corev1.PodFailed // stopped before it ran
	case waiting || !v.initialized():
		return corev1.PodPending
	}
	return corev1.PodRunning
}

// initialized reports whether the main containers may run.
func (v Pod) initialized() bool {
	for _, c := range v.Containers {
		switch c.Role {
		case Init:
			if !c.Succeeded() {
				return false
			}
		case Sidecar:
			if !c.Started && !v.Over {
				return false
			}
		}
	}
	return true
}

func (v Pod) container(c *Container) corev1.ContainerStatus {
	st := corev1.ContainerStatus{Name: c.Spec.Name, Image: c.Spec.Image, ImageID: c.Spec.Image, Ready: c.Ready, Started: &c.Started}
	if c.Now != nil {
		st.RestartCount = int32(c.Now.Attempt)
		st.ContainerID = ContainerID(c.Now)
	}
	if c.Last != nil {
		st.LastTerminationState.Terminated = c.terminated(c.Last)
	}
	switch {
	case c.Running():
		st.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(c.Now.Started.Truncate(time.Second))}
	case c.Now != nil && c.Waiting == nil:
		st.State.Terminated = c.terminated(c.Now)
	default:
		if c.Now != nil {
			st.LastTerminationState.Terminated = c.terminated(c.Now)
		}
		w := c.Waiting
		if w == nil {
			w = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
			if c.Role == Main && !v.initialized() || c.Role != Main && len(v.Containers) > 1 {
				w.Reason = "PodInitializing"
			}
		}
		st.State.Waiting = w
	}
	if c.Role == Init {
		st.Ready = c.Succeeded()
	}
	return st
}

// ContainerID is the ID of an attempt in the API.
func ContainerID(st *shim.State) string { return "fairlead://" + st.ID }

func (c *Container) terminated(st *shim.State) *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{
		ExitCode: int32(st.ExitCode), Reason: "Completed", ContainerID: ContainerID(st),
		StartedAt: metav1.NewTime(st.Started.Truncate(time.Second)), FinishedAt: metav1.NewTime(st.Finished.Truncate(time.Second)),
		Message: st.Error,
	}
	if text := c.Messages[st.ID]; text != "" {
		t.Message = text
	}
	if st.Signal != 0 {
		t.Signal = int32(st.Signal)
	}
	switch {
	case st.Error != "" && st.Process.Pid == 0:
		t.Reason = "StartError"
	case st.Error != "":
		t.Reason = "ContainerStatusUnknown"
	case st.OOMKilled && st.ExitCode != 0:
		t.Reason = "OOMKilled"
	case st.ExitCode != 0:
		t.Reason = "Error"
	}
	return t
}

// conditions sets the conditions that a node sets, ownConditions and PodScheduled.
func (v Pod) conditions(st *corev1.PodStatus, now time.Time) {
	over := st.Phase == corev1.PodSucceeded || st.Phase == corev1.PodFailed
	set := func(t corev1.PodConditionType, ok bool, reason, message string) {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, ObservedGeneration: v.Pod.Generation}
		if !ok {
			c.Status, c.Reason, c.Message = corev1.ConditionFalse, reason, message
		}
		if st.Phase == corev1.PodSucceeded {
			c.Reason = "PodCompleted"
		}
		setCondition(st, c, now)
	}
	if !slices.ContainsFunc(st.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled }) {
		setCondition(st, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, now)
	}
	set(corev1.PodReadyToStartContainers, v.Sandbox, "", "")
	var uninitialized, unready []string
	for _, c := range v.Containers {
		switch {
		case c.Role == Init && !c.Succeeded(), c.Role == Sidecar && !c.Started && !over:
			uninitialized = append(uninitialized, c.Spec.Name)
		}
		if c.Role != Init && !c.Ready {
			unready = append(unready, c.Spec.Name)
		}
	}
	set(corev1.PodInitialized, len(uninitialized) == 0, "ContainersNotInitialized",
		fmt.Sprintf("containers with incomplete status: %v", uninitialized))
	ready, reason, message := len(unready) == 0 && !over, "ContainersNotReady", fmt.Sprintf("containers with unready status: %v", unready)
	if over {
		reason, message = "PodCompleted", ""
		if st.Phase == corev1.PodFailed {
			reason = "PodFailed"
		}
	}
	set(corev1.ContainersReady, ready, reason, message)
	if missing := v.gates(st); ready && len(missing) > 0 {
		ready, reason, message = false, "ReadinessGatesNotReady", "readiness gates not true: "+strings.Join(missing, ", ")
	}
	set(corev1.PodReady, ready, reason, message)
}

// gates returns the readiness gates that are not true yet; others set them.
func (v Pod) gates(st *corev1.PodStatus) []string {
	var missing []string
	for _, g := range v.Pod.Spec.ReadinessGates {
		ok := slices.ContainsFunc(st.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == g.ConditionType && c.Status == corev1.ConditionTrue
		})
		if !ok {
			missing = append(missing, string(g.ConditionType))
		}
	}
	return missing
}

// setCondition replaces the condition of c's type by c; the transition time changes
// only with the status.
func setCondition(st *corev1.PodStatus, c corev1.PodCondition, now time.Time) {
	c.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	for i, o := range st.Conditions {
		if o.Type != c.Type {
			continue
		}
		if o.Status == c.Status {
			c.LastTransitionTime = o.LastTransitionTime
		}
		c.LastProbeTime = o.LastProbeTime
		st.Conditions[i] = c
		return
	}
	st.Conditions = append(st.Conditions, c)
}
