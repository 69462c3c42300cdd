package walk

import (
	"context"
	"errors"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/migrate"
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
		case slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}):
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
	report, failed := "", false
	err = w.await(ctx, func() error {
		p, err := api.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		report = reportOf(p)
		switch p.Status.Phase {
		case corev1.PodSucceeded:
			return nil
		case corev1.PodFailed:
			failed = true
			return nil
		}
		return fmt.Errorf("the Pod %s has not ended: %s %s", p.Name, p.Status.Phase, report)
	})
	if err == nil && failed {
		err = errors.New(report)
	}
	return err
}
