package runner

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

// role is what a container is to its pod.
type role int

const (
	roleMain role = iota
	roleInit
	// roleSidecar is an init container with restartPolicy Always: it goes on
	// running beside the main ones.
	roleSidecar
)

// containerState is all that is known about one container.
type containerState struct {
	spec *corev1.Container
	role role
	// now is the current attempt, nil before the first; last the one before.
	now, last *shim.State
	// waiting is why nothing runs while now is nil or has ended and will be
	// restarted.
	waiting *corev1.ContainerStateWaiting
	// messages are the termination messages of now and last, by their ID.
	messages map[string]string
	started  bool
	ready    bool
}

func (c *containerState) running() bool { return c.now != nil && !c.now.Exited }

// succeeded and failed are about a container that has ended for good.
func (c *containerState) succeeded() bool {
	return c.now != nil && c.now.Exited && c.now.ExitCode == 0 && c.now.Error == "" && c.waiting == nil
}

func (c *containerState) failed() bool {
	return c.now != nil && c.now.Exited && !c.succeeded() && c.waiting == nil
}

// podState is all that is known about one pod.
type podState struct {
	pod        *corev1.Pod
	ips, hosts []netip.Addr
	started    time.Time
	sandbox    bool
	containers []*containerState
	// over is set when nothing runs and nothing will be restarted.
	over bool
	// failure is why the node ends the pod, nil if it does not.
	failure *failure
}

// restarts reports whether a container that ended is to be restarted.
func restarts(policy corev1.RestartPolicy, r role, st *shim.State) bool {
	switch {
	case r == roleSidecar:
		return true
	case policy == corev1.RestartPolicyNever:
		return false
	case policy == corev1.RestartPolicyOnFailure, r == roleInit:
		return st.ExitCode != 0 || st.Error != ""
	}
	return true
}

// status returns the pod status of v. Conditions set by others and transition
// times are those of v.pod.
func (v podState) status(now time.Time) corev1.PodStatus {
	old := &v.pod.Status
	st := *old.DeepCopy()
	st.Phase = v.phase()
	st.Message, st.Reason = old.Message, old.Reason
	if v.over && v.failure != nil {
		st.Message, st.Reason = v.failure.Message, v.failure.Reason
	}
	st.QOSClass = qosClass(v.pod)
	if !v.started.IsZero() {
		t := metav1.NewTime(v.started.Truncate(time.Second))
		st.StartTime = &t
	}
	st.PodIP, st.PodIPs = "", nil
	if len(v.hosts) > 0 { // else the node's own object is not known yet
		st.HostIP, st.HostIPs = "", nil
	}
	for i, ip := range v.ips {
		if i == 0 {
			st.PodIP = ip.String()
		}
		st.PodIPs = append(st.PodIPs, corev1.PodIP{IP: ip.String()})
	}
	for i, ip := range v.hosts {
		if i == 0 {
			st.HostIP = ip.String()
		}
		st.HostIPs = append(st.HostIPs, corev1.HostIP{IP: ip.String()})
	}
	st.InitContainerStatuses, st.ContainerStatuses = nil, nil
	for _, c := range v.containers {
		if c.role == roleMain {
			st.ContainerStatuses = append(st.ContainerStatuses, v.container(c))
		} else {
			st.InitContainerStatuses = append(st.InitContainerStatuses, v.container(c))
		}
	}
	st.ObservedGeneration = v.pod.Generation
	v.conditions(&st, now)
	return st
}

// phase follows kubelet: a pod is Pending until every main container has run
// once, and over only when none will run again.
func (v podState) phase() corev1.PodPhase {
	if p := v.pod.Status.Phase; p == corev1.PodSucceeded || p == corev1.PodFailed {
		return p
	}
	failed, waiting := false, false
	for _, c := range v.containers {
		switch {
		case c.role != roleMain && c.failed():
			failed = true
		case c.role != roleMain:
		case c.now == nil:
			waiting = true
		case c.failed():
			failed = true
		}
	}
	switch {
	case v.over && (failed || v.failure != nil):
		return corev1.PodFailed
	case v.over && !waiting:
		return corev1.PodSucceeded
	case v.over:
		return corev1.PodFailed // stopped before it ran
	case waiting || !v.initialized():
		return corev1.PodPending
	}
	return corev1.PodRunning
}

