package walk

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/act"
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
			why = fmt.Sprintf("the Pod %s is not ready: %s %s", p.Name, p.Status.Phase, act.Report(p))
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
