package act

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// A Pod that failed always says why, even if no container did.
func TestFailure(t *testing.T) {
	for _, c := range []struct {
		status corev1.PodStatus
		want   string
	}{
		{corev1.PodStatus{}, "the Pod failed without a message"},
		{corev1.PodStatus{Reason: "DeadlineExceeded"}, "DeadlineExceeded"},
		{corev1.PodStatus{Reason: "Evicted", Message: "The node was low on memory."}, "The node was low on memory."},
		{corev1.PodStatus{Reason: "x", ContainerStatuses: []corev1.ContainerStatus{{State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 137}}}}}, "x"},
	} {
		if err := failure(&corev1.Pod{Status: c.status}); err.Error() != c.want {
			t.Errorf("%+v: %q, want %q", c.status, err, c.want)
		}
	}
}