// initialized reports whether the main containers may run.
func (v podState) initialized() bool {
	for _, c := range v.containers {
		switch c.role {
		case roleInit:
			if !c.succeeded() {
				return false
			}
		case roleSidecar:
			if !c.started && !v.over {
				return false
			}
		}
	}
	return true
}

func (v podState) container(c *containerState) corev1.ContainerStatus {
	st := corev1.ContainerStatus{Name: c.spec.Name, Image: c.spec.Image, ImageID: c.spec.Image, Ready: c.ready, Started: &c.started}
	if c.now != nil {
		st.RestartCount = int32(c.now.Attempt)
		st.ContainerID = containerID(c.now)
	}
	if c.last != nil {
		st.LastTerminationState.Terminated = c.terminated(c.last)
	}
	switch {
	case c.running():
		st.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(c.now.Started.Truncate(time.Second))}
	case c.now != nil && c.waiting == nil:
		st.State.Terminated = c.terminated(c.now)
	default:
		if c.now != nil {
			st.LastTerminationState.Terminated = c.terminated(c.now)
		}
		w := c.waiting
		if w == nil {
			w = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
			if c.role == roleMain && !v.initialized() || c.role != roleMain && len(v.containers) > 1 {
				w.Reason = "PodInitializing"
			}
		}
		st.State.Waiting = w
	}
	if c.role == roleInit {
		st.Ready = c.succeeded()
	}
	return st
}

func containerID(st *shim.State) string { return "fairlead://" + st.ID }

func (c *containerState) terminated(st *shim.State) *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{
		ExitCode: int32(st.ExitCode), Reason: "Completed", ContainerID: containerID(st),
		StartedAt: metav1.NewTime(st.Started.Truncate(time.Second)), FinishedAt: metav1.NewTime(st.Finished.Truncate(time.Second)),
		Message: st.Error,
	}
	if text := c.messages[st.ID]; text != "" {
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
func (v podState) conditions(st *corev1.PodStatus, now time.Time) {
	over := st.Phase == corev1.PodSucceeded || st.Phase == corev1.PodFailed
	set := func(t corev1.PodConditionType, ok bool, reason, message string) {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, ObservedGeneration: v.pod.Generation}
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
	set(corev1.PodReadyToStartContainers, v.sandbox, "", "")
	var uninitialized, unready []string
	for _, c := range v.containers {
		switch {
		case c.role == roleInit && !c.succeeded(), c.role == roleSidecar && !c.started && !over:
			uninitialized = append(uninitialized, c.spec.Name)
		}
		if c.role != roleInit && !c.ready {
			unready = append(unready, c.spec.Name)
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
func (v podState) gates(st *corev1.PodStatus) []string {
	var missing []string
	for _, g := range v.pod.Spec.ReadinessGates {
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

// qosClass returns the class that the API server has set, or else derives it from
// requests and limits.
func qosClass(pod *corev1.Pod) corev1.PodQOSClass {
	if pod.Status.QOSClass != "" {
		return pod.Status.QOSClass
	}
	guaranteed, any := true, false
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range list {
			for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
				req, hasReq := c.Resources.Requests[name]
				lim, hasLim := c.Resources.Limits[name]
				any = any || hasReq && !req.IsZero() || hasLim && !lim.IsZero()
				if !hasLim || lim.IsZero() || hasReq && req.Cmp(lim) != 0 {
					guaranteed = false
				}
			}
		}
	}
	switch {
	case !any:
		return corev1.PodQOSBestEffort
	case guaranteed:
		return corev1.PodQOSGuaranteed
	}
	return corev1.PodQOSBurstable
}
