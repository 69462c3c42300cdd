package runner_test

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/runner"
)

func failedByDeadline(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed && p.Status.Reason == "DeadlineExceeded"
}

// A Pod that is active longer than activeDeadlineSeconds is ended with its grace period
// and Failed for good, though it restarts always; the deadline may come later.
func TestActiveDeadline(t *testing.T) {
	c := newCluster(t, nil)
	begin := time.Now()
	p := pod("late", `trap 'echo asked; exit 0' TERM; while :; do sleep 0.02; done`)
	p.Spec.ActiveDeadlineSeconds = new(int64(1))
	c.create(p)
	c.create(pod("open", "trap 'exit 0' TERM; while :; do sleep 0.02; done"))
	got := c.until("late", "over its deadline", failedByDeadline)
	if d := time.Since(begin); d < time.Second {
		t.Errorf("failed after %s, before its deadline of 1s", d)
	}
	main := c.record(got, 0)
	s := got.Status.ContainerStatuses[0]
	if main.Process.Alive() || s.State.Terminated == nil || s.Ready || !strings.Contains(got.Status.Message, "deadline") {
		t.Errorf("status %+v, want a container that has ended", got.Status)
	}
	if log := c.logOf(got, 0); !strings.Contains(log, "asked") {
		t.Errorf("log %q, want that of SIGTERM", log)
	}
	if e := c.events("late"); !strings.Contains(e, "Warning DeadlineExceeded") {
		t.Errorf("events %q", e)
	}
	// It stays so when the agent comes back.
	c.stop()
	c.start()
	c.ready("open")
	if p := c.get("late"); !failedByDeadline(p) || p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("after the agent came back: %+v", p.Status)
	}
	// A deadline that comes while the Pod runs.
	if _, err := c.client.CoreV1().Pods("default").Patch(t.Context(), "open", types.MergePatchType,
		[]byte(`{"spec":{"activeDeadlineSeconds":1}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	c.until("open", "over its deadline", failedByDeadline)
}

// A container that waits for its next start at the deadline shows how it ended, as with a kubelet.
func TestActiveDeadlineBetweenTwoStarts(t *testing.T) {
	c := newCluster(t, func(o *runner.Options) { o.BackOff = time.Hour })
	p := pod("crashes", "exit 3")
	p.Spec.ActiveDeadlineSeconds = new(int64(6)) // on a busy machine two starts take two seconds
	c.create(p)
	c.until("crashes", "in its back-off", func(p *corev1.Pod) bool {
		s := p.Status.ContainerStatuses
		return len(s) > 0 && s[0].State.Waiting != nil && s[0].State.Waiting.Reason == "CrashLoopBackOff"
	})
	ended := func(p *corev1.Pod) bool {
		s := p.Status.ContainerStatuses[0].State
		return failedByDeadline(p) && s.Waiting == nil && s.Terminated != nil && s.Terminated.ExitCode == 3
	}
	c.until("crashes", "over its deadline, with the end of its container", ended)
	c.stop()
	c.start()
	c.create(pod("next", "exec sleep 600"))
	c.ready("next")
	if p := c.get("crashes"); !ended(p) {
		t.Errorf("after the agent came back: %+v", p.Status)
	}
}

// A Pod that could not be started is over at its deadline, too.
func TestActiveDeadlineOfAPodThatCannotStart(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("stuck", "exit 0")
	p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "missing"}}}}
	p.Spec.ActiveDeadlineSeconds = new(int64(1))
	c.create(p)
	c.until("stuck", "over its deadline", failedByDeadline)
}
