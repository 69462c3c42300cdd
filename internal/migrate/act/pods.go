package act

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RunPod runs a Pod once and deletes it. Its error is what a Pod that failed reported. A Pod of its name is left of a migration
// that was interrupted.
func (c *Cluster) RunPod(ctx context.Context, pod *corev1.Pod) (err error) {
	api := c.Client.CoreV1().Pods(pod.Namespace)
	remove := func(ctx context.Context) error {
		err := api.Delete(ctx, pod.Name, metav1.DeleteOptions{})
		if err == nil {
			return fmt.Errorf("an earlier Pod %s still ends", pod.Name)
		}
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}
	if err := c.Await(ctx, func() error { return remove(ctx) }); err != nil {
		return err
	}
	if _, err := api.Create(ctx, pod, metav1.CreateOptions{FieldManager: Manager}); err != nil {
		return err
	}
	defer func() {
		if gone := c.Within(context.WithoutCancel(ctx), remove); err == nil {
			err = gone
		}
	}()
	var ended *corev1.Pod
	err = c.Await(ctx, func() error {
		p, err := api.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ended = p; p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			return nil
		}
		return fmt.Errorf("the Pod %s has not ended: %s %s", p.Name, p.Status.Phase, Report(p))
	})
	if err == nil && ended.Status.Phase == corev1.PodFailed {
		err = failure(ended)
	}
	return err
}

// FailedError is why a Pod that ran once failed.
type FailedError struct {
	// ExitCode is its container's, 0 if that did not end by itself.
	ExitCode int32
	// Reported is what its container reported.
	Reported string
}

func (e *FailedError) Error() string { return e.Reported }

// failure is why a Pod failed: one that was evicted, or ran too long, may have no container that reported.
func failure(p *corev1.Pod) error {
	e := &FailedError{Reported: cmp.Or(Report(p), p.Status.Reason, "the Pod failed without a message")}
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Terminated != nil {
			e.ExitCode = s.State.Terminated.ExitCode
		}
	}
	return e
}

// Report is the last line of a container that has failed, or why it has not started, without what a terminal acts on.
func Report(p *corev1.Pod) string {
	return strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return unicode.ReplacementChar
		}
		return c
	}, rawReport(p))
}

func rawReport(p *corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		if t := s.State.Terminated; t != nil {
			lines := strings.Split(strings.TrimSpace(t.Message), "\n")
			return lines[len(lines)-1]
		}
		if wait := s.State.Waiting; wait != nil && wait.Reason != "" {
			return strings.TrimSpace(wait.Reason + " " + wait.Message)
		}
	}
	return p.Status.Message
}
