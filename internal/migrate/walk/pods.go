package walk

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/workloads"
)

// podsOf returns the Pods of a DaemonSet on a node.
func (w *Walk) podsOf(ctx context.Context, d *appsv1.DaemonSet, node string) ([]corev1.Pod, error) {
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return nil, err
	}
	list, err := w.Client.CoreV1().Pods(d.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: selector.String() + ",!" + migrate.PodLabel, FieldSelector: "spec.nodeName=" + node,
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

func (w *Walk) podReady(ctx context.Context, d *appsv1.DaemonSet, node string) error {
	pods, err := w.podsOf(ctx, d, node)
	if err != nil {
		return err
	}
	why := fmt.Sprintf("no Pod of %s is there", d.Name)
	for i := range pods {
		p := &pods[i]
		switch {
		case p.DeletionTimestamp != nil:
		case workloads.IsReady(p):
			return nil
		default:
			why = fmt.Sprintf("the Pod %s is not ready: %s %s", p.Name, p.Status.Phase, reportOf(p))
		}
	}
	return errors.New(why)
}

func (w *Walk) podGone(ctx context.Context, d *appsv1.DaemonSet, node string) error {
	pods, err := w.podsOf(ctx, d, node)
	if err == nil && len(pods) > 0 {
		err = fmt.Errorf("the Pod %s still runs", pods[0].Name)
	}
	return err
}

// runPod runs a Pod once and deletes it. Its error is what a Pod that failed reported. A Pod of its name is left of a walk that was
// interrupted.
func (w *Walk) runPod(ctx context.Context, pod *corev1.Pod) (err error) {
	api := w.Client.CoreV1().Pods(pod.Namespace)
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
	if err := w.await(ctx, func() error { return remove(ctx) }); err != nil {
		return err
	}
	if _, err := api.Create(ctx, pod, metav1.CreateOptions{FieldManager: manager}); err != nil {
		return err
	}
	defer func() {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.Timeout)
		defer cancel()
		if gone := w.await(late, func() error { return remove(late) }); err == nil {
			err = gone
		}
	}()
	var ended *corev1.Pod
	err = w.await(ctx, func() error {
		p, err := api.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ended = p; p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			return nil
		}
		return fmt.Errorf("the Pod %s has not ended: %s %s", p.Name, p.Status.Phase, reportOf(p))
	})
	if err == nil && ended.Status.Phase == corev1.PodFailed {
		err = failure(ended)
	}
	return err
}

// failure is why a Pod failed: one that was evicted, or ran too long, may have no container that reported.
func failure(p *corev1.Pod) error {
	return errors.New(cmp.Or(reportOf(p), p.Status.Reason, "the Pod failed without a message"))
}
